"""The collectives of the base package. What they compute is in tests/adapters/test_conformance.py."""

import array
import subprocess
import sys

import numpy as np
import pytest

import ronde


@pytest.mark.ranks(2)
def test_what_counts_as_a_tensor() -> None:
    rank = ronde.rank()

    def total(value: object) -> np.ndarray:
        result = ronde.allreduce(value, op=ronde.Sum)
        assert isinstance(result, np.ndarray)
        return result

    assert total(rank + 1.5) == 4.0
    assert total([rank, 2]).tolist() == [1, 4]
    assert total(array.array("i", [rank, 5])).tolist() == [1, 10]
    assert total(bytearray([rank, 7])).tolist() == [1, 14]
    assert total(memoryview(np.full((2, 2), rank))).tolist() == [[1, 1], [1, 1]]
    assert total(np.float32(rank)).dtype == np.float32
    assert total(np.array([rank, 3], ">i4")).tolist() == [1, 6]  # the other byte order
    assert total(np.arange(12.0).reshape(3, 4).T[::-1]).tolist() == (2 * np.arange(12.0).reshape(3, 4).T[::-1]).tolist()
    assert total(np.broadcast_to(np.float64(rank), (2, 3))).tolist() == [[1, 1, 1]] * 2
    for wrong in ("text", [object()], np.array(["2020-01-01"], "datetime64[D]"), np.longdouble(1)):
        with pytest.raises(TypeError, match="use one of"):
            total(wrong)


@pytest.mark.ranks(2)
def test_dlpack() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, 2.0]) * (ronde.rank() + 1)
    assert ronde.allreduce(tensor, op=ronde.Sum).tolist() == [3, 6]
    assert ronde.allgather(tensor).tolist() == [1, 2, 2, 4]
    if np.from_dlpack(tensor).flags.writeable:  # since NumPy 2
        ronde.allreduce_(tensor, op=ronde.Sum)
        assert tensor.tolist() == [3, 6]


@pytest.mark.ranks(2)
def test_in_place() -> None:
    rank = ronde.rank()
    base = np.arange(24.0).reshape(4, 6) + 100 * rank
    expected = base.copy()
    expected[::2, 1::2] = 2 * np.arange(24.0).reshape(4, 6)[::2, 1::2] + 100
    view = base[::2, 1::2]
    assert ronde.allreduce_(view, op=ronde.Sum) is view
    np.testing.assert_array_equal(base, expected)  # and nothing around it
    swapped = np.array([1, 2], ">f8") * (rank + 1)
    ronde.broadcast_(swapped, 1)
    assert swapped.tolist() == [2, 4]
    memory = bytearray([rank + 1, 9])
    assert ronde.allreduce_(memory, op=ronde.Sum) is memory
    assert memory == bytearray([3, 18])
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ronde.allreduce_(frozen)
    overlapping = np.lib.stride_tricks.as_strided(np.ones(3), (2, 2), (8, 8))
    with pytest.raises(ValueError, match="overlap"):
        ronde.broadcast_(overlapping, 0)
    assert ronde.allreduce(overlapping).tolist() == [[1, 1], [1, 1]]


@pytest.mark.ranks(2)
def test_results_outlive_their_handles() -> None:
    rank = ronde.rank()
    results = [ronde.allgather(np.full((100, 10), 10 * i + rank)) for i in range(50)]
    for i, result in enumerate(results):
        assert (result[:100] == 10 * i).all()
        assert (result[100:] == 10 * i + 1).all()
    results[0][0, 0] = 5  # writable


class Stubborn:
    def __reduce__(self) -> str:
        raise ValueError("not me")


@pytest.mark.ranks(3)
def test_objects() -> None:
    rank = ronde.rank()
    captured = rank
    assert ronde.broadcast_object({"rank": rank, "data": b"x" * 100_000}, 1) == {"rank": 1, "data": b"x" * 100_000}
    assert ronde.broadcast_object(lambda: captured, 2)() == 2
    assert ronde.broadcast_object(None) is None
    assert ronde.allgather_object("x" * rank * 1000) == ["", "x" * 1000, "x" * 2000]
    with pytest.raises(ValueError, match="rank 1 cannot pickle.*not me"):
        ronde.broadcast_object(Stubborn(), 1)
    with pytest.raises(ValueError, match="rank 2 cannot pickle.*not me"):
        ronde.allgather_object(Stubborn() if rank == 2 else 1)
    assert ronde.allgather_object(rank) == [0, 1, 2]


@pytest.mark.ranks(2)
def test_join() -> None:
    rank = ronde.rank()
    steps = 3 if rank == 0 else 5
    for step in range(steps):
        value = ronde.allreduce(np.array([10.0 + rank]), name=f"step.{step}", op=ronde.Average)
        assert value == ([10.5] if step < 3 else [5.5])  # still divided by the number of all ranks
        lowest = ronde.allreduce(np.array([10.0 + rank]), op=ronde.Min)
        assert lowest == ([10] if step < 3 else [11])
        rows = ronde.allgather(np.full((2, 1), rank))
        assert rows.ravel().tolist() == ([0, 0, 1, 1] if step < 3 else [1, 1])
    assert ronde.join() == 1
    assert ronde.allreduce(np.array([1.0 + rank]), op=ronde.Sum) == [3]


@pytest.mark.ranks(2)
def test_barrier() -> None:
    import time

    if ronde.rank() == 1:
        time.sleep(0.3)
    begin = time.monotonic()
    ronde.barrier()
    assert time.monotonic() - begin > 0.2 or ronde.rank() == 1


@pytest.mark.ranks(2)
def test_large_values_of_16_bits() -> None:
    value = np.array([40000, np.nan, np.inf, -np.inf], np.float16)
    result = ronde.allreduce(value)
    assert result.dtype == np.float16
    assert result[0] == 40000 and np.isnan(result[1]) and result[2] == np.inf and result[3] == -np.inf


def test_import_is_quick_and_brings_no_framework() -> None:
    code = (
        "import sys, time; begin = time.perf_counter(); import ronde; print(time.perf_counter() - begin); "
        "print([m for m in ('numpy', 'torch', 'tensorflow', 'cloudpickle') if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60) for _ in range(3)]
    assert runs[0].returncode == 0, runs[0].stderr
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.15
    assert runs[0].stdout.splitlines()[1] == "[]"


def test_public_names() -> None:
    for name in ronde.__all__:
        if name != "run":
            assert getattr(ronde, name) is not None, name
    assert "allreduce" in dir(ronde)
    with pytest.raises(AttributeError, match="nonsense"):
        ronde.nonsense  # noqa: B018
    assert all(part.isdigit() for part in ronde.__version__.split("."))
    from ronde.common import basics, exceptions, process_sets, util

    assert basics.init is ronde.init
    assert exceptions.HorovodInternalError is ronde.HorovodInternalError
    assert process_sets.ProcessSet is ronde.ProcessSet
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    for name in ("allreduce", "broadcast_", "alltoall", "join", "synchronize"):
        assert getattr(ronde, name).__doc__, name
