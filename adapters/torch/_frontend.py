"""What the collectives need to know of PyTorch. Tensors go by address; nothing here is compiled against torch."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ronde import _core
from ronde._core import ArgumentError
from ronde._frontend import Frontend, dtype_number, overlaps

Tensor = torch.Tensor

# Torch and the core call the element types by the same names.
_NAMES = {getattr(torch, name): name for name in _core.DTYPES if hasattr(torch, name)}
_STRIDED = torch.strided
NUMBERS = {dtype: _core.DTYPES[name] for dtype, name in _NAMES.items()}


class _Collective(torch.autograd.Function):
    """An operation whose forward and backward are functions on lists of tensors."""

    @staticmethod
    def forward(ctx: Any, forward: Any, gradient: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.gradient(list(grads)))


class TorchFrontend(Frontend[Tensor]):
    def __init__(self) -> None:
        self._warned = False

    def convert(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"needs a torch.Tensor, not a {type(value).__name__}")
        if value.layout is not _STRIDED:
            raise TypeError(f"needs a dense tensor, not one of layout {value.layout}: see sparse_allreduce_async")
        return value

    def memory(self, tensor: Tensor) -> Tensor:
        if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        tensor = tensor.detach()
        if not tensor.is_cpu:
            self._warn_of_copy(tensor.device)
            tensor = tensor.cpu()
        return tensor.resolve_conj().resolve_neg().contiguous()

    def row(self, memory: Tensor) -> tuple[int, int, tuple[int, ...]]:
        number = NUMBERS.get(memory.dtype)
        return memory.data_ptr(), dtype_number(None, memory.dtype) if number is None else number, memory.shape

    def empty_like(self, memory: Tensor) -> Tensor:
        return torch.empty_like(memory, memory_format=torch.contiguous_format, requires_grad=False)

    def wrap(self, buffer: _core.Buffer) -> Tensor:
        dtype = getattr(torch, buffer.dtype)
        if buffer.nbytes == 0:
            return torch.empty(buffer.shape, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype).view(buffer.shape)

    def place(self, result: Tensor, like: Tensor) -> Tensor:
        return result if like.is_cpu else result.to(like.device)

    def check_writable(self, tensor: Tensor, given: Any) -> None:
        if not tensor.is_contiguous() and overlaps(tensor.shape, tensor.stride()):
            raise ArgumentError(
                f"a result cannot be written into a tensor whose elements overlap (shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}; expand() makes such): clone() it first, or use the operation that is not in place"
            )

    def assign(self, target: Tensor, source: Tensor) -> None:
        if target is source:
            torch.autograd.graph.increment_version(target)
        else:
            with torch.no_grad():
                target.copy_(source)

    def integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def dtype_name(self, tensor: Tensor) -> str:
        return _NAMES.get(tensor.dtype, str(tensor.dtype))

    def cast(self, tensor: Tensor, dtype_name: str) -> Tensor:
        return tensor.to(getattr(torch, dtype_name))

    def differentiable(
        self,
        forward: Callable[[list[Tensor]], list[Tensor]],
        gradient: Callable[[list[Tensor]], list[Tensor]],
        tensors: list[Tensor],
    ) -> list[Tensor]:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return list(_Collective.apply(forward, gradient, *tensors))
        return forward(tensors)

    def _warn_of_copy(self, device: torch.device) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"tensors on {device.type} are copied through host memory: there is no device backend yet", stacklevel=2
            )
