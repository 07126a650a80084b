"""The collectives on torch tensors: layouts, gradients, sparse tensors. Plain results: test_conformance.py."""

import subprocess
import sys
import time
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import ronde.torch as hvd  # noqa: E402

DOUBLE = torch.float64


def values(rank: int, *shape: int) -> Any:
    """A tensor whose every element is different, on every rank."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count, dtype=DOUBLE) + 1000 * rank).reshape(shape)


# ---- Layouts (T1) ----


@pytest.mark.ranks(2)
def test_dense_layouts_in_place() -> None:
    rank = hvd.rank()
    makers: dict[str, Callable[[Any], Any]] = {
        "transposed": lambda t: t.transpose(1, 3),
        "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "every second": lambda t: t[:, ::2],
        "reversed rows": lambda t: t.permute(3, 2, 1, 0),
        "one row": lambda t: t[1:2],
        "at an offset": lambda t: t.flatten()[3:],
    }
    for name, make in makers.items():
        tensor, expected = make(values(rank, 2, 4, 3, 5)), make(values(0, 2, 4, 3, 5)) + make(values(1, 2, 4, 3, 5))
        strides, address = tensor.stride(), tensor.data_ptr()
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert torch.equal(tensor, expected), name
        assert (tensor.stride(), tensor.data_ptr()) == (strides, address), name
        tensor = make(values(rank, 2, 4, 3, 5))
        hvd.broadcast_(tensor, 1)
        assert torch.equal(tensor, make(values(1, 2, 4, 3, 5))), name
        assert torch.equal(hvd.allreduce(make(values(rank, 2, 4, 3, 5)), op=hvd.Sum), expected), name


@pytest.mark.ranks(2)
def test_layouts_may_differ_between_ranks() -> None:
    tensor = values(hvd.rank(), 2, 4, 3, 5)
    if hvd.rank() == 1:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    assert torch.equal(hvd.allreduce_(tensor, op=hvd.Sum), values(0, 2, 4, 3, 5) + values(1, 2, 4, 3, 5))


@pytest.mark.ranks(2)
def test_the_surroundings_of_a_view_stay() -> None:
    base = values(hvd.rank(), 6, 6)
    expected = base.clone()
    expected[1:5:2, ::3] = (values(0, 6, 6) + values(1, 6, 6))[1:5:2, ::3]
    hvd.allreduce_(base[1:5:2, ::3], op=hvd.Sum)
    assert torch.equal(base, expected)


@pytest.mark.ranks(2)
def test_expanded() -> None:
    expanded = torch.full((1, 3), 1.0 + hvd.rank()).expand(4, 3)
    for call in (
        lambda: hvd.allreduce_(expanded),
        lambda: hvd.broadcast_(expanded, 0),
        lambda: hvd.grouped_allreduce_([expanded]),
        lambda: hvd.allreduce_(torch.ones(5).as_strided((3, 3), (1, 1))),
    ):
        with pytest.raises(ValueError, match="overlap"):
            call()
    assert hvd.allreduce(expanded, op=hvd.Sum).tolist() == [[3.0] * 3] * 4
    assert hvd.broadcast(expanded, 1).tolist() == [[2.0] * 3] * 4
    one = torch.full((1,), 1.0).expand(1)
    assert hvd.allreduce_(one, op=hvd.Sum) == 2


@pytest.mark.ranks(2)
def test_conjugate_and_negative_views() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [2 - 4j, 6 + 8j]
    imaginary = torch.tensor([1 + 2j]).conj().imag  # a view that is negated when it is read
    assert hvd.allreduce(imaginary, op=hvd.Sum).tolist() == [-4]
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert tensor.tolist() == [2 - 4j, 6 + 8j]


@pytest.mark.ranks(2)
def test_wrong_tensors() -> None:
    with pytest.raises(TypeError, match="list"):
        hvd.allreduce([1.0])
    with pytest.raises(TypeError, match="sparse_allreduce_async"):
        hvd.allreduce(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="float8"):
        hvd.allreduce(torch.ones(3).to(torch.float8_e4m3fn))


@pytest.mark.ranks(2)
def test_in_place_is_seen_by_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    hvd.broadcast_(weight, 0)  # a leaf that requires a gradient: allowed, as parameters are
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- Gradients ----


def gradient_of(operation: Callable[[Any], Any], *shape: int) -> tuple[Any, Any]:
    """The result, and the gradient of sum(result * weights) for weights that differ on every rank and index."""
    tensor = values(hvd.rank(), *shape).requires_grad_()
    result = operation(tensor)
    weights = values(hvd.rank() + 5, *result.shape)
    (result * weights).sum().backward()
    return result.detach(), tensor.grad


@pytest.mark.ranks(2)
def test_gradients() -> None:
    """Against autograd in one process, on the sum of all ranks' losses."""
    rank, size = hvd.rank(), hvd.size()
    rows = [3, 2]  # of each rank, where they may differ
    splits = [[1, 2], [2, 0]]
    ranges = [(0, 2), (2, 3)]  # of 3 rows, reduced and scattered

    def split(inputs: list[Any], to: int) -> Any:
        pieces = [torch.split(t, s)[to] for t, s in zip(inputs, splits)]
        return torch.cat(pieces)

    cases: dict[str, tuple[Callable[[Any], Any], Callable[[list[Any], int], Any], list[int]]] = {
        "allreduce sum": (lambda t: hvd.allreduce(t, op=hvd.Sum), lambda ts, r: ts[0] + ts[1], [3, 3]),
        "allreduce average": (lambda t: hvd.allreduce(t), lambda ts, r: (ts[0] + ts[1]) / 2, [3, 3]),
        "allreduce scaled": (
            lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
            lambda ts, r: 1.5 * (ts[0] + ts[1]),
            [3, 3],
        ),
        "grouped": (
            lambda t: torch.cat(hvd.grouped_allreduce([t, 2 * t], name="g")),
            lambda ts, r: torch.cat([ts[0] + ts[1], 2 * (ts[0] + ts[1])]) / 2,
            [3, 3],
        ),
        "allgather": (lambda t: hvd.allgather(t), lambda ts, r: torch.cat(ts), rows),
        "grouped allgather": (
            lambda t: torch.cat(hvd.grouped_allgather([t, t[:1]])),
            lambda ts, r: torch.cat([*ts, *(t[:1] for t in ts)]),
            rows,
        ),
        "broadcast": (lambda t: hvd.broadcast(t, 1), lambda ts, r: ts[1] * 1.0, [3, 3]),
        "alltoall": (lambda t: hvd.alltoall(t), lambda ts, r: torch.cat([t.chunk(2)[r] for t in ts]), [4, 4]),
        "alltoall ragged": (lambda t: hvd.alltoall(t, splits[rank])[0], split, rows),
        "reducescatter sum": (
            lambda t: hvd.reducescatter(t, op=hvd.Sum),
            lambda ts, r: (ts[0] + ts[1])[slice(*ranges[r])],
            [3, 3],
        ),
        "reducescatter average, scaled": (
            lambda t: hvd.reducescatter(t, op=hvd.Average, prescale_factor=3.0, postscale_factor=0.25),
            lambda ts, r: 0.375 * (ts[0] + ts[1])[slice(*ranges[r])],
            [3, 3],
        ),
    }
    for name, (distributed, together, lengths) in cases.items():
        result, grad = gradient_of(distributed, lengths[rank], 2)
        inputs = [values(r, lengths[r], 2).requires_grad_() for r in range(size)]
        results = [together(inputs, r) for r in range(size)]
        sum((res * values(r + 5, *res.shape)).sum() for r, res in enumerate(results)).backward()
        torch.testing.assert_close(result, results[rank].detach(), msg=name)
        assert grad is not None, name
        own = inputs[rank].grad if inputs[rank].grad is not None else torch.zeros_like(inputs[rank])
        torch.testing.assert_close(grad, own, rtol=1e-12, atol=0, msg=name)


