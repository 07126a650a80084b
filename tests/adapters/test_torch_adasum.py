"""DistributedOptimizer(op=Adasum): what it computes equals a simulation of all ranks in NumPy."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ronde.torch as hvd  # noqa: E402

LR, MOMENTUM, DECAY = 0.1, 0.9, 0.01
SHAPES = [(5, 3), (3,), (70, 80)]  # the last one is not small: it is split among the ranks


def make_params(dtype: Any = torch.float64) -> list[Any]:
    return [
        torch.nn.Parameter(torch.from_numpy(np.random.default_rng(t).standard_normal(shape)).to(dtype))
        for t, shape in enumerate(SHAPES)
    ]


def gradient(rank: int, step: int, tensor: int) -> np.ndarray:
    return np.random.default_rng([rank, step, tensor]).standard_normal(SHAPES[tensor])


def backward(params: list[Any], rank: int, step: int) -> None:
    loss = sum((torch.from_numpy(gradient(rank, step, t)).to(p.dtype) * p).sum() for t, p in enumerate(params))
    loss.backward()  # type: ignore[union-attr]


def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, a_square, b_square = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    if a_square == 0 or b_square == 0:
        return a + b
    return (1 - dot / (2 * a_square)) * a + (1 - dot / (2 * b_square)) * b


class Simulation:
    """SGD with momentum and weight decay on every rank, and Adasum of what it has moved since the last time."""

    def __init__(self, ranks: int = 2) -> None:
        self.start = [each.detach().numpy().copy() for each in make_params()]
        self.ranks = [copy.deepcopy(self.start) for _ in range(ranks)]
        self.momentum: list[list[Any]] = [[None] * len(SHAPES) for _ in range(ranks)]

    def step(self, rank: int, grads: list[np.ndarray]) -> None:
        for t, grad in enumerate(grads):
            grad = grad + DECAY * self.ranks[rank][t]
            before = self.momentum[rank][t]
            self.momentum[rank][t] = grad if before is None else MOMENTUM * before + grad
            self.ranks[rank][t] = self.ranks[rank][t] - LR * self.momentum[rank][t]

    def reduce(self) -> None:
        for t, start in enumerate(self.start):
            start = start + combine(*(each[t] - start for each in self.ranks))
            self.start[t] = start
            for each in self.ranks:
                each[t] = start.copy()


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def grads_of(rank: int, step: int) -> list[np.ndarray]:
    return [gradient(rank, step, t) for t in range(len(SHAPES))]


def check(params: list[Any], simulation: Simulation) -> None:
    for param, wanted in zip(params, simulation.start):
        np.testing.assert_allclose(param.detach().numpy(), wanted, rtol=0, atol=1e-10)
    assert_equal_everywhere(params)


def assert_equal_everywhere(params: list[Any]) -> None:
    mine = [param.detach().to(torch.float64).numpy().tobytes() for param in params]
    assert all(other == mine for other in hvd.allgather_object(mine))


@pytest.mark.ranks(2)
def test_momentum_and_weight_decay() -> None:
    rank, params, simulation = hvd.rank(), make_params(), Simulation()
    names = [(f"layer.{t}", param) for t, param in enumerate(params)]
    # Two groups of parameters, with options of their own.
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": LR}]
    optimizer = hvd.DistributedOptimizer(sgd(groups), named_parameters=names, op=hvd.Adasum)
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for step in range(6):
        optimizer.zero_grad()
        backward(params, rank, step)
        optimizer.step()
        scheduler.step()
        for r in range(2):
            simulation.step(r, grads_of(r, step))
        simulation.reduce()
        check(params, simulation)
    mine = optimizer.state[params[0]]["momentum_buffer"].numpy()
    np.testing.assert_allclose(mine, simulation.momentum[rank][0], rtol=0, atol=1e-10)  # each rank has its own


@pytest.mark.ranks(2)
def test_several_passes_in_one_step() -> None:
    rank, params, simulation = hvd.rank(), make_params(), Simulation()
    optimizer = hvd.DistributedOptimizer(sgd(params), backward_passes_per_step=3, op=hvd.Adasum)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            backward(params, rank, 3 * step + part)
        optimizer.step()
        for r in range(2):
            parts = [grads_of(r, 3 * step + part) for part in range(3)]
            simulation.step(r, [np.sum(each, axis=0) for each in zip(*parts)])
        simulation.reduce()
        check(params, simulation)


@pytest.mark.ranks(2)
def test_several_steps_before_a_reduction() -> None:
    rank, params, simulation = hvd.rank(), make_params(), Simulation()
    optimizer = hvd.DistributedOptimizer(sgd(params), backward_passes_per_step=3, op=hvd.Adasum)
    for step in range(8):
        optimizer.zero_grad()
        backward(params, rank, step)
        optimizer.step()
        for r in range(2):
            simulation.step(r, grads_of(r, step))
        if step % 3 == 2:
            simulation.reduce()
            check(params, simulation)
        else:
            np.testing.assert_allclose(params[0].detach().numpy(), simulation.ranks[rank][0], rtol=0, atol=1e-10)
    optimizer.synchronize()  # two steps were waiting for a third
    simulation.reduce()
    check(params, simulation)
    optimizer.synchronize()  # nothing more
    check(params, simulation)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    backward(params, rank, 9)
    optimizer.step()
    for r in range(2):
        simulation.step(r, grads_of(r, 9))
    simulation.reduce()
    check(params, simulation)


@pytest.mark.ranks(2)
def test_a_rank_without_gradients_and_clipping() -> None:
    rank, params, simulation = hvd.rank(), make_params(), Simulation()
    optimizer = hvd.DistributedOptimizer(sgd(params), backward_passes_per_step=2, op=hvd.Adasum)
    optimizer.zero_grad()
    if rank == 0:
        backward(params, 0, 0)
        backward(params, 0, 1)
    optimizer.synchronize()  # as scripts do that clip
    for param in params:
        if param.grad is not None:
            param.grad.clamp_(-0.5, 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    simulation.step(0, [np.clip(a + b, -0.5, 0.5) for a, b in zip(grads_of(0, 0), grads_of(0, 1))])
    simulation.reduce()
    check(params, simulation)


@pytest.mark.ranks(2)
def test_closures_are_the_ranks_own() -> None:
    """LBFGS evaluates as often as it wants to, differently on each rank."""
    params = make_params()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(params, max_iter=3 + hvd.rank()), op=hvd.Adasum)
    target = float(hvd.rank() + 1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum(((param - target) ** 2).sum() for param in params)
        loss.backward()  # type: ignore[union-attr]
        return loss

    first = float(optimizer.step(closure))
    assert_equal_everywhere(params)
    assert float(closure()) < first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.ranks(2)
def test_adam_frozen_parameters_and_compression(dtype: str) -> None:
    rank, params = hvd.rank(), make_params(getattr(torch, dtype))
    params[1].requires_grad_(False)
    frozen = params[1].detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(params, lr=0.01), compression=hvd.Compression.bf16, op=hvd.Adasum
    )
    starts = [param.detach().clone() for param in params]
    for step in range(3):
        optimizer.zero_grad()
        backward(params, rank, step)
        optimizer.step()
        assert_equal_everywhere(params)
    assert torch.equal(params[1], frozen)
    assert not torch.equal(params[0], starts[0])
    params[1].requires_grad_(True)  # unfrozen on all ranks
    optimizer.zero_grad()
    backward(params, rank, 3)
    optimizer.step()
    assert_equal_everywhere(params)
    assert not torch.equal(params[1], frozen)


@pytest.mark.ranks(2)
def test_state_copies_and_new_groups() -> None:
    rank, params = hvd.rank(), make_params()
    optimizer = hvd.DistributedOptimizer(sgd(params[:2]), op=hvd.Adasum)
    optimizer.add_param_group({"params": params[2:], "lr": 0.05})
    backward(params, rank, 0)
    optimizer.step()
    assert_equal_everywhere(params)
    plain = pickle.loads(pickle.dumps(optimizer))
    assert type(plain) is torch.optim.SGD
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    buffers = [optimizer.state[param]["momentum_buffer"] for param in params]
    assert_equal_everywhere(buffers)
    np.testing.assert_allclose(
        buffers[0].numpy(), gradient(1, 0, 0) + DECAY * make_params()[0].detach().numpy(), atol=1e-10
    )
    state = optimizer.state_dict()
    again = hvd.DistributedOptimizer(sgd([{"params": params[:2]}, {"params": params[2:]}]), op=hvd.Adasum)
    again.load_state_dict(state)
    assert [group["lr"] for group in again.param_groups] == [LR, 0.05]
    again.zero_grad()
    backward(params, rank, 1)
    again.step()
    assert_equal_everywhere(params)


@pytest.mark.ranks(3)
def test_process_set() -> None:
    ends = hvd.add_process_set([0, 2])
    rank, params, simulation = hvd.rank(), make_params(), Simulation()
    optimizer = hvd.DistributedOptimizer(sgd(params), op=hvd.Adasum, process_set=ends)
    for step in range(2):
        optimizer.zero_grad()
        backward(params, rank, step)
        optimizer.step()
        for number, r in enumerate([0, 2] if rank != 1 else [1, 1]):  # outside: as if it were not distributed
            simulation.step(number, grads_of(r, step))
        simulation.reduce()
        for param, wanted in zip(params, simulation.start):
            np.testing.assert_allclose(param.detach().numpy(), wanted, rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_sparse_gradients() -> None:
    table = torch.nn.Embedding(50, 4, sparse=True)
    torch.nn.init.constant_(table.weight, 1.0)
    rows = torch.tensor([hvd.rank(), 10 + hvd.rank()])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Adasum)
    table(rows).sum().backward()
    with pytest.raises(ValueError, match=r"'parameter.0' is sparse.*sparse_as_dense=True"):
        optimizer.step()
    dense = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=True, op=hvd.Adasum)
    dense.step()
    moved = {0, 1, 10, 11}  # orthogonal steps add up
    assert [row for row in range(50) if not torch.equal(table.weight[row], torch.ones(4))] == sorted(moved)
    assert_equal_everywhere([table.weight])


@pytest.mark.ranks(2)
def test_arguments() -> None:
    params = make_params()

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(sgd(params), op=hvd.Adasum, **options)

    with pytest.raises(ValueError, match="gradient_predivide_factor needs op=Average"):
        make(gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups: with op=Adasum"):
        make(groups=2)
    with pytest.raises(ValueError, match="come more than once: a"):
        make(named_parameters=[("a", params[0]), ("a", params[1])])
    with pytest.raises(ValueError, match="backward_passes_per_step is 0"):
        make(backward_passes_per_step=0)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(make())
    whole = [torch.nn.Parameter(torch.arange(3), requires_grad=False)]  # not trained: nothing to combine
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(whole, lr=1.0), op=hvd.Adasum)
    optimizer.step()
    complex_params = [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(complex_params, lr=1.0), op=hvd.Adasum)
    with pytest.raises(ValueError, match="adasum is not defined for complex64"):
        optimizer.step()


@pytest.mark.ranks(1)
def test_one_rank_is_its_own_optimizer() -> None:
    params, plain = make_params(torch.float32), make_params(torch.float32)
    optimizer, reference = hvd.DistributedOptimizer(sgd(params), op=hvd.Adasum), sgd(plain)
    for step in range(3):
        for each, by in ((params, optimizer), (plain, reference)):
            by.zero_grad()
            backward(each, 0, step)
            by.step()
    for got, wanted in zip(params, plain):
        assert torch.equal(got, wanted)
