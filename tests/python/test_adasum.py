"""Adasum through the Python functions, against its definition in NumPy."""

from typing import Any

import numpy as np
import pytest

import ronde

TOLERANCE = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-12}
SIZES = [1, 7, 4096, 10_001, 300_000]  # one owner, several, more than a chunk


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Neighbours are combined level by level; an odd last one moves up."""
    while len(vectors) > 1:
        pairs = [combine(*vectors[i : i + 2]) for i in range(0, len(vectors) - 1, 2)]
        vectors = pairs + vectors[2 * len(pairs) :]
    return vectors[0]


def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, a_square, b_square = (float((x.ravel() * y.ravel()).sum()) for x, y in ((a, b), (a, a), (b, b)))
    if a_square == 0 or b_square == 0:
        return a + b
    return (1 - dot / (2 * a_square)) * a + (1 - dot / (2 * b_square)) * b


def values(rank: int, tensor: int, size: int, dtype: str = "float32") -> np.ndarray:
    return (np.random.default_rng([rank, tensor, size]).random(size) * 2 - 0.7).astype(dtype)


def expected(tensor: int, size: int, dtype: str = "float32", ranks: Any = None) -> np.ndarray:
    return adasum([values(r, tensor, size, dtype).astype("float64") for r in ranks or range(ronde.size())])


def check(got: np.ndarray, wanted: np.ndarray, dtype: str = "float32") -> None:
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got.astype("float64"), wanted, rtol=0, atol=TOLERANCE[dtype] * max(1, np.abs(wanted).max())
    )
    everywhere = ronde.allgather_object(got.tobytes())
    assert all(bits == got.tobytes() for bits in everywhere)


def every_form() -> None:
    rank = ronde.rank()
    for dtype in TOLERANCE:
        for tensor, size in enumerate(SIZES):
            given = values(rank, tensor, size, dtype)
            wanted = expected(tensor, size, dtype)
            result = ronde.allreduce(given, op=ronde.Adasum)
            check(result, wanted, dtype)
            np.testing.assert_array_equal(given, values(rank, tensor, size, dtype))  # unchanged
            handle = ronde.allreduce_async(given, op=ronde.Adasum, name=f"adasum.{dtype}.{size}")
            np.testing.assert_array_equal(ronde.synchronize(handle), result)
            assert ronde.allreduce_(given, op=ronde.Adasum) is given
            np.testing.assert_array_equal(given, result)
            total = ronde.allreduce(np.full(70_000, rank + 1.0), op=ronde.Sum)  # chunks are still counted alike
            np.testing.assert_array_equal(total, np.full(70_000, sum(range(1, ronde.size() + 1))))
        tensors = [values(rank, t, size, dtype) for t, size in enumerate(SIZES)]
        alone = [ronde.allreduce(each, op=ronde.Adasum) for each in tensors]
        together = ronde.grouped_allreduce(tensors, op=ronde.Adasum)
        started = [ronde.allreduce_async(each, op=ronde.Adasum, name=f"{t}") for t, each in enumerate(tensors)]
        for one, grouped, handle in zip(alone, together, started):
            np.testing.assert_array_equal(one, grouped)  # also fused with others: each tensor by itself
            np.testing.assert_array_equal(one, ronde.synchronize(handle))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.ranks()
def test_every_form_and_dtype(size: int) -> None:
    every_form()


@pytest.mark.ranks(3, env={"RONDE_TRANSPORT": "tcp"})
def test_every_form_and_dtype_over_sockets() -> None:
    every_form()


@pytest.mark.ranks(2)
def test_scales() -> None:
    for size in (5, 9000):
        given = values(ronde.rank(), 0, size)
        result = ronde.allreduce(given, op=ronde.Adasum, prescale_factor=0.5, postscale_factor=-6.0)
        check(result, -3 * expected(0, size))


@pytest.mark.ranks(3)
def test_process_set() -> None:
    ends = ronde.add_process_set([0, 2])
    for size in (5, 9000):
        given = values(ronde.rank(), 0, size)
        if ends.included():
            result = ronde.allreduce(given, op=ronde.Adasum, process_set=ends)
            np.testing.assert_allclose(result, expected(0, size, ranks=[0, 2]), rtol=0, atol=2e-6)
        check(ronde.allreduce(given, op=ronde.Adasum), expected(0, size))  # rank 1 has counted, too


@pytest.mark.ranks(3)
def test_join() -> None:
    rank = ronde.rank()
    for step in range(rank + 1):
        for size in (5, 9000):
            result = ronde.allreduce(values(rank, step, size), op=ronde.Adasum, name=f"{step}.{size}")
            np.testing.assert_allclose(result, expected(step, size, ranks=range(step, 3)), rtol=0, atol=3e-6)
    assert ronde.join() == 2


@pytest.mark.ranks(2)
def test_what_is_refused() -> None:
    for dtype in ("int32", "uint8", "bool", "complex64"):
        with pytest.raises(ValueError, match=f"adasum is not defined for {dtype}"):
            ronde.allreduce(np.ones(3, dtype), op=ronde.Adasum)
    with pytest.raises(ValueError, match="adasum is a reduction of allreduce only"):
        ronde.reducescatter(np.ones(4), op=ronde.Adasum)
    check(ronde.allreduce(np.ones(3), op=ronde.Adasum), np.ones(3), "float64")  # equal vectors: their mean
