"""One suite for all frontends: every operation x dtype x shape against a computation of its own.

A frontend's test file makes a Face and calls these functions on ranks. Each (rank, tensor, index) has a value of its
own; expected values are computed here from all ranks' inputs, in 64 bits.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, Optional

import numpy as np

SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (7,), (3, 5), (2, 3, 4), (4097,)]
EXACT = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"}
SMALL = {"uint8", "int8", "float16", "bfloat16"}  # hold whole numbers up to 127 only
COMPLEX = {"complex64", "complex128"}


@dataclass
class Face:
    """A frontend as the suite sees it."""

    module: ModuleType
    dtypes: list[str]
    make: Callable[[np.ndarray, str], Any]  # float64 or complex128 values and the dtype's name -> tensor
    read: Callable[[Any], np.ndarray]  # -> float64, int64 or complex128
    dtype_of: Callable[[Any], str]
    has_handles: bool = True  # operations that can be started and waited for
    in_place: bool = True  # operations that write into their tensors
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the suite runs


def values(rank: int, tensor: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What a rank puts in: whole numbers that the dtype holds exactly, and sums of three ranks', too."""
    index = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    if dtype == "bool":
        return ((index // 2**rank + tensor) % 2).astype(np.float64)
    if dtype in SMALL:
        return ((index * 3 + rank * 11 + tensor * 5) % 42).astype(np.float64)
    if dtype == "uint16" or dtype == "int16":
        return ((index * 7 + rank * 1013 + tensor * 31) % 9001).astype(np.float64)
    whole = (index + rank * 100_000 + tensor * 10_000).astype(np.float64)
    return whole + 1j * (whole + 0.5) if dtype in COMPLEX else whole


def reduced(face: Face, op: Any, inputs: list[np.ndarray], dtype: str) -> np.ndarray:
    """The reduction of all ranks' inputs."""
    hvd, stack = face.module, np.stack(inputs)
    if dtype == "bool":
        return (stack.any(0) if op in (hvd.Sum, hvd.Max) else stack.all(0)).astype(np.float64)
    if op == hvd.Average:
        return stack.sum(0) // len(inputs) if dtype in EXACT else stack.sum(0) / len(inputs)
    return {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}[op](stack, axis=0)


def check(face: Face, result: Any, expected: np.ndarray, dtype: str, what: object) -> None:
    assert face.dtype_of(result) == dtype, what
    got = face.read(result)
    assert got.shape == expected.shape, what
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "complex64": 1e-6}.get(dtype, 1e-15)
    np.testing.assert_allclose(got, expected, rtol=0 if dtype in EXACT else tolerance, err_msg=str(what))


def ops_of(face: Face, dtype: str) -> list[Any]:
    hvd = face.module
    if dtype == "bool":
        return [hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
    if dtype in COMPLEX:
        return [hvd.Sum, hvd.Average]
    return [hvd.Sum, hvd.Average, hvd.Min, hvd.Max]


def allreduce(face: Face) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    for dtype in face.dtypes:
        for shape in SHAPES:
            inputs = [values(r, 0, shape, dtype) for r in range(size)]
            for op in ops_of(face, dtype):
                what = f"allreduce {op} {dtype} {shape}"
                given = face.make(inputs[rank], dtype)
                expected = reduced(face, op, inputs, dtype)
                check(face, hvd.allreduce(given, op=op), expected, dtype, what)
                check(face, given, inputs[rank], dtype, f"{what}: input")  # unchanged
                if face.has_handles:
                    check(face, hvd.synchronize(hvd.allreduce_async(given, op=op, name=what)), expected, dtype, what)
                if not face.in_place:
                    continue
                assert hvd.allreduce_(given, op=op) is given
                check(face, given, expected, dtype, f"{what} in place")


def product_and_scales(face: Face) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    for dtype in face.dtypes:
        if dtype in {"bool"} | COMPLEX:
            continue
        inputs = [(np.arange(9) + r) % 3 + 1.0 for r in range(size)]
        given = face.make(inputs[rank], dtype)
        check(face, hvd.allreduce(given, op=hvd.Product), np.prod(inputs, axis=0), dtype, f"product {dtype}")
        result = hvd.allreduce(given, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
        check(face, result, 6 * np.sum(inputs, axis=0), dtype, f"scaled {dtype}")


def adasum(face: Face) -> None:
    """Each rank's vector has a part of its own, which is added, and all share one, which is averaged."""
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    own, shared = np.zeros((size, 3)), np.array([3.0, -1.5])
    own[rank] = [1.0, 2.0, -0.5]
    for dtype in [name for name in face.dtypes if name in ("float16", "bfloat16", "float32", "float64")]:
        given = face.make(own, dtype)
        check(face, hvd.allreduce(given, op=hvd.Adasum), np.tile(own[rank], (size, 1)), dtype, f"orthogonal {dtype}")
        results = hvd.grouped_allreduce([given, face.make(shared, dtype)], op=hvd.Adasum, name=f"adasum.{dtype}")
        check(face, results[0], np.tile(own[rank], (size, 1)), dtype, f"grouped {dtype}")
        check(face, results[1], shared, dtype, f"parallel {dtype}")


def grouped_allreduce(face: Face) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    rows = [(dtype, shape) for dtype in face.dtypes if dtype != "bool" for shape in SHAPES[:5]]
    inputs = [[values(r, t, shape, dtype) for r in range(size)] for t, (dtype, shape) in enumerate(rows)]
    given = [face.make(each[rank], dtype) for each, (dtype, _) in zip(inputs, rows)]
    expected = [reduced(face, hvd.Sum, each, dtype) for each, (dtype, _) in zip(inputs, rows)]
    all_results = [hvd.grouped_allreduce(given, op=hvd.Sum, name="group")]
    if face.has_handles:
        all_results.append(hvd.synchronize(hvd.grouped_allreduce_async(given, op=hvd.Sum)))
    if face.in_place:
        hvd.grouped_allreduce_(given, op=hvd.Sum)
        all_results.append(given)
    for results in all_results:
        assert len(results) == len(rows)
        for result, wanted, (dtype, shape) in zip(results, expected, rows):
            check(face, result, wanted, dtype, f"grouped {dtype} {shape}")


def allgather(face: Face) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    for dtype in face.dtypes:
        for trailing in [(), (3,), (2, 2)]:
            for lengths in [[2] * size, list(range(size)), [0] * size]:
                inputs = [values(r, 0, (n, *trailing), dtype) for r, n in enumerate(lengths)]
                what = f"allgather {dtype} {trailing} {lengths}"
                result = hvd.allgather(face.make(inputs[rank], dtype), name=what)
                check(face, result, np.concatenate(inputs), dtype, what)
    inputs = [[values(r, t, (r + t, 3), "float32") for r in range(size)] for t in range(4)]
    given = [face.make(each[rank], "float32") for each in inputs]
    results = hvd.grouped_allgather(given, name="group")
    assert len(results) == len(inputs)
    for result, each in zip(results, inputs):
        check(face, result, np.concatenate(each), "float32", "grouped allgather")


def broadcast(face: Face) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    for dtype in face.dtypes:
        for shape in SHAPES:
            for root in range(size):
                inputs = [values(r, root, shape, dtype) for r in range(size)]
                given = face.make(inputs[rank], dtype)
                what = f"broadcast {dtype} {shape} from {root}"
                check(face, hvd.broadcast(given, root), inputs[root], dtype, what)
                check(face, given, inputs[rank], dtype, f"{what}: input")
                if not face.in_place:
                    continue
                assert hvd.broadcast_(given, root, name=what) is given
                check(face, given, inputs[root], dtype, f"{what} in place")


def alltoall(face: Face) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    for dtype in face.dtypes:
        for trailing in [(), (3,)]:
            inputs = [values(r, 0, (2 * size, *trailing), dtype) for r in range(size)]
            expected = np.concatenate([each[2 * rank : 2 * rank + 2] for each in inputs])
            result = hvd.alltoall(face.make(inputs[rank], dtype))
            check(face, result, expected, dtype, f"alltoall {dtype} even")
            splits = [[(r + 2 * to) % 4 for to in range(size)] for r in range(size)]
            inputs = [values(r, 1, (sum(splits[r]), *trailing), dtype) for r in range(size)]
            starts = [sum(splits[r][:rank]) for r in range(size)]
            expected = np.concatenate([inputs[r][starts[r] : starts[r] + splits[r][rank]] for r in range(size)])
            result, received = hvd.alltoall(face.make(inputs[rank], dtype), splits=splits[rank])
            check(face, result, expected, dtype, f"alltoall {dtype} ragged")
            assert face.read(received).tolist() == [splits[r][rank] for r in range(size)]


def reducescatter(face: Face) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    for dtype in face.dtypes:
        for shape in [(2 * size,), (2 * size + 1, 3), (1, 2), (0,), (size - 1, 2)]:
            inputs = [values(r, 0, shape, dtype) for r in range(size)]
            for op in ops_of(face, dtype):
                expected = np.array_split(reduced(face, op, inputs, dtype), size)[rank]
                result = hvd.reducescatter(face.make(inputs[rank], dtype), op=op)
                check(face, result, expected, dtype, f"reducescatter {op} {dtype} {shape}")
    inputs = [[values(r, t, (size + t, 3), "float32") for r in range(size)] for t in range(4)]
    results = hvd.grouped_reducescatter([face.make(each[rank], "float32") for each in inputs], op=hvd.Sum)
    assert len(results) == len(inputs)
    for result, each in zip(results, inputs):
        check(face, result, np.array_split(np.sum(each, axis=0), size)[rank], "float32", "grouped reducescatter")


def compression(face: Face, names: list[str]) -> None:
    hvd = face.module
    rank, size = hvd.rank(), hvd.size()
    inputs = [values(r, 0, (100,), "bfloat16") for r in range(size)]
    for name in names:
        for dtype in ("float32", "float64", "int32"):
            given = face.make(inputs[rank], dtype)
            result = hvd.allreduce(given, op=hvd.Sum, compression=getattr(hvd.Compression, name))
            check(face, result, np.sum(inputs, axis=0), dtype, f"{name} {dtype}")
            result = hvd.reducescatter(given, op=hvd.Sum, compression=getattr(hvd.Compression, name))
            check(face, result, np.array_split(np.sum(inputs, axis=0), size)[rank], dtype, f"{name} {dtype}")
    fine = face.make(np.full(3, 1 + 2.0**-12), "float32")
    exact = hvd.allreduce(fine, op=hvd.Max, compression=hvd.Compression.none)
    check(face, exact, np.full(3, 1 + 2.0**-12), "float32", "none")
    rounded = hvd.allreduce(fine, op=hvd.Max, compression=hvd.Compression.fp16)
    check(face, rounded, np.ones(3), "float32", "fp16 has 11 bits")


def many_at_once(face: Face) -> None:
    """Operations that are started in another order on every rank, and waited for in yet another."""
    import pytest

    hvd = face.module
    if not face.has_handles:
        pytest.skip("this frontend has no operations that can be started and waited for")
    rank, size = hvd.rank(), hvd.size()
    order = np.random.default_rng(rank).permutation(60)
    handles: dict[int, Any] = {}
    for t in order:
        given = face.make(values(rank, int(t), (t + 1,), "float32"), "float32")
        handles[int(t)] = hvd.allreduce_async(given, op=hvd.Sum, name=f"many.{t}")
    for t in np.random.default_rng(100 + rank).permutation(60):
        expected = np.sum([values(r, int(t), (t + 1,), "float32") for r in range(size)], axis=0)
        check(face, hvd.synchronize(handles[int(t)]), expected, "float32", t)
        assert hvd.poll(handles[int(t)])
        check(face, hvd.synchronize(handles[int(t)]), expected, "float32", "again")


def average_argument(face: Face) -> None:
    import pytest

    hvd = face.module
    given = face.make(np.array([1.0, 2.0]) * (hvd.rank() + 1), "float64")
    total = sum(range(1, hvd.size() + 1))
    with pytest.warns(DeprecationWarning, match="average"):
        check(face, hvd.allreduce(given, average=False), np.array([1.0, 2.0]) * total, "float64", "average=False")
    with pytest.warns(DeprecationWarning, match="average"):
        mean = np.array([1.0, 2.0]) * total / hvd.size()
        check(face, hvd.allreduce(given, True), mean, "float64", "average=True")
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(given, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="17"):
        hvd.allreduce(given, op=17)


def wrong_calls(face: Face) -> None:
    """Mistakes are errors on this rank at once, and the engine goes on."""
    import pytest

    hvd = face.module
    size = hvd.size()
    cases: list[tuple[Callable[[], Any], Optional[str]]] = [
        (lambda: hvd.allgather(face.make(np.array(1.0), "float32"), name="scalar"), "scalar"),
        (lambda: hvd.broadcast(face.make(np.ones(3), "float32"), size), "root"),
        (lambda: hvd.alltoall(face.make(np.ones(3), "float32"), [3] * (size + 1)), "splits"),
        (lambda: hvd.alltoall(face.make(np.ones(3), "float32"), [4] + [0] * (size - 1)), "splits"),
        (lambda: hvd.allreduce(face.make(np.ones(3), "bool"), op=hvd.Average), "bool"),
        (lambda: hvd.grouped_allreduce([]), "tensor"),
        (lambda: hvd.allreduce(face.make(np.ones(3), "float32"), process_set=hvd.ProcessSet([0])), "add_process_set"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    check(face, hvd.allreduce(face.make(np.ones(3), "float32")), np.ones(3), "float32", "after the errors")
