"""Sums the gradients of several backward passes on this rank, before they are sent."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Gradient = Any
Tensor = Any


class Accumulation:
    """Sums and one counter of passes, in variables that the first call makes. They are local: not saved, not broadcast.

    Sums are set to zero, never multiplied by it: an infinity in one pass does not reach the next ones.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes, self._average = passes, average
        self._counter: Any = None
        self._sums: list[Any] = []

    def add(
        self, grads: Sequence[Gradient], reduce: Callable[[list[Gradient]], list[Gradient]]
    ) -> tuple[list[Gradient], Tensor]:
        """Adds a pass. Returns gradients, and whether they are to be applied: this was the last pass of a step.

        IndexedSlices become dense. None stays None and must be so in every pass.
        """
        places = [place for place, grad in enumerate(grads) if grad is not None]
        dense = [tf.convert_to_tensor(grads[place]) for place in places]
        self._make(dense)
        added = [total.assign_add(grad) for total, grad in zip(self._sums, dense)]
        with tf.control_dependencies(added):
            is_last = tf.equal(self._counter.assign_add(1), self._passes)

        def send() -> list[Tensor]:
            sums = [total.read_value() for total in self._sums]
            factor = 1 / self._passes if self._average else 1.0
            result = reduce(_spread(len(grads), places, [each * factor for each in sums]))
            with tf.control_dependencies(sums):
                cleared = [total.assign(tf.zeros_like(total)) for total in self._sums]
                cleared.append(self._counter.assign(0))
            with tf.control_dependencies(cleared):
                return [tf.identity(result[place]) for place in places]

        def wait() -> list[Tensor]:
            return [tf.zeros_like(grad) for grad in dense]

        with tf.control_dependencies([is_last]):
            results = tf.cond(is_last, send, wait)
        return _spread(len(grads), places, list(results) if isinstance(results, (list, tuple)) else [results]), is_last

    def _make(self, grads: Sequence[Tensor]) -> None:
        if self._counter is not None:
            return
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        with tf.init_scope():

            def variable(shape: Any, dtype: Any) -> Any:
                if tf.executing_eagerly():
                    return tf.Variable(tf.zeros(shape, dtype), trainable=False)
                return tf.compat.v1.Variable(
                    tf.zeros(shape, dtype), trainable=False, collections=collections, use_resource=True
                )

            self._counter = variable((), tf.int64)
            self._sums = [variable(grad.shape, grad.dtype) for grad in grads]


def _spread(length: int, places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """A list with the values at their places and None elsewhere."""
    result: list[Any] = [None] * length
    for place, value in zip(places, values):
        result[place] = value
    return result
