"""What the collectives need to know of MXNet's arrays. Nothing here is compiled against MXNet."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray
from ronde import _core
from ronde._core import ArgumentError
from ronde._frontend import Frontend, dtype_number

_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # MXNet's own name for it
# oneDNN may keep an array of two or more dimensions in a layout of its own; this puts it back, when its turn comes in
# the engine. A member function of MXNet's NDArray; it is missing where MXNet was built without oneDNN.
_reorder = getattr(_LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)
if _reorder is not None:
    _reorder.argtypes, _reorder.restype = [ctypes.c_void_p], None


class _Collective(autograd.Function):
    """An operation whose forward and backward are functions on lists of arrays."""

    def __init__(self, forward: Any, gradient: Any) -> None:
        super().__init__()
        self._forward, self._gradient = forward, gradient

    def forward(self, *arrays: NDArray) -> tuple[NDArray, ...]:
        return tuple(self._forward(list(arrays)))

    def backward(self, *grads: NDArray) -> tuple[NDArray, ...]:
        return tuple(self._gradient(list(grads)))


class MxnetFrontend(Frontend[NDArray]):
    """Memory here is a dense array on the CPU in the plain layout. Its content may still be on its way."""

    def convert(self, value: Any) -> NDArray:
        if not isinstance(value, NDArray):
            raise TypeError(f"needs an mxnet NDArray, not a {type(value).__name__}")
        if isinstance(value, BaseSparseNDArray):
            raise TypeError(f"needs a dense array, not one of storage type {value.stype}: see tostype('default')")
        return value

    def memory(self, tensor: NDArray) -> NDArray:
        if not tensor.context.device_type.startswith("cpu"):
            tensor = tensor.as_in_context(mx.cpu())
        if _reorder is not None and tensor.ndim > 1:
            _reorder(tensor.handle)
        return tensor

    def row(self, memory: NDArray) -> tuple[int, int, tuple[int, ...]]:
        address = ctypes.c_void_p()
        memory.wait_to_read()
        check_call(_LIB.MXNDArrayGetData(memory.handle, ctypes.byref(address)))
        return address.value or 0, self.dtype_number(memory), memory.shape

    def dtype_number(self, tensor: NDArray) -> int:
        """The core's number of the element type."""
        return dtype_number(self.dtype_name(tensor), tensor.dtype)

    def copy(self, tensor: NDArray) -> NDArray:
        """New memory with the same content."""
        return self.memory(tensor.copyto(mx.cpu()))

    def empty_like(self, memory: NDArray) -> NDArray:
        return _empty(memory.shape, memory.dtype)

    def wrap(self, buffer: _core.Buffer) -> NDArray:
        result = _empty(buffer.shape, _dtype(buffer.dtype))
        ctypes.memmove(self.row(result)[0], buffer.address, buffer.nbytes)
        return result

    def place(self, result: NDArray, like: NDArray) -> NDArray:
        if isinstance(like, mx.np.ndarray) and not isinstance(result, mx.np.ndarray):
            result = result.as_np_ndarray()
        return result.as_in_context(like.context)

    def check_writable(self, tensor: NDArray, given: Any) -> None:
        if not tensor.writable:
            raise ArgumentError(f"a result cannot be written into a read-only array (shape {tensor.shape})")

    def assign(self, target: NDArray, source: NDArray) -> None:
        if target is not source:
            source.copyto(target)

    def integers(self, values: Sequence[int]) -> NDArray:
        return mx.nd.array(values, dtype="int64")

    def zeros_like(self, tensor: NDArray) -> NDArray:
        return mx.np.zeros_like(tensor) if isinstance(tensor, mx.np.ndarray) else mx.nd.zeros_like(tensor)

    def dtype_name(self, tensor: NDArray) -> str:
        dtype = np.dtype(tensor.dtype)
        return "bfloat16" if dtype == _BFLOAT16 else dtype.name

    def cast(self, tensor: NDArray, dtype_name: str) -> NDArray:
        if dtype_name == "bfloat16":  # oneDNN's, to and from float32 only
            return mx.nd.amp_cast(tensor.astype("float32"), dtype=_BFLOAT16)
        if self.dtype_name(tensor) == "bfloat16":
            tensor = mx.nd.amp_cast(tensor, dtype="float32")
        return tensor.astype(dtype_name)

    def differentiable(
        self,
        forward: Callable[[list[NDArray]], list[NDArray]],
        gradient: Callable[[list[NDArray]], list[NDArray]],
        tensors: list[NDArray],
    ) -> list[NDArray]:
        return list(_Collective(forward, gradient)(*tensors)) if autograd.is_recording() else forward(tensors)


def _dtype(name: str) -> Any:
    return _BFLOAT16 if name == "bfloat16" else name


def _empty(shape: tuple[int, ...], dtype: Any) -> NDArray:
    with mx.util.np_shape(True):  # lets dimensions be 0
        return mx.nd.empty(shape, dtype=dtype)
