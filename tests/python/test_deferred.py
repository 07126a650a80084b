"""_core.defer(), with a framework's engine that is made here of C functions."""

import ctypes
import threading
from collections.abc import Iterator
from typing import Any, Callable, Optional

import numpy as np
import pytest

from ronde import _core

LIMIT = 30.0  # seconds
FLOAT32 = _core.DTYPES["float32"]
SUM = _core.REDUCTIONS["Sum"]


class ManagedTensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


LEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
FREE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
DELETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Engine:
    """Arrays are known to it by numbers from 1 on."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.arrays = arrays
        self.freed: list[int] = []
        self.returned: list[int] = []
        self.error: Optional[str] = None
        self._ended = threading.Event()
        self._lent: dict[int, ManagedTensor] = {}
        self._functions = [LEND(self._lend), FREE(self._free), DELETE(self._delete), CALL(self._done)]

    def defer(self, op: str, name: str, **options: Any) -> tuple[int, int, int]:
        rows = [(number, FLOAT32, array.shape) for number, array in enumerate(self.arrays, 1)]
        lend, free, *_ = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)
        return _core.defer(_core.OPS[op], name, rows, lend, free, **options)

    def run(self, deferred: tuple[int, int, int]) -> Optional[str]:
        """Starts an operation and waits for its end: its error."""
        start, argument, release = deferred
        completion = (ctypes.c_void_p * 3)(ctypes.cast(self._functions[3], ctypes.c_void_p).value, 7, 8)
        CALL(start)(None, ctypes.addressof(completion), argument)
        ctypes.memset(completion, 0, ctypes.sizeof(completion))  # it was good for the call only
        assert self._ended.wait(LIMIT)
        DELETE(release)(argument)
        return self.error

    def _lend(self, number: int, lent: Any) -> int:
        if number > len(self.arrays) or self.arrays[number - 1].size == 1:
            return -1
        tensor = self._lent[number] = ManagedTensor()
        tensor.data = self.arrays[number - 1].ctypes.data - 4
        tensor.byte_offset = 4
        tensor.context = number
        tensor.deleter = ctypes.cast(self._functions[2], ctypes.c_void_p).value
        lent[0] = ctypes.addressof(tensor)
        return 0

    def _delete(self, tensor: int) -> None:
        self.returned.append(ctypes.cast(tensor, ctypes.POINTER(ManagedTensor))[0].context)

    def _free(self, number: int) -> int:
        self.freed.append(number)
        return 0

    def _done(self, engine: int, operation: int, error: Optional[int]) -> None:
        assert (engine, operation) == (7, 8)
        if error:  # std::runtime_error: the table of its functions, then the text
            self.error = (ctypes.cast(error, ctypes.POINTER(ctypes.c_char_p))[1] or b"").decode()
        self._ended.set()


@pytest.fixture
def alone() -> Iterator[None]:
    endpoint = _core.Endpoint(0, 1)
    endpoint.connect([endpoint.blob()], LIMIT)
    yield
    _core.shutdown()


def floats(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


def test_runs_in_place_when_it_is_started(alone: None) -> None:
    engine = Engine(floats(5), floats(3))
    deferred = engine.defer("allreduce", "x", reduction=SUM, prescale=2.0, postscale=3.0)
    engine.arrays[0][:] = 7  # before it starts
    before = _core.deferred_counts()
    assert engine.run(deferred) is None
    assert engine.arrays[0].tolist() == [42] * 5 and engine.arrays[1].tolist() == [0, 6, 12]
    assert sorted(engine.returned) == [1, 2] and engine.freed == [1, 2]
    assert _core.deferred_counts() == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda engine: engine.defer("allreduce", "x", reduction=SUM, process_set=5), "process set 5"),
        (lambda engine: engine.defer("broadcast", "x", root=1), "root rank 1"),
    ],
)
def test_what_cannot_be_right_is_refused_at_once(alone: None, call: Callable[[Engine], Any], text: str) -> None:
    engine = Engine(floats(3))
    with pytest.raises(_core.ArgumentError, match=text):
        call(engine)
    assert engine.freed == []  # the arrays stay the caller's


def test_later_errors_go_to_the_completion(alone: None) -> None:
    engine = Engine(floats(1))
    assert engine.run(engine.defer("allreduce", "x", reduction=SUM)) == (
        "ronde.ArgumentError: the memory of 'x' cannot be had from the framework"
    )
    array = floats(3)
    engine = Engine(array, array)
    assert "tensors 0 and 1 share memory" in (engine.run(engine.defer("allreduce", "x", reduction=SUM)) or "")
    assert sorted(engine.returned) == [1, 2] and engine.freed == [1, 2]
    engine = Engine(floats(3))
    deferred = engine.defer("allreduce", "x", reduction=SUM)
    _core.shutdown()
    assert (engine.run(deferred) or "").startswith("ronde.NotInitializedError: ")
    with pytest.raises(_core.NotInitializedError):
        engine.defer("allreduce", "x", reduction=SUM)
