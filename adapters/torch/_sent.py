"""Gradients on their way: one class for each way in which they are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from ronde import _core
from ronde._core import RondeError
from ronde.compression import NoneCompressor
from ronde.process_sets import set_id
from ronde.torch import mpi_ops
from ronde.torch._frontend import NUMBERS

if TYPE_CHECKING:
    from ronde.torch._gradient import Gradient
    from ronde.torch._reducer import GradientReducer

_STRIDED = torch.strided
_use_count = getattr(torch._C, "_storage_Use_Count", None)
_OWN_USES = 2  # a storage's uses by the one tensor that has it, and by the object that stands for it while it is asked


class Sent(ABC):
    """One gradient, or several that travel together."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Waits for the end; raises the operation's error."""

    @abstractmethod
    def store(self) -> None:
        """Puts the reduced gradients where the optimizer looks for them. To be called without autograd."""


class SentAgain(Sent):
    """A dense gradient that travels as it lies in memory: what most steps are made of. The object, and what the core needs
    to know, serve all steps as long as gradients are alike."""

    __slots__ = ("_core", "_dtype", "_grad", "_param", "_process_set", "_set_number", "_shape", "_view")

    def __init__(self, gradient: Gradient, grad: torch.Tensor, reducer: GradientReducer) -> None:
        options = reducer.options
        prescale, postscale = reducer.scales
        self._param, self._view = gradient.param, gradient.view
        self._grad: Optional[torch.Tensor] = None  # until it is stored; after an error, until the next start
        self._dtype, self._shape = grad.dtype, grad.shape
        self._process_set, self._set_number = options.process_set, set_id(options.process_set)
        self._core = _core.prepare_allreduce(
            reducer.name(gradient.name), NUMBERS[grad.dtype], grad.shape, options.op, prescale, postscale,
            self._set_number,
        )  # fmt: skip

    @staticmethod
    def can_send(grad: torch.Tensor, view: Optional[torch.Tensor], reducer: GradientReducer) -> bool:
        """Whether such an object can be made for this gradient."""
        return (
            isinstance(reducer.options.compression, NoneCompressor)
            and grad.dtype in NUMBERS
            and not grad.dtype.is_complex  # could be conjugate, which start() does not ask
            and _is_memory(grad)
            and (grad is view or not _is_shared(grad))
        )

    def start(self, grad: Optional[torch.Tensor]) -> bool:
        """False: nothing was sent, as this gradient, or the process set, is not what the object was made for."""
        if not (
            grad is not None
            and grad.dtype is self._dtype
            and grad.shape == self._shape
            and _is_memory(grad)
            and (grad is self._view or not _is_shared(grad))
            and self._process_set.process_set_id == self._set_number
        ):
            return False
        self._core.start(grad.data_ptr(), grad)
        self._grad = grad
        return True

    def wait(self) -> None:
        self._core.wait()

    def store(self) -> None:
        grad = self._grad
        self._grad = None
        torch.autograd.graph.increment_version(grad)  # type: ignore[arg-type]
        if self._param.grad is not grad:
            self._param.grad = grad


class SentOne(Sent):
    """A dense gradient by itself."""

    __slots__ = ("_compression", "_context", "_grad", "_handle", "_param", "_result")

    def __init__(self, gradient: Gradient, reducer: GradientReducer) -> None:
        options = reducer.options
        prescale, postscale = reducer.scales
        self._param, self._compression = gradient.param, options.compression
        self._grad: torch.Tensor = gradient.param.grad  # type: ignore[assignment]
        tensor, self._context = self._compression.compress(_own_memory(self._grad, gradient.view))
        self._result = tensor
        self._handle = mpi_ops.allreduce_async_(
            tensor, None, reducer.name(gradient.name), options.op, prescale, postscale, options.process_set
        )

    def wait(self) -> None:
        self._result = self._handle.wait()

    def store(self) -> None:
        _store(self._param, self._grad, self._compression.decompress(self._result, self._context))


class SentGroup(Sent):
    """The dense gradients of a group of parameters."""

    __slots__ = ("_compression", "_contexts", "_grads", "_handle", "_params", "_results")

    def __init__(self, gradients: Sequence[Gradient], reducer: GradientReducer) -> None:
        options = reducer.options
        prescale, postscale = reducer.scales
        self._params, self._compression = [each.param for each in gradients], options.compression
        self._grads: list[torch.Tensor] = [param.grad for param in self._params]  # type: ignore[misc]
        if self._grads[0].is_sparse:
            raise ValueError(
                f"the gradient of {gradients[0].name!r} is sparse and cannot be sent in a group: leave it "
                "out of `groups` or use sparse_as_dense=True"
            )
        pairs = [self._compression.compress(_own_memory(grad, each.view)) for grad, each in zip(self._grads, gradients)]
        self._contexts = [ctx for _, ctx in pairs]
        self._results = [tensor for tensor, _ in pairs]
        self._handle = mpi_ops.grouped_allreduce_async_(
            self._results, None, reducer.name(f"group.{gradients[0].group}"), options.op, prescale, postscale,
            options.process_set,
        )  # fmt: skip

    def wait(self) -> None:
        self._results = self._handle.wait()

    def store(self) -> None:
        for param, grad, result, ctx in zip(self._params, self._grads, self._results, self._contexts):
            _store(param, grad, self._compression.decompress(result, ctx))


class SentSparse(Sent):
    """A sparse gradient."""

    __slots__ = ("_handle", "_param", "_result")

    def __init__(self, gradient: Gradient, reducer: GradientReducer) -> None:
        options = reducer.options
        self._param = gradient.param
        self._result: torch.Tensor = gradient.param.grad  # type: ignore[assignment]
        name = reducer.name(gradient.name)
        self._handle = mpi_ops.sparse_allreduce_async(self._result, name, options.op, options.process_set)

    def wait(self) -> None:
        self._result = self._handle.wait()

    def store(self) -> None:
        self._param.grad = self._result


def wait_for(sent: Sequence[Sent]) -> None:
    """Waits for all, then raises the first error there was."""
    errors = []
    for each in sent:
        try:
            each.wait()
        except RondeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _is_memory(grad: Any) -> bool:
    """Whether the core can reduce it where it is; of dtypes that are not complex."""
    return grad.is_cpu and grad.layout is _STRIDED and grad.is_contiguous() and not grad.is_neg()


def _is_shared(grad: torch.Tensor) -> bool:
    """Whether another tensor has the same storage. Autograd lets a gradient be a view of one that it still needs, or that
    another parameter gets, too: `a.view(2, 3) + b.view(2, 3)` gives both parameters the same memory."""
    return _use_count is None or _use_count(grad.untyped_storage()._cdata) > _OWN_USES


def _own_memory(grad: torch.Tensor, view: Optional[torch.Tensor]) -> torch.Tensor:
    """The gradient, or a copy of it where reducing it in place would change what others read before the backward pass has
    ended. The reduced values are stored after that."""
    if grad is view or not grad.is_cpu or grad.layout is not _STRIDED or not _is_shared(grad):
        return grad
    return grad.clone()


def _store(param: torch.Tensor, grad: torch.Tensor, reduced: torch.Tensor) -> None:
    if reduced is not grad:
        grad.copy_(reduced)
    if param.grad is not grad:
        param.grad = grad
