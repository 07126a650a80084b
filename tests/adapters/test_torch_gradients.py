"""Gradients that change from step to step, though the optimizer sends them by what it knows of the step before."""

import gc
import weakref
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import ronde.torch as hvd  # noqa: E402

SHAPE = (6, 4)


def weights(rank: int, step: int, shape: Any = SHAPE) -> Any:
    """The gradient of a rank, different everywhere."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 8 + 200 * step + 4 * rank).double().view(shape)


def mean(step: int, shape: Any = SHAPE) -> Any:
    return (weights(0, step, shape) + weights(1, step, shape)) / 2


def make(**options: Any) -> tuple[Any, Any]:
    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    return param, hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("weight", param)], **options)


def backward(param: Any, step: int) -> None:
    (param * weights(hvd.rank(), step, param.shape).to(param.dtype)).sum().backward()


REPLACED: dict[str, Callable[[Any], Any]] = {
    "same": torch.zeros_like,
    "transposed": lambda p: torch.zeros(p.shape[::-1], dtype=p.dtype).t(),
    "strided": lambda p: torch.zeros(2 * p.shape[0], p.shape[1], dtype=p.dtype)[::2],
    "part": lambda p: torch.zeros(p.numel() + 3, dtype=p.dtype)[3:].view(p.shape),
    "negated": lambda p: torch._neg_view(torch.zeros_like(p)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("kind", REPLACED)
def test_a_gradient_that_is_another_tensor(kind: str, as_views: bool) -> None:
    param, optimizer = make(gradient_as_bucket_view=as_views)
    for step in range(6):
        optimizer.zero_grad()
        if step in (2, 3):
            param.grad = REPLACED[kind](param.detach())
        kept = param.grad
        backward(param, step)
        optimizer.synchronize()
        assert torch.equal(param.grad, mean(step))
        if kept is not None and not as_views:
            assert param.grad is kept and torch.equal(kept, mean(step))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2)
def test_a_gradient_that_is_computed_and_then_replaced() -> None:
    """What backward computed has been sent; the result is what the optimizer sees."""
    param, optimizer = make()
    optimizer.step()  # the first step sends by itself
    for step in range(3):
        optimizer.zero_grad()
        backward(param, step)
        sent = param.grad
        param.grad = torch.full(SHAPE, -1.0, dtype=torch.float64)
        optimizer.synchronize()
        assert param.grad is sent and torch.equal(sent, mean(step))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["dtype", "shape", "transposed"])
def test_a_parameter_that_is_replaced(change: str) -> None:
    param, optimizer = make()
    for step in range(5):
        optimizer.zero_grad()
        if step == 2:
            data = param.data
            param.data = {"dtype": data.float(), "shape": data[:3].clone(), "transposed": data.t().contiguous()}[change]
        if step == 4:
            param.data = torch.zeros(SHAPE, dtype=torch.float64)
        backward(param, step)
        optimizer.synchronize()
        assert torch.equal(param.grad.double(), mean(step, param.shape))
        assert param.grad.dtype == param.dtype
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2)
def test_a_parameter_that_one_rank_replaces() -> None:
    param, optimizer = make()
    for step in range(4):
        optimizer.zero_grad()
        whole = param.data
        if step == 2 and hvd.rank() == 1:
            param.data = whole[:3].clone()
        backward(param, step)
        if step == 2:
            with pytest.raises(hvd.MismatchError, match=r"gradient\.[0-9a-f]{8}\.0\.weight"):
                optimizer.synchronize()
            param.data = whole
            param.grad = None
            continue
        optimizer.synchronize()
        assert torch.equal(param.grad, mean(step))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2)
def test_a_hook_that_takes_the_gradient_away() -> None:
    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    takes = [False]

    def take(param: Any) -> None:
        if takes[0]:
            param.grad = None

    param.register_post_accumulate_grad_hook(take)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    for step in range(4):
        takes[0] = step == 2 and hvd.rank() == 1
        optimizer.zero_grad()
        backward(param, step)
        optimizer.synchronize()
        assert torch.equal(param.grad, weights(0, step) / 2 if step == 2 else mean(step))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2)
def test_gradients_that_are_dense_and_sparse_by_turns() -> None:
    table = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0))
    for step in range(6):
        optimizer.zero_grad()
        sparse = step in (2, 3)
        rows = torch.tensor([hvd.rank(), 5])
        torch.nn.functional.embedding(rows, table, sparse=sparse).sum().backward()
        optimizer.synchronize()
        assert table.grad.is_sparse == sparse
        assert (table.grad.to_dense() if sparse else table.grad)[:, 0].tolist() == [0.5, 0.5, 0, 0, 0, 1]
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2)
def test_complex_parameters() -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex128))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            param.grad = torch.zeros(3, dtype=torch.complex128).conj()
        (param * torch.complex(torch.tensor(1.0 + step), torch.tensor(hvd.rank() + 1.0))).real.sum().backward()
        optimizer.step()
        assert torch.equal(param.grad.resolve_conj(), torch.full((3,), 1 + step - 1.5j, dtype=torch.complex128))


@pytest.mark.ranks(2)
def test_results_count_as_changes_in_place() -> None:
    param, optimizer = make()
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        backward(param, step)
        version = param.grad._version
        optimizer.synchronize()
        assert param.grad._version > version
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(3)
def test_a_process_set_that_is_removed() -> None:
    two = hvd.add_process_set([0, 1])
    param, optimizer = make(process_set=two)
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            hvd.remove_process_set(two)
            if hvd.rank() < 2:
                with pytest.raises(ValueError, match=r"cannot be used: give it to add_process_set\(\)"):
                    backward(param, step)
            hvd.add_process_set([1, 2])  # its number is another one's by now, or nobody's
            hvd.add_process_set(two)
        else:
            backward(param, step)
        optimizer.synchronize()
        if hvd.rank() < 2:
            assert torch.equal(param.grad, mean(step))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2, init=False)
def test_an_engine_after_the_other() -> None:
    hvd.init()
    param, optimizer = make()
    for _ in range(3):
        for step in range(2):
            optimizer.zero_grad()
            backward(param, step)
            optimizer.synchronize()
            assert torch.equal(param.grad, mean(step))
            with optimizer.skip_synchronize():
                optimizer.step()
        hvd.shutdown()
        optimizer.zero_grad()
        (param * 2).sum().backward()  # sends nothing
        assert torch.equal(param.grad, torch.full(SHAPE, 2.0, dtype=torch.float64))
        with pytest.raises(hvd.NotInitializedError):
            optimizer.step()
        hvd.init()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_an_optimizer_that_is_dropped_is_gone_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        param, optimizer = make()
        backward(param, 0)
        optimizer.step()
        reducer, gone = weakref.ref(optimizer._reducer), weakref.ref(param)
        del optimizer
        assert reducer() is None
        del param
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"gradient_as_bucket_view": True}, {"groups": 1}], ids=str)
def test_parameters_whose_gradients_share_memory(options: Any) -> None:
    """Autograd gives both parameters views of one tensor: it must be reduced once for each, not twice."""
    a, b = (torch.nn.Parameter(torch.zeros(6)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], **options)
    factor = 2 if options.get("op") == hvd.Sum else 1
    for step in range(6):
        optimizer.zero_grad()
        ((a.view(2, 3) + b.view(2, 3)) * weights(hvd.rank(), step, (2, 3)).float()).sum().backward()
        optimizer.synchronize()
        for param in (a, b):
            assert torch.equal(param.grad.double(), factor * mean(step, (6,)))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_gradient_that_the_backward_pass_still_reads(whole: bool) -> None:
    """What comes later in the backward pass sees the rank's own gradient, not the reduced one."""
    late, early = torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(4 if whole else 2, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([late, early], lr=1.0), [("late", late), ("early", early)])

    def wait(grad: Any) -> Any:
        hvd.barrier()  # meanwhile the early gradient is reduced
        return grad * 1

    for step in range(4):
        optimizer.zero_grad()
        slow = late * 1
        slow.register_hook(wait)
        other = early.view(1, 4, 3) if whole else torch.cat([early, torch.zeros(2, 3)]).view(1, 4, 3)
        ((slow.unsqueeze(0) + other) * weights(hvd.rank(), step, (1, 4, 3)).float()).sum().backward()
        optimizer.synchronize()
        assert torch.equal(late.grad.double(), mean(step, (4, 3)))
        assert torch.equal(early.grad.double(), mean(step, (4, 3))[: len(early)])
        with optimizer.skip_synchronize():
            optimizer.step()
