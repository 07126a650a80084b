"""Broadcasts of parameters and optimizer state, and SyncBatchNorm."""

import copy
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import ronde.torch as hvd  # noqa: E402


def same_everywhere(value: Any) -> bool:
    """Whether all ranks hold equal values, tensors inside included."""
    parts = hvd.allgather_object(value)
    return all(equal(parts[0], part) for part in parts)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left, right)
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and left == right


@pytest.mark.ranks(3)
def test_broadcast_parameters() -> None:
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(3, 2).bfloat16())
    model[1].running_mean += rank
    for source in (model.state_dict(), model.named_parameters(), list(model.state_dict().items())):
        hvd.broadcast_parameters(source, 2)
    assert same_everywhere(model.state_dict())
    assert model[1].running_mean[0] == 2
    torch.manual_seed(2)
    assert torch.equal(model[0].weight, torch.nn.Conv2d(2, 3, 3).weight)
    with pytest.raises(TypeError, match="'extra' is a int"):
        hvd.broadcast_parameters({"extra": 3}, 0)
    with pytest.raises(hvd.MismatchError, match="broadcast_parameters.w"):
        hvd.broadcast_parameters({"w": torch.ones(2 + (rank == 1))}, 0)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), capturable=False, foreach=False),
}


def train(model: Any, optimizer: Any, steps: int, distributed: bool) -> None:
    for step in range(steps):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = (model(torch.tensor([step % 4, 1, 2])) ** 2).sum()
            loss.backward()
            return loss

        if distributed:
            optimizer.step(closure)
        else:  # not through hooks: only this rank trains
            optimizer.step(closure)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("start", ["fresh", "root restored", "others restored"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.ranks(2)
def test_broadcast_optimizer_state(kind: str, start: str, wrapped: bool) -> None:
    """T6. Rank 1 is the root."""
    rank, root = hvd.rank(), 1
    torch.manual_seed(rank)
    model = torch.nn.Embedding(4, 3, sparse=kind == "SparseAdam")
    model.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    optimizer.param_groups[0]["lr"] *= rank + 1
    restored = start != "fresh" and (rank == root) == (start == "root restored")
    if restored:
        train(model, optimizer, 3, False)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    weights = copy.deepcopy(model.state_dict())
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root)
    assert equal(model.state_dict(), weights)
    assert same_everywhere(optimizer.state_dict())
    if rank == root:
        assert equal(optimizer.state_dict(), before)
    # It works from there on, equally everywhere.
    hvd.broadcast_parameters(model.state_dict(), root)
    if wrapped:
        train(model, optimizer, 2, True)
        assert same_everywhere(model.state_dict())
        assert same_everywhere(optimizer.state_dict())


@pytest.mark.ranks(2)
def test_broadcast_of_several_optimizers() -> None:
    rank = hvd.rank()
    optimizers = [torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1 + rank + 10 * i) for i in range(2)]
    hvd.broadcast_optimizer_state(optimizers, 0)
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.1, 10.1]
    uneven = torch.optim.SGD([torch.ones(1, requires_grad=True) for _ in range(1 + rank)], lr=0.1)
    with pytest.raises(ValueError, match=r"\[\[1\], \[2\]\]"):
        hvd.broadcast_optimizer_state(uneven, 0)


# ---- SyncBatchNorm (T9) ----


@pytest.mark.parametrize("shape", [(4,), (4, 7), (4, 5, 6)])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.ranks(2)
def test_sync_batch_norm(shape: tuple, momentum: Any) -> None:
    """Batches of 3 and 5 against one process with all 8."""
    rank, rows = hvd.rank(), [3, 5]
    kinds = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}
    synced = hvd.SyncBatchNorm(4, momentum=momentum).double()
    alone = kinds[len(shape)](4, momentum=momentum).double()
    for layer in (synced, alone):
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.0, 2, 3, 4]))
            layer.bias.copy_(torch.tensor([0.5, 0, -1, 2]))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        everything = torch.randn(8, *shape, dtype=torch.float64, generator=generator) * 3 + 100
        weights = torch.randn(8, *shape, dtype=torch.float64, generator=generator)
        own = slice(0, 3) if rank == 0 else slice(3, 8)
        assert everything[own].shape[0] == rows[rank]
        mine, full = everything[own].clone().requires_grad_(), everything.clone().requires_grad_()
        for layer in (synced, alone):
            layer.zero_grad()
        output = synced(mine)
        (output * weights[own]).sum().backward()
        expected = alone(full)
        (expected * weights).sum().backward()
        torch.testing.assert_close(output, expected[own])
        torch.testing.assert_close(mine.grad, full.grad[own])
        for name in ("weight", "bias"):
            total = hvd.allreduce(getattr(synced, name).grad, op=hvd.Sum)
            torch.testing.assert_close(total, getattr(alone, name).grad)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(getattr(synced, name), buffer, msg=name)
    synced.eval()
    alone.eval()
    torch.testing.assert_close(synced(everything[own]), alone(everything[own]))


@pytest.mark.ranks(2)
def test_sync_batch_norm_collectives_and_corner_cases() -> None:
    from ronde import _core

    calls = []
    submit = _core.submit
    _core.submit = lambda *a, **k: calls.append(a[0]) or submit(*a, **k)
    try:
        layer = hvd.SyncBatchNorm(3)
        data = torch.randn(2, 3, requires_grad=True)
        layer(data).sum().backward()
        assert len(calls) == 2  # one forward, one backward
    finally:
        _core.submit = submit
    half = hvd.SyncBatchNorm(3, affine=False, track_running_stats=False)
    result = half((torch.arange(12.0).reshape(4, 3) + 1000 * hvd.rank()).bfloat16())
    assert result.dtype == torch.bfloat16
    assert abs(float(hvd.allreduce(result.float()).mean())) < 0.01
    # A rank with an empty batch takes part.
    data = torch.randn(4, 3) if hvd.rank() == 0 else torch.zeros(0, 3)
    output = hvd.SyncBatchNorm(3)(data)
    if hvd.rank() == 0:
        torch.testing.assert_close(output, torch.nn.BatchNorm1d(3)(data))
    with pytest.raises(ValueError, match="empty batch on every rank"):
        hvd.SyncBatchNorm(3)(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="2 dimensions"):
        hvd.SyncBatchNorm(3)(torch.zeros(3))


@pytest.mark.ranks(2)
def test_parameters_without_names() -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(hvd.rank() + 1)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    assert all((param == 2).all() for param in model.parameters())
    with pytest.raises(TypeError, match="state_dict"):
        hvd.broadcast_parameters(model, root_rank=0)
