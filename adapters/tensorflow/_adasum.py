"""The Adasum form of optimizers of tf.compat.v1.train: what is reduced is how far a rank's own steps moved the variables.

As ronde.torch._adasum; see docs/adasum.md.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from ronde._gradient_options import GradientOptions
from ronde.tensorflow._accumulation import local_variable
from ronde.tensorflow._names import base_name
from ronde.tensorflow.mpi_ops import grouped_allreduce

Tensor = Any
Variable = Any
Done = Any  # an operation, or None in eager mode


class DistributedAdasum:
    """What the dynamic subclass adds to the optimizer's class."""

    _reducer: "DeltaReducer"

    def register_local_var(self, var: Any) -> None:
        """This variable is trained by this rank alone."""
        self._reducer.local.add(_key(var))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own, with this rank's gradients; then what has changed is combined with other ranks'."""
        apply = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        return self._reducer.step(pairs, lambda: apply(pairs, *args, **kwargs))


class DeltaReducer:
    """See DistributedOptimizer for the arguments."""

    def __init__(self, options: GradientOptions) -> None:
        if options.groups:
            raise ValueError("groups: with op=Adasum the variables are sent all together; leave it out")
        self._options = options
        # What one rank does alone is its optimizer's.
        self._active = options.process_set.included() and options.process_set.size() > 1
        self._windows: dict[Any, _Window] = {}  # by the variables
        self.local: set[Hashable] = set()

    def step(self, pairs: Sequence[tuple[Any, Variable]], apply: Callable[[], Done]) -> Done:
        """A step of the rank's own, by apply(), and a reduction if it is due."""
        variables = [variable for grad, variable in pairs if grad is not None and _key(variable) not in self.local]
        if not self._active or not variables:
            return apply()
        for grad, variable in pairs:
            if isinstance(grad, tf.IndexedSlices) and not self._options.sparse_as_dense and variable in variables:
                raise ValueError(
                    f"the gradient of {variable.name!r} is sparse, but with op=Adasum all of the variable would be sent: "
                    "allow it with sparse_as_dense=True"
                )
        if self._options.passes > 1:
            return self._step_of_several(variables, apply)
        starts = [_copy(variable) for variable in variables]
        with tf.control_dependencies(starts):
            done = apply()
        with tf.control_dependencies(_list(done)):
            return _assign(variables, self._combined(variables, starts))

    def _step_of_several(self, variables: list[Variable], apply: Callable[[], Done]) -> Done:
        window = self._window_of(variables)

        def begin() -> Tensor:
            with tf.control_dependencies(
                [start.assign(_copy(variable)) for start, variable in zip(window.starts, variables)]
            ):
                return tf.constant(True)

        def end() -> list[Tensor]:
            values = self._combined(variables, [start.read_value() for start in window.starts])
            with tf.control_dependencies([window.counter.assign(0)]):
                return [tf.identity(value) for value in values]

        def wait() -> list[Tensor]:
            return [tf.identity(variable.read_value()) for variable in variables]

        begun = tf.cond(tf.equal(window.counter.read_value(), 0), begin, lambda: tf.constant(False))
        with tf.control_dependencies([begun]):
            done = apply()
        with tf.control_dependencies(_list(done)):
            is_last = tf.equal(window.counter.assign_add(1), self._options.passes)
        # Assigned out here: a branch cannot write variables of the old kind.
        values = tf.cond(is_last, end, wait)
        return _assign(variables, values if isinstance(values, (list, tuple)) else [values])

    def _combined(self, variables: Sequence[Variable], starts: Sequence[Tensor]) -> list[Tensor]:
        """What the variables are to be: all ranks' changes together, from where they were."""
        options = self._options
        deltas = [variable.read_value() - start for variable, start in zip(variables, starts)]
        name = None if tf.executing_eagerly() else base_name("delta")
        results = grouped_allreduce(
            deltas, None, compression=options.compression, op=options.op, name=name, process_set=options.process_set
        )
        return [start + result for start, result in zip(starts, results)]

    def _window_of(self, variables: Sequence[Variable]) -> "_Window":
        with tf.init_scope():
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            key = (graph, tuple(_key(variable) for variable in variables))
            if key not in self._windows:
                self._windows[key] = _Window(variables)
            return self._windows[key]


class _Window:
    """Where the variables were before the steps that are not reduced yet, and how many these are."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.starts = [local_variable(variable.shape, variable.dtype.base_dtype) for variable in variables]
        self.counter = local_variable((), tf.int64)


def _key(variable: Variable) -> Hashable:
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _copy(variable: Variable) -> Tensor:
    """The value in memory of its own: optimizers change variables in place."""
    return tf.raw_ops.DeepCopy(x=variable.read_value())


def _assign(variables: Sequence[Variable], values: Sequence[Tensor]) -> Done:
    return tf.group(*(variable.assign(value) for variable, value in zip(variables, values)))


def _list(done: Done) -> list[Any]:
    return [] if done is None else [done]
