"""What the collectives need to know of a framework. One small class each; everything else is written once, in _api."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Optional, TypeVar

from ronde import _core

T = TypeVar("T")  # the framework's tensor


class Values(ABC, Generic[T]):
    """What the collectives do with tensors as values."""

    @abstractmethod
    def convert(self, value: Any) -> T:
        """The value as a tensor that shares its memory where that is possible; TypeError if it cannot be one."""

    @abstractmethod
    def integers(self, values: Sequence[int]) -> T:
        """A tensor of these whole numbers (received splits)."""

    @abstractmethod
    def zeros_like(self, tensor: T) -> T:
        """Zeros of the same shape and dtype."""

    @abstractmethod
    def dtype_name(self, tensor: T) -> str:
        """The element type by the core's name for it."""

    @abstractmethod
    def cast(self, tensor: T, dtype_name: str) -> T:
        """The tensor with another element type."""

    def differentiable(
        self, forward: Callable[[list[T]], list[T]], gradient: Callable[[list[T]], list[T]], tensors: list[T]
    ) -> list[T]:
        """forward(tensors), whose gradient is what `gradient` makes of the results' gradients."""
        return forward(tensors)


class Frontend(Values[T]):
    """Reads and makes tensors of one framework.

    "Memory" below is a tensor that the core can read and write by address: in host memory, dense, row-major.
    """

    @abstractmethod
    def memory(self, tensor: T) -> T:
        """The tensor itself if it is memory, else a copy."""

    @abstractmethod
    def row(self, memory: T) -> tuple[int, int, tuple[int, ...]]:
        """Address, the core's number of the dtype, and shape; TypeError if the core has no such dtype."""

    @abstractmethod
    def empty_like(self, memory: T) -> T:
        """New memory of the same shape and dtype."""

    @abstractmethod
    def wrap(self, buffer: _core.Buffer) -> T:
        """A tensor in the core's buffer, which it keeps alive."""

    def place(self, result: T, like: T) -> T:
        """The result where the tensor that it came from is (a device)."""
        return result

    @abstractmethod
    def check_writable(self, tensor: T, given: Any) -> None:
        """ArgumentError or TypeError if an operation cannot write its result into this tensor, converted from `given`."""

    @abstractmethod
    def assign(self, target: T, source: T) -> None:
        """Ends an operation in place: copies the source into the target, unless it is the target."""


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory (an expanded tensor). Strides in any one unit."""
    if 0 in shape:
        return False
    reach: int = 0
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape) if length > 1):
        if stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def dtype_number(name: Optional[str], what: Any) -> int:
    """The core's number of a dtype; TypeError names what the caller has instead."""
    number = _core.DTYPES.get(name) if name is not None else None
    if number is None:
        raise TypeError(f"elements of type {what} cannot be sent: use one of {', '.join(_core.DTYPES)}")
    return number