@pytest.mark.ranks(2)
def test_gradient_details() -> None:
    tensor = torch.tensor([3.0, 4.0], requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    with pytest.raises(ValueError, match="gradient"):
        hvd.allreduce(tensor, op=hvd.Max).sum().backward()
    # Through compression, and twice.
    (grad,) = torch.autograd.grad(hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16).sum(), tensor)
    assert grad.tolist() == [2, 2] and grad.dtype == torch.float32
    (first,) = torch.autograd.grad((hvd.allreduce(tensor, op=hvd.Sum) ** 2).sum(), tensor, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), tensor)
    assert second.tolist() == [8, 8]  # 2 x^2 summed over two ranks, each with x = 2 t


# ---- Sparse ----


def sparse(rank: int, rows: list[int], size: int, width: int = 3) -> Any:
    block = values(rank, len(rows), width)
    return torch.sparse_coo_tensor(torch.tensor([rows]), block, (size, width))


@pytest.mark.parametrize("size", [5, 1000])  # of the smaller one the second is sent as a dense tensor
@pytest.mark.ranks(2)
def test_sparse_allreduce(size: int) -> None:
    hvd_size = 2
    rows = [[0, 3, 0, 4, 1, 2], [3, 1, 2, 2, 0, 4]]
    both = [sparse(r, rows[r], size) for r in range(hvd_size)]
    expected = both[0].to_dense() + both[1].to_dense()
    from ronde import _core

    sent = []
    submit = _core.submit
    _core.submit = lambda op, *a, **k: sent.append(op) or submit(op, *a, **k)
    try:
        for second in ("allgather", "allreduce" if size == 5 else "allgather"):
            handle = hvd.sparse_allreduce_async(both[hvd.rank()], name="s", op=hvd.Sum)
            result = hvd.synchronize(handle)
            assert hvd.poll(handle)
            assert sent == [_core.OPS["allgather"], _core.OPS[second]]
            assert result.is_sparse and result.is_coalesced()
            assert result.indices().tolist() == [[0, 1, 2, 3, 4]]
            assert torch.equal(result.to_dense(), expected)
            sent.clear()
    finally:
        _core.submit = submit
    average = hvd.synchronize(hvd.sparse_allreduce_async(both[hvd.rank()]))
    assert torch.equal(average.to_dense(), expected / 2)


