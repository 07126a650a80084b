"""Gradients of all ranks inside of JAX's jit: one call for all gradients of an optimizer's step."""

import ctypes
import functools
import itertools
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Optional

import jax
import numpy as np

from ronde import _core, _numpy
from ronde._frontend import dtype_number
from ronde._gradient_reducer import GradientReducer
from ronde.process_sets import ProcessSet, engine_memory, set_id

Array = Any  # of JAX, or what stands for one while a function is traced

_TARGET = "ronde_allreduce"
_last = threading.local()
_numbers: "dict[int, itertools.count[int]]" = engine_memory()  # by process set


class JaxReducer(GradientReducer):
    """All gradients of a step in one call, whatever options.groups says."""

    _number: Optional[int] = None

    def key(self, variable: Any) -> Hashable:
        return id(variable)

    def prefix(self, variables: Sequence[Any]) -> Optional[str]:
        """Optimizers are numbered as they are traced first, in the same order on all ranks: those of one traced function,
        whose calls XLA may run side by side, have names of their own."""
        if self._number is None:
            self._number = next(_numbers.setdefault(set_id(self.options.process_set), itertools.count()))
        return f"gradient.{self._number}"

    def in_one_group(self) -> bool:
        return True

    def scaled(self, grad: Array, factor: float) -> Array:
        return grad * factor

    def reduce_groups(self, groups: list[list[Array]], names: list[Optional[str]]) -> list[list[Array]]:
        if not groups:
            return []
        options = self.options
        pairs = [options.compression.compress(grad) for group in groups for grad in group]
        results = grouped_allreduce(
            [grad for grad, _ in pairs], str(names[0]), options.op, options.scales, options.process_set
        )
        flat = iter(options.compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs))
        return [[next(flat) for _ in group] for group in groups]


def grouped_allreduce(
    arrays: Sequence[Array], name: str, op: int, scales: tuple[float, float], process_set: ProcessSet
) -> list[Array]:
    """The allreduce of ronde._collectives, in eager mode and where a function is traced for jit.

    Calls of one traced function follow one another: XLA would run independent ones in another order on each rank, and
    each holds a thread of its few ones.
    """
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    dtypes = [dtype_number(array.dtype.name, array.dtype) for array in arrays]
    if jax.default_backend() == "cpu" and _has_target():
        call = jax.ffi.ffi_call(
            _TARGET, shapes, has_side_effect=True, input_output_aliases={place: place for place in range(len(arrays))}
        )
        numbers = np.array([op, set_id(process_set), *dtypes], np.int32)
        before = _last_of_trace(arrays[0])
        results = list(call(*arrays, *before, name=name, numbers=numbers, scales=np.array(scales, np.float64)))
        if not _is_traced(results[0]):
            return jax.block_until_ready(results)
        _last.result = results[0]
        return results

    def on_host(*values: Any) -> list[Any]:
        return _numpy.grouped_allreduce(
            [np.asarray(value) for value in values], name=name, op=op, prescale_factor=scales[0],
            postscale_factor=scales[1], process_set=process_set,
        )  # fmt: skip

    from jax.experimental import io_callback

    return list(io_callback(on_host, shapes, *arrays, ordered=True))


def _is_traced(array: Array) -> bool:
    return isinstance(array, jax.core.Tracer)


def _last_of_trace(array: Array) -> list[Array]:
    """A result of the call before, if the same function was being traced: what the next call must wait for."""
    last = getattr(_last, "result", None)
    same = last is not None and _is_traced(array) and last._trace is array._trace
    return [last] if same else []


@functools.lru_cache(maxsize=None)
def _has_target() -> bool:
    """Makes ronde's foreign function known to JAX. False: this JAX is older than jax.ffi, or refuses it."""
    if not hasattr(jax, "ffi"):
        return False
    library = ctypes.CDLL(str(Path(_core.__file__).with_name("libronde_jax.so")))
    try:
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.ronde_jax_allreduce), platform="cpu")
    except Exception:  # of XLA's, without a type of its own
        return False
    return True
