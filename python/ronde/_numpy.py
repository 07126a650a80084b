"""The collectives on NumPy arrays, and on whatever shares memory with them: DLPack (CPU) and the buffer protocol."""

from collections.abc import Sequence
from typing import Any, Union

import numpy as np

from ronde import _core
from ronde._api import make_api
from ronde._core import ArgumentError
from ronde._frontend import Frontend, dtype_number, overlaps

Array = np.ndarray[Any, Any]


class NumpyFrontend(Frontend[Array]):
    def convert(self, value: Any) -> Array:
        if isinstance(value, np.ndarray):
            return value
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            if value.__dlpack_device__()[0] != 1:
                raise TypeError(f"a {type(value).__name__} outside host memory cannot be sent: copy it there first")
            return np.from_dlpack(value)
        try:
            return np.asarray(memoryview(value))
        except TypeError:
            return np.asarray(value)  # numbers and lists

    def memory(self, tensor: Array) -> Array:
        if tensor.flags.c_contiguous and tensor.dtype.isnative:
            return tensor
        return tensor.astype(tensor.dtype.newbyteorder("="), order="C")

    def row(self, memory: Array) -> tuple[int, int, tuple[int, ...]]:
        return memory.ctypes.data, dtype_number(memory.dtype.name, memory.dtype), memory.shape

    def empty_like(self, memory: Array) -> Array:
        return np.empty(memory.shape, memory.dtype)

    def wrap(self, buffer: _core.Buffer) -> Array:
        return np.frombuffer(buffer, _dtype(buffer.dtype)).reshape(buffer.shape)  # type: ignore[call-overload]

    def check_writable(self, tensor: Array, given: Any) -> None:
        if tensor is not given and not hasattr(given, "__dlpack__"):
            try:
                memoryview(given)
            except TypeError:
                raise TypeError(f"a result cannot be written into a {type(given).__name__}: give an array") from None
        if not tensor.flags.writeable:
            raise ArgumentError(f"a result cannot be written into a read-only array (shape {tensor.shape})")
        if overlaps(tensor.shape, tensor.strides):
            raise ArgumentError(
                f"a result cannot be written into an array whose elements overlap (shape {tensor.shape}, strides "
                f"{tensor.strides}): copy it first"
            )

    def assign(self, target: Array, source: Array) -> None:
        if target is not source:
            target[...] = source

    def integers(self, values: Sequence[int]) -> Array:
        return np.array(values, np.int64)

    def zeros_like(self, tensor: Array) -> Array:
        return np.zeros_like(tensor)

    def dtype_name(self, tensor: Array) -> str:
        return tensor.dtype.name

    def cast(self, tensor: Array, dtype_name: str) -> Array:
        return tensor.astype(_dtype(dtype_name))


def _dtype(name: str) -> "np.dtype[Any]":
    if name == "bfloat16":
        try:
            import ml_dtypes  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise TypeError("bfloat16 arrays need the package ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


_frontend = NumpyFrontend()
_api = make_api(_frontend)
Compression = _api.compression

allreduce = _api.allreduce
allreduce_ = _api.allreduce_
allreduce_async = _api.allreduce_async
allreduce_async_ = _api.allreduce_async_
grouped_allreduce = _api.grouped_allreduce
grouped_allreduce_ = _api.grouped_allreduce_
grouped_allreduce_async = _api.grouped_allreduce_async
grouped_allreduce_async_ = _api.grouped_allreduce_async_
allgather = _api.allgather
allgather_async = _api.allgather_async
grouped_allgather = _api.grouped_allgather
grouped_allgather_async = _api.grouped_allgather_async
broadcast = _api.broadcast
broadcast_ = _api.broadcast_
broadcast_async = _api.broadcast_async
broadcast_async_ = _api.broadcast_async_
alltoall = _api.alltoall
alltoall_async = _api.alltoall_async
reducescatter = _api.reducescatter
reducescatter_async = _api.reducescatter_async
grouped_reducescatter = _api.grouped_reducescatter
grouped_reducescatter_async = _api.grouped_reducescatter_async
join = _api.join
barrier = _api.barrier
poll = _api.poll
synchronize = _api.synchronize
broadcast_object = _api.broadcast_object
allgather_object = _api.allgather_object


def empty_shared(shape: Union[int, Sequence[int]], dtype: Any = np.float32) -> Array:
    """An array in memory that the other ranks of this host reach: collectives need not copy it.

    Worth it from some 64 KiB on, for arrays that are used again and again: an allreduce in place is about twice as fast.
    While an operation runs other ranks write into its array; afterwards it is an array like any other. Where ranks
    share no memory (one rank, RONDE_TRANSPORT=tcp) it is ordinary memory.

    Args:
        shape: of the array. Its elements are not set.
        dtype: of the elements.

    Raises:
        TypeError: the shape is no number and no sequence of numbers.
        ValueError: a number is negative or too large; before init(); the rank's shared memory (RONDE_SHARED_BYTES) or the host's memory is used up.
    """
    kind = np.dtype(dtype)
    return _frontend.wrap(_core.allocate_shared(dtype_number(kind.name, kind), shape))
