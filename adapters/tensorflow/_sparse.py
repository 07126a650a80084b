"""Allreduce of tf.IndexedSlices.

Equal rows are merged before anything is sent. The indices of all ranks are gathered first; when their number is known,
the values follow by whichever way sends less: gathered beside their indices, or as a dense tensor. Either way the result
has the rows that any rank has, each once, so an optimizer that treats missing rows differently from zeros sees no
difference.
"""

from typing import Any, Optional

import tensorflow as tf
from ronde._core import ArgumentError
from ronde.basics import Average, Sum
from ronde.compression import Compressor
from ronde.process_sets import ProcessSet, set_id
from ronde.tensorflow._names import base_name
from ronde.tensorflow._run import run

Tensor = Any


def allreduce(
    slices: Any,
    name: Optional[str],
    op: int,
    factor: float,
    compression: Compressor[Tensor],
    process_set: ProcessSet,
) -> Any:
    """The sum or average, times `factor`, as IndexedSlices without equal rows, in ascending order."""
    if op not in (Average, Sum):
        raise ArgumentError("an allreduce of tf.IndexedSlices takes op=Average and op=Sum only")
    number = set_id(process_set)
    if op == Average:
        factor /= process_set.size()
    if name is None and not tf.executing_eagerly():
        name = base_name("allreduce")
    values, indices = _merge(slices.values, slices.indices, 1.0)
    # Under the plain name, so that a rank with a dense tensor of this name gets an error instead of a stall.
    (all_indices,) = run("allgather", [indices], name, number)
    sent, context = compression.compress(values)

    def gathered() -> tuple[Tensor, Tensor]:
        (all_values,) = run("allgather", [sent], name and f"{name}.values", number)
        return _merge(compression.decompress(all_values, context), all_indices, factor)

    if slices.dense_shape is None:
        total, rows = gathered()
    else:
        shape = tf.cast(slices.dense_shape, tf.int64)

        def dense() -> tuple[Tensor, Tensor]:
            own = tf.scatter_nd(tf.cast(indices, tf.int64)[:, None], sent, shape)
            whole = sent.dtype.is_integer
            (total,) = run(
                "allreduce", [own], name and f"{name}.dense", number, reduction=Sum, postscale=1.0 if whole else factor
            )
            rows = _distinct(all_indices)
            total = compression.decompress(tf.gather(total, rows), context)
            return scale(total, factor) if whole else total, rows

        elements = tf.cast(tf.size(all_indices), tf.int64) * tf.reduce_prod(shape[1:])
        # A dense allreduce sends each element twice.
        total, rows = tf.cond(elements <= 2 * tf.reduce_prod(shape), gathered, dense)
        if values.shape.rank is not None:
            total.set_shape([None, *values.shape[1:]])
    return tf.IndexedSlices(total, rows, slices.dense_shape)


def _merge(values: Tensor, indices: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The sums of rows with equal indices times the factor, in ascending order of these. 16-bit values are added, and
    multiplied, in float32."""
    rows = _distinct(indices)
    exact = tf.float32 if values.dtype.is_floating and values.dtype.size == 2 else values.dtype
    sums = tf.math.unsorted_segment_sum(tf.cast(values, exact), tf.searchsorted(rows, indices), tf.size(rows))
    return tf.cast(scale(sums, factor), values.dtype), rows


def _distinct(indices: Tensor) -> Tensor:
    return tf.sort(tf.unique(indices).y)


def scale(grad: Any, factor: float) -> Any:
    """A tensor or IndexedSlices times a number; whole numbers are rounded down, as in averages."""
    if factor == 1.0:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(scale(grad.values, factor), grad.indices, grad.dense_shape)
    if grad.dtype.is_integer:
        return tf.cast(tf.math.floor(tf.cast(grad, tf.float64) * factor), grad.dtype)
    return grad * factor
