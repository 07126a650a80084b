"""DistributedOptimizer: for the optimizers of tf.compat.v1.train and those of Keras.

The optimizer that was given stays the same object and becomes an instance of a subclass of its own class. It keeps its
name, so checkpoints are those of the optimizer alone.
"""

from collections.abc import Iterable
from typing import Any, Optional

import tensorflow as tf
from ronde._gradient_options import GradientOptions, chosen_groups
from ronde._keras.optimizer import distribute, is_keras_optimizer
from ronde.basics import Adasum, Average
from ronde.compression import Compressor
from ronde.process_sets import ProcessSet, global_process_set
from ronde.tensorflow._accumulation import Accumulation
from ronde.tensorflow._adasum import DeltaReducer, DistributedAdasum
from ronde.tensorflow._reducer import TensorFlowReducer
from ronde.tensorflow.compression import Compression

_V1Optimizer = tf.compat.v1.train.Optimizer


class _Distributed:
    """What the dynamic subclass adds to the class of an optimizer of tf.compat.v1.train."""

    _reducer: TensorFlowReducer
    _accumulation: Optional[Accumulation]
    _is_last: Any  # of the gradients that compute_gradients has returned last: whether to apply them

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._reducer.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's own, with the gradients of all ranks."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]

        def reduce(grads: list[Any]) -> list[Any]:
            return self._reducer.reduce(grads, variables)

        if self._accumulation is None:
            return list(zip(reduce(grads), variables))
        grads, self._is_last = self._accumulation.add(grads, variables, reduce)
        return list(zip(grads, variables))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own; with backward_passes_per_step, nothing happens but after the last pass."""
        apply = super().apply_gradients  # type: ignore[misc]
        if self._accumulation is None:
            return apply(grads_and_vars, *args, **kwargs)
        if self._is_last is None:
            raise ValueError("backward_passes_per_step: apply_gradients() needs what compute_gradients() returns")
        pairs = list(grads_and_vars)
        with tf.init_scope():  # outside of the branch below, whose name would be a part of theirs in checkpoints
            self._create_slots([variable for grad, variable in pairs if grad is not None])  # type: ignore[attr-defined]

        def step() -> Any:
            done = apply(pairs, *args, **kwargs)
            with tf.control_dependencies([] if done is None else [done]):
                return tf.identity(self._is_last)

        applied = tf.cond(self._is_last, step, lambda: tf.identity(self._is_last))
        return applied if tf.executing_eagerly() else applied.op


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: Optional[str] = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Optional[Compressor[Any]] = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer step with the gradients of all ranks.

    Args:
        optimizer: of tf.compat.v1.train, or of Keras; it is changed and returned.
        name, use_locking: accepted for compatibility; the optimizer keeps its own, and so do its slots in checkpoints.
        device_dense, device_sparse: where to place the operations around the collectives.
        compression: how gradients travel: Compression.none, .fp16 or .bf16.
        sparse_as_dense: sends IndexedSlices as dense tensors.
        backward_passes_per_step: passes whose gradients are summed here before they are sent; the others change nothing.
            A TF 1 graph keeps the sums in local variables: run tf.compat.v1.local_variables_initializer(), as
            MonitoredTrainingSession does.
        op: Average, Sum, Min, Max or Product. Or, for optimizers of tf.compat.v1.train, Adasum, which combines steps: each
            rank's optimizer steps with the rank's own gradients, after every pass, and what has changed after
            backward_passes_per_step of them is reduced (see docs/adasum.md).
        gradient_predivide_factor: divides gradients before they are summed; the rest of the average comes after.
        average_aggregated_gradients: divides the sums of several passes by their number.
        num_groups: deprecated, see groups.
        groups: gradients are sent together: into how many groups to cut them, or lists of variables.
        process_set: the ranks that train together. On others the optimizer works as if it were not distributed.
        scale_local_gradients: divides the gradients of variables given to register_local_var() by the number of ranks.

    Raises:
        ValueError: wrong factors or groups; called before init().
    """
    if isinstance(optimizer, (_Distributed, DistributedAdasum)):
        raise ValueError("this optimizer is distributed already")
    options = GradientOptions(
        compression=compression or Compression.none,
        op=op,
        predivide=gradient_predivide_factor,
        groups=chosen_groups(groups, num_groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        passes=backward_passes_per_step,
        allows_adasum=isinstance(optimizer, _V1Optimizer),
    )
    if is_keras_optimizer(optimizer):
        average = average_aggregated_gradients
        return distribute(optimizer, options, average, scale_local_gradients, device_dense, device_sparse)
    if not isinstance(optimizer, _V1Optimizer):
        raise TypeError(
            "DistributedOptimizer needs an optimizer of tf.compat.v1.train or of Keras, not a "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    original = type(optimizer)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    if options.op == Adasum:
        if average_aggregated_gradients:
            raise ValueError("average_aggregated_gradients: with op=Adasum passes are steps, and nothing is averaged")
        reducer = DeltaReducer(options)
        optimizer.__class__ = type(original.__name__, (DistributedAdasum, original), names)
        optimizer._reducer = reducer
        return optimizer
    optimizer.__class__ = type(original.__name__, (_Distributed, original), names)
    optimizer._reducer = TensorFlowReducer(options, device_dense, device_sparse, scale_local_gradients)
    passes = backward_passes_per_step
    optimizer._accumulation = Accumulation(passes, average_aggregated_gradients) if passes > 1 else None
    optimizer._is_last = None
    return optimizer
