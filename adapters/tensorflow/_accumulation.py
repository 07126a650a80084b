"""Sums the gradients of several backward passes on this rank, before they are sent."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1
Gradient = Any
Tensor = Any
Variable = Any


class Accumulation:
    """Sums and counters of passes, in variables that the first call makes. They are local: not saved, not broadcast.

    Losses of one optimizer that train other variables are counted by themselves. Sums are set to zero, never multiplied
    by it: an infinity in one pass does not reach the next ones.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes, self._average = passes, average
        self._eager: dict[Any, _Sums] = {}  # by the variables
        self._graphs: "weakref.WeakKeyDictionary[Any, dict[Any, _Sums]]" = weakref.WeakKeyDictionary()

    def add(
        self,
        grads: Sequence[Gradient],
        variables: Sequence[Variable],
        reduce: Callable[[list[Gradient]], list[Gradient]],
    ) -> tuple[list[Gradient], Tensor]:
        """Adds a pass. Returns gradients, and whether they are to be applied: this was the last pass of a step.

        IndexedSlices become dense. None adds nothing, and stays None for a variable that never had a gradient.
        """
        keys = [variable.ref() if hasattr(variable, "ref") else id(variable) for variable in variables]
        sums = self._sums_of(tuple(keys))
        added = []
        for key, grad in zip(keys, grads):
            if grad is not None:
                dense = tf.convert_to_tensor(grad)
                added.append(sums.of(key, dense).assign_add(dense))
        places = [place for place, key in enumerate(keys) if key in sums.totals]
        totals = [sums.totals[keys[place]] for place in places]
        with tf.control_dependencies(added):
            is_last = tf.equal(sums.counter.assign_add(1), self._passes)

        def send() -> list[Tensor]:
            values = [total.read_value() for total in totals]
            factor = 1 / self._passes if self._average else 1.0
            result = reduce(_spread(len(grads), places, [each * factor for each in values]))
            with tf.control_dependencies(values):
                cleared = [total.assign(tf.zeros_like(total)) for total in totals]
                cleared.append(sums.counter.assign(0))
            with tf.control_dependencies(cleared):
                return [tf.identity(result[place]) for place in places]

        def wait() -> list[Tensor]:
            return [tf.zeros_like(total) for total in totals]

        with tf.control_dependencies([is_last]):
            results = tf.cond(is_last, send, wait)
        return _spread(len(grads), places, list(results) if isinstance(results, (list, tuple)) else [results]), is_last

    def _sums_of(self, keys: tuple[Any, ...]) -> "_Sums":
        with tf.init_scope():
            eager = tf.executing_eagerly()
            known = self._eager if eager else self._graphs.setdefault(v1.get_default_graph(), {})
            return known[keys] if keys in known else known.setdefault(keys, _Sums())


class _Sums:
    """Of the gradients of some variables that are always given together."""

    def __init__(self) -> None:
        self.totals: dict[Any, Any] = {}  # by variable
        self.counter = local_variable((), tf.int64)

    def of(self, key: Any, grad: Tensor) -> Any:
        """The sum for a variable with gradients like this one."""
        if key not in self.totals:
            self.totals[key] = local_variable(grad.shape, grad.dtype)
        return self.totals[key]


def local_variable(shape: Any, dtype: Any) -> Any:
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False)
        collections = [v1.GraphKeys.LOCAL_VARIABLES]
        return v1.Variable(tf.zeros(shape, dtype), trainable=False, collections=collections, use_resource=True)


def _spread(length: int, places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """A list with the values at their places and None elsewhere."""
    result: list[Any] = [None] * length
    for place, value in zip(places, values):
        result[place] = value
    return result