@pytest.mark.parametrize("names", [("a", "b"), (None, None)])
@pytest.mark.ranks(2)
def test_ranks_wait_for_sparse_operations_in_different_orders(names: Any) -> None:
    rank = hvd.rank()
    for _ in range(3):  # the later ones of a name are sent as dense tensors
        tensors = [torch.sparse_coo_tensor([[0]], [value * (rank + 1)], (1,)) for value in (1.0, 100.0)]
        a, b = [hvd.sparse_allreduce_async(each, name, op=hvd.Sum) for each, name in zip(tensors, names)]
        if rank == 0:
            x = hvd.synchronize(a)
        gathered = hvd.allgather_async(torch.tensor([7.0 + rank]))
        y = hvd.synchronize(b)
        assert hvd.synchronize(gathered).tolist() == [7, 8]
        if rank == 1:
            time.sleep(0.05)
            x = hvd.synchronize(a)
        assert (x.to_dense().item(), y.to_dense().item()) == (3, 300)


@pytest.mark.ranks(2)
def test_sparse_corner_cases() -> None:
    rank = hvd.rank()
    nothing = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3), (9, 3))
    some = torch.sparse_coo_tensor(torch.tensor([[4]]), torch.ones(1, 3), (9, 3))
    result = hvd.synchronize(hvd.sparse_allreduce_async(some if rank else nothing, op=hvd.Sum))
    assert result.to_dense().sum() == 3 and result.indices().tolist() == [[4]]
    assert hvd.synchronize(hvd.sparse_allreduce_async(nothing))._nnz() == 0
    matrix = torch.eye(20).to_sparse() * (rank + 1)  # two sparse dimensions
    assert torch.equal(hvd.synchronize(hvd.sparse_allreduce_async(matrix, op=hvd.Sum)).to_dense(), 3 * torch.eye(20))
    with pytest.raises(ValueError, match="Sum"):
        hvd.sparse_allreduce_async(matrix, op=hvd.Max)
    with pytest.raises(TypeError, match="sparse"):
        hvd.sparse_allreduce_async(torch.ones(3))


@pytest.mark.ranks(3)
def test_the_gradient_of_an_allgather_without_a_rank_that_has_joined() -> None:
    rank = hvd.rank()
    if rank == 0:
        hvd.join()
        return
    x = torch.full((2,), float(rank), dtype=torch.float64, requires_grad=True)
    gathered = hvd.allgather(x)
    assert gathered.tolist() == [1, 1, 2, 2]
    (gathered * torch.arange(1, 5) * rank).sum().backward()
    assert x.grad.tolist() == [[3, 6], [9, 12]][rank - 1]
    hvd.join()


# ---- Import ----


def test_without_torch() -> None:
    """I3: the error names what is missing."""
    code = "import sys; sys.modules['torch'] = None\ntry:\n    import ronde.torch\nexcept ImportError as e:\n    print(e.name, e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("torch ") and "PyTorch" in done.stdout, done.stderr
    assert "compil" not in done.stdout


def test_module_paths() -> None:
    import ronde
    from ronde.torch import compression, functions, mpi_ops, optimizer

    assert mpi_ops.allreduce_async_ is hvd.allreduce_async_ and hvd.mpi_ops is mpi_ops
    assert compression.Compression is hvd.Compression
    assert functions.broadcast_parameters is hvd.broadcast_parameters
    assert optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd.init is ronde.init and hvd.Sum == ronde.Sum
    for name in hvd.__all__:
        if name != "run":
            assert hasattr(hvd, name), name
