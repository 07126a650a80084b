"""A rank of training.py: replicas of a model, each trained in its own way, a step at a time."""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import resnet50
import ronde_rank
import torch
import torch.nn.functional as F
import turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ronde.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from torch_mnist import Net, load_digits  # noqa: E402

BATCH = 32
RONDE, DDP, COMPUTE, ALONE = ("ronde", "ronde views"), ("ddp", "ddp views"), "compute", "alone"
STEPS = [*RONDE, *DDP, COMPUTE, ALONE]
_callables: dict[str, Callable[[], Any]] = {}
_models: dict[str, nn.Module] = {}


class Chain(nn.Module):
    """ResNet-50's parameters. A gradient takes one pass over it and is made after those of later parameters."""

    def __init__(self) -> None:
        super().__init__()
        shapes = resnet50.forward_shapes()
        self.weights = nn.ParameterList([nn.Parameter(torch.full(shape, 0.01)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for weight in self.weights:
            total = total + weight.sum() * x
        return total


def chain_losses() -> Callable[[nn.Module], torch.Tensor]:
    x = torch.ones(()) + hvd.rank()
    return lambda model: model(x)


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's training images (n, 1, 28, 28) and labels (n)."""
    x, y, _, _ = load_digits()
    return x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]


def cnn_losses() -> Callable[[nn.Module], torch.Tensor]:
    x, y = digits()
    batches = len(x) // BATCH
    done = 0

    def loss(model: nn.Module) -> torch.Tensor:
        nonlocal done
        batch = slice(done % batches * BATCH, done % batches * BATCH + BATCH)
        done += 1
        return F.cross_entropy(model(x[batch]), y[batch])

    return loss


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Callable[[nn.Module], torch.Tensor]]]] = {
    "resnet50": (Chain, chain_losses),
    "cnn": (Net, cnn_losses),
}


def make_step(label: str, kind: str) -> Callable[[], None]:
    """A replica with the same first weights (and dropout) under every label and on every rank."""
    make_model, make_losses = KINDS[kind]
    torch.manual_seed(1)
    model = make_model()
    if label in DDP:
        model = DistributedDataParallel(model, gradient_as_bucket_view=label.endswith("views"))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if label in RONDE:
        extra = {"gradient_as_bucket_view": True} if label.endswith("views") else {}
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **extra)
    loss = make_losses()

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    _models[label] = model
    step()  # what check_first_step looks at
    return step


def check_first_step() -> None:
    """ronde and DDP agree but for rounding, and differ from training alone."""
    flat = {label: torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for label, model in _models.items()}
    for label in flat:
        if label in RONDE + DDP:
            torch.testing.assert_close(flat[label], flat["ddp"], rtol=1e-4, atol=1e-6, msg=f"{label} differs from ddp")
    if hvd.size() > 1 and torch.equal(flat["ronde"], flat[COMPUTE]):
        raise ValueError("ronde's step did what a step without communication does")


def prepare(case: dict[str, Any]) -> dict[str, Any]:
    _callables.clear()
    _models.clear()
    missing = {}
    for label in STEPS:
        arguments = inspect.signature(hvd.DistributedOptimizer).parameters
        if label == "ronde views" and "gradient_as_bucket_view" not in arguments:
            missing[label] = "DistributedOptimizer has no gradient_as_bucket_view"
        else:
            _callables[label] = make_step(label, case["kind"])
    check_first_step()
    shapes = [tuple(p.shape) for p in _models[COMPUTE].parameters()][::-1]
    gradients = [torch.zeros(shape) for shape in shapes]
    _callables["ronde comm"] = ronde_rank.in_flight(gradients, f"comm.{case['kind']}")
    _callables["gloo comm"] = ronde_rank.gloo_in_flight([torch.zeros(n) for n in resnet50.buckets(shapes)])
    return {"peers": list(_callables), "missing": missing}


def block(peer: str, calls: int) -> list[float]:
    if peer == ALONE:
        return turns.time_block(_callables[peer], lambda: None, calls) if hvd.rank() == 0 else []
    return turns.time_block(_callables[peer], ronde_rank.gloo.barrier, calls)


def weights() -> dict[str, str]:
    """A hash of each distributed model's weights."""
    return {
        label: hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        for label, model in _models.items()
        if label in RONDE + DDP
    }


if __name__ == "__main__":
    ronde_rank.start()
    turns.serve(hvd.rank(), {"prepare": prepare, "block": block, "weights": weights})
    ronde_rank.stop()
