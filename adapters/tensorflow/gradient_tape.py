"""Gradient tapes whose gradients are those of all ranks."""

from collections.abc import Iterable
from typing import Any, Optional

import tensorflow as tf
from ronde._gradient_options import GradientOptions, chosen_groups
from ronde._gradient_reducer import local_variables
from ronde.basics import Average
from ronde.compression import Compressor
from ronde.process_sets import ProcessSet, global_process_set
from ronde.tensorflow._reducer import TensorFlowReducer
from ronde.tensorflow.compression import Compression


class _Distributed:
    """What the dynamic subclass adds to the tape's class."""

    _reducer: TensorFlowReducer
    _in_jacobian = False

    def register_local_source(self, source: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._reducer.register_local(source)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As the tape's own, with the gradients of all ranks."""
        grads = super().gradient(target, sources, *args, **kwargs)  # type: ignore[misc]
        return grads if self._in_jacobian else self._reduced(grads, sources)

    def jacobian(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As the tape's own, with the Jacobians of all ranks: targets must have one shape."""
        return self._reduced(self._jacobian_here(super().jacobian, target, sources, args, kwargs), sources)  # type: ignore[misc]

    def batch_jacobian(self, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """The tape's own: one Jacobian for each example of this rank, and nothing of other ranks."""
        return self._jacobian_here(super().batch_jacobian, target, source, args, kwargs)  # type: ignore[misc]

    def _jacobian_here(self, compute: Any, target: Any, sources: Any, args: Any, kwargs: Any) -> Any:
        self._in_jacobian = True  # TensorFlow calls gradient(), in a loop whose passes run side by side
        try:
            return compute(target, sources, *args, **kwargs)
        finally:
            self._in_jacobian = False

    def _reduced(self, grads: Any, sources: Any) -> Any:
        flat = self._reducer.reduce(_flat(grads), _flat(sources))
        return tf.nest.pack_sequence_as(sources, flat, expand_composites=False)

    def get_local_and_global_gradients(
        self, gradients: Iterable[Any], sources: Iterable[Any]
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of gradient and source: first those that stay on this rank, then those of all ranks."""
        pairs = list(zip(gradients, sources))
        local = [pair for pair in pairs if self._reducer.is_local(pair[1])]
        return local, [pair for pair in pairs if not self._reducer.is_local(pair[1])]


def DistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Optional[Compressor[Any]] = None,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a tf.GradientTape give the gradients of all ranks. The tape is changed and returned.

    In tf.function every gradient is sent as soon as it is computed; in eager mode, all together.

    Args: as DistributedOptimizer's; register_local_source() takes the place of register_local_var(). op may be Adasum,
        which is then applied to the gradients (the dense ones, see sparse_as_dense).
    """
    if isinstance(gradtape, _Distributed):
        raise ValueError("this tape is distributed already")
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"DistributedGradientTape needs a tf.GradientTape, not a {type(gradtape).__name__}")
    options = GradientOptions(
        compression=compression or Compression.none,
        op=op,
        predivide=gradient_predivide_factor,
        groups=chosen_groups(groups, num_groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        allows_adasum=True,
    )
    original = type(gradtape)
    gradtape.__class__ = type(original.__name__, (_Distributed, original), {"__doc__": original.__doc__})
    gradtape._reducer = TensorFlowReducer(options, device_dense, device_sparse, scale_local_gradients)
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """DistributedGradientTape whose gradients of some layers stay on this rank.

    Args:
        local_layers: a Keras layer, or several, whose trainable weights are local.
        Others as DistributedGradientTape's.
    """
    tape = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def _flat(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure, expand_composites=False)
