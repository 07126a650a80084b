"""Compression of tensors while they are on their way."""

from typing import Any, Generic, Optional

from ronde._frontend import T, Values


class Compressor(Generic[T]):
    """The interface. One's own may have both as static methods of a class."""

    def compress(self, tensor: T) -> tuple[T, Any]:
        """The tensor to send, and what decompress needs to know."""
        raise NotImplementedError

    def decompress(self, tensor: T, ctx: Any) -> T:
        """The result as the caller expects it."""
        raise NotImplementedError


class NoneCompressor(Compressor[T]):
    """Sends tensors as they are."""

    def compress(self, tensor: T) -> tuple[T, Any]:
        return tensor, None

    def decompress(self, tensor: T, ctx: Any) -> T:
        return tensor


class CastCompressor(Compressor[T]):
    """Sends float32 and float64 as a 16-bit type; the core still adds and averages in float32."""

    def __init__(self, frontend: Values[T], dtype_name: str) -> None:
        self._frontend = frontend
        self._dtype_name = dtype_name

    def compress(self, tensor: T) -> tuple[T, Optional[str]]:
        name = self._frontend.dtype_name(tensor)
        if name not in ("float32", "float64"):
            return tensor, None
        return self._frontend.cast(tensor, self._dtype_name), name

    def decompress(self, tensor: T, ctx: Optional[str]) -> T:
        return tensor if ctx is None else self._frontend.cast(tensor, ctx)


class Compression(Generic[T]):
    """The choices, as attributes: `none`, `fp16` and `bf16`."""

    def __init__(self, frontend: Values[T]) -> None:
        self.none: Compressor[T] = NoneCompressor()
        self.fp16: Compressor[T] = CastCompressor(frontend, "float16")
        self.bf16: Compressor[T] = CastCompressor(frontend, "bfloat16")
