"""The way of a collective through MXNet's engine.

An operation is pushed with the arrays that it changes. The engine starts it when what was pushed before has computed
them, and lets wait what is pushed later and uses them; nobody waits in Python. Its error is kept with the arrays and
raised by whoever waits for them, as ronde's exception.

Ranks' engines start independent operations in different orders, so every operation has a name that is made when it is
pushed, in the order of the program. Operations of one name must not be in flight together: they share an array (a
token) that all of them "change", and so follow one another.
"""

import contextlib
import ctypes
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Optional

import mxnet as mx
from mxnet.base import _LIB, check_call, register_error
from ronde import _core, exceptions
from ronde._api import Api
from ronde._collectives import Collectives, Handle, Result
from ronde.basics import before_end
from ronde.mxnet._frontend import MxnetFrontend, NDArray
from ronde.process_sets import ProcessSet, engine_memory, set_id

# The threads for this kind of work start operations although others compute all the time.
_CPU_PRIORITIZED = ctypes.c_int(3)
_LEND = ctypes.cast(_LIB.MXNDArrayToDLPack, ctypes.c_void_p).value or 0
_FREE = ctypes.cast(_LIB.MXNDArrayFree, ctypes.c_void_p).value or 0
# MXNet's engine for debugging runs everything within the call, and drops the errors of operations.
_NAIVE = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"


class _Context(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


_CPU = _Context(1, 0)

_tokens: "dict[tuple[int, str], NDArray]" = engine_memory()  # by process set and name
_numbers: "Counter[tuple[int, str]]" = engine_memory(Counter())  # by process set and kind: the last one in a name

frontend = MxnetFrontend()


def unique_name(kind: str, process_set: ProcessSet) -> str:
    """A name for an operation that the user gave none: the same on all ranks that run the same program."""
    return f"{kind}#{_numbers[set_id(process_set), kind] + 1}"


def _count(kind: str, name: Optional[str], process_set: ProcessSet) -> None:
    """An operation was started: if this was the next number, it is used up. A call that raises uses none."""
    if name == unique_name(kind, process_set):
        _numbers[set_id(process_set), kind] += 1


class EngineApi(Api[NDArray]):
    """The collectives, with one priority: where several could start, the engine starts that with the highest first.

    Those whose results have shapes that only the other ranks know (allgather, alltoall) are waited for.
    """

    def __init__(self, priority: int = 0) -> None:
        super().__init__(frontend)
        self._priority = priority

    def _start(
        self,
        kind: str,
        given: Sequence[Any],
        name: Optional[str],
        process_set: ProcessSet,
        where: Result,
        **options: Any,
    ) -> Handle[list[NDArray]]:
        name = name or unique_name(kind, process_set)
        handle = self._push(kind, given, name, process_set, where, **options)
        _count(kind, name, process_set)
        return handle

    _start_one = Collectives._start_one  # type: ignore[assignment]  # by way of _start

    def _push(
        self, kind: str, given: Sequence[Any], name: str, process_set: ProcessSet, where: Result, **options: Any
    ) -> Handle[list[NDArray]]:
        if where is Result.CORE:
            return super()._start(kind, given, name, process_set, where, **options)
        tensors = [frontend.convert(tensor) for tensor in given]
        if where is Result.NEW:
            targets = [frontend.copy(tensor) for tensor in tensors]
            push(kind, targets, name, process_set, self._priority, **options)
            return _Pushed([frontend.place(target, tensor) for target, tensor in zip(targets, tensors)])
        for tensor in tensors:
            frontend.check_writable(tensor, tensor)
        targets = [frontend.memory(tensor) for tensor in tensors]
        push(kind, targets, name, process_set, self._priority, **options)
        for tensor, target in zip(tensors, targets):
            frontend.assign(tensor, target)
        return _Pushed(tensors)

    def join(self, device: int = -1) -> int:
        mx.nd.waitall()  # what was pushed before belongs before it
        last = super().join(device)
        _numbers.clear()  # ranks left off at different ones
        return last


class _Pushed(Handle[Any]):
    """The arrays are there at once; who reads them waits."""

    def __init__(self, results: Any) -> None:
        self._result = results

    def wait(self) -> Any:
        return self._result

    def then(self, change: Callable[[Any], Any]) -> "_Pushed":
        return _Pushed(change(self._result))


def push(
    kind: str, arrays: Sequence[NDArray], name: str, process_set: ProcessSet, priority: int, **options: Any
) -> None:
    """Pushes an operation in place on arrays that are memory. Raises what can be said before it starts."""
    number = set_id(process_set)
    if _NAIVE:
        addresses = [frontend.row(array) for array in arrays]
        rows = [(address, address, dtype, shape) for address, dtype, shape in addresses]
        _core.submit(_core.OPS[kind], name, rows, arrays, process_set=number, **options).wait()
        return
    changed = list(arrays)
    if "#" not in name:  # a name of ours comes once
        token = _tokens.get((number, name))
        if token is None:
            token = _tokens[number, name] = mx.nd.empty((1,))
        changed.append(token)
    lent = []
    for array in arrays:
        handle = ctypes.c_void_p()
        check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
        lent.append((handle.value or 0, frontend.dtype_number(array), array.shape))
    try:
        start, argument, release = _core.defer(_core.OPS[kind], name, lent, _LEND, _FREE, process_set=number, **options)
    except BaseException:
        for address, *_ in lent:
            _LIB.MXNDArrayFree(ctypes.c_void_p(address))
        raise
    changed = list({_memory_of(array): array for array in changed}.values())  # MXNet stops for ever on one given twice
    handles = (ctypes.c_void_p * len(changed))(*[array.handle for array in changed])
    check_call(
        _LIB.MXEnginePushAsyncND(
            ctypes.c_void_p(start), ctypes.c_void_p(argument), ctypes.c_void_p(release), ctypes.byref(_CPU),
            None, 0, handles, len(changed), ctypes.byref(_CPU_PRIORITIZED), priority, b"ronde", False,
        )
    )  # fmt: skip


def _memory_of(array: NDArray) -> int:
    """What an array has in common with its views: the first word of MXNet's NDArray points there."""
    return ctypes.cast(array.handle, ctypes.POINTER(ctypes.c_size_t))[0] if _has_memory_pointer() else id(array)


@functools.lru_cache(maxsize=None)
def _has_memory_pointer() -> bool:
    one, other = mx.nd.empty((2,)), mx.nd.empty((2,))
    words = [ctypes.cast(array.handle, ctypes.POINTER(ctypes.c_size_t))[0] for array in (one, one[1:], other)]
    return words[0] == words[1] != words[2]


@before_end
def _finish() -> None:
    """Operations that were pushed shall run first, since other ranks wait for them."""
    with contextlib.suppress(Exception):  # belongs to the arrays, and was raised where they were read
        mx.nd.waitall()


def _register_errors() -> None:
    """MXNet raises its own class for an error whose text starts with a name that it does not know."""
    for name in exceptions.__all__:
        found = getattr(exceptions, name)
        if issubclass(found, exceptions.RondeError):
            register_error(
                f"ronde.{name}", lambda text, found=found, start=f"ronde.{name}: ": found(text.replace(start, "", 1))
            )


_register_errors()
