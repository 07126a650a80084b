"""What DistributedOptimizer makes of an optimizer of Keras 3 on TensorFlow."""

import sys
from collections.abc import Iterable
from typing import Any, Optional

import tensorflow as tf
from ronde.tensorflow._accumulation import Accumulation
from ronde.tensorflow._reducer import GradientReducer


def is_keras_optimizer(optimizer: Any) -> bool:
    """Whether it is one of Keras 3. Imports nothing: who has one has imported Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and hasattr(keras, "version") and isinstance(optimizer, keras.optimizers.Optimizer)


class DistributedKerasOptimizer:
    """What the dynamic subclass adds to the optimizer's class.

    All of Keras' ways to apply gradients lead through apply(). Clipping comes after it.
    """

    _reducer: GradientReducer
    _accumulation: Optional[Accumulation]

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable stays on this rank."""
        self._reducer.register_local(var)

    def apply(self, grads: Iterable[Any], trainable_variables: Optional[Iterable[Any]] = None) -> None:
        """As the optimizer's own, with the gradients of all ranks; with backward_passes_per_step, nothing happens but
        after the last pass."""
        base: Any = super()
        grads = list(grads)
        if trainable_variables is None:
            variables = list(self._trainable_variables)  # type: ignore[attr-defined]
        else:
            variables = list(trainable_variables)
        if not grads or len(grads) != len(variables):
            base.apply(grads, trainable_variables)  # which says what is wrong
            return
        if self._accumulation is None:
            base.apply(self._reducer.reduce(grads, variables), variables)
            return
        if not self.built:  # type: ignore[has-type]
            base.build(variables)  # not inside the branch below
            self.built = True
        sums, is_last = self._accumulation.add(grads, lambda each: self._reducer.reduce(each, variables))

        def step() -> Any:
            base.apply(sums, variables)
            return tf.identity(is_last)

        tf.cond(is_last, step, lambda: tf.identity(is_last))
