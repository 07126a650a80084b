"""Reduces TensorFlow's gradients. The optimizers and the gradient tape share it."""

from collections.abc import Hashable, Sequence
from typing import Any, Optional

import tensorflow as tf
from ronde._gradient_options import GradientOptions
from ronde._gradient_reducer import GradientReducer
from ronde.tensorflow import _sparse
from ronde.tensorflow._names import node_name
from ronde.tensorflow.mpi_ops import allreduce, grouped_allreduce

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
Variable = Any


class TensorFlowReducer(GradientReducer):
    """Sends each gradient by itself while others are still computed, in a graph; all at once in eager mode, where an op
    ends before the next one starts."""

    def __init__(
        self, options: GradientOptions, device_dense: str = "", device_sparse: str = "", scale_local: bool = True
    ) -> None:
        super().__init__(options, scale_local)
        self._common: dict[str, Any] = {
            "device_dense": device_dense, "device_sparse": device_sparse, "compression": options.compression,
            "op": options.op, "process_set": options.process_set,
        }  # fmt: skip

    def densify(self, grad: Gradient) -> Gradient:
        """The gradient in the form in which it is sent."""
        if isinstance(grad, tf.IndexedSlices) and self.options.sparse_as_dense:
            return tf.convert_to_tensor(grad)
        return grad

    def reduce(self, grads: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        if not self.options.process_set.included():
            return list(grads)
        return super().reduce([self.densify(grad) for grad in grads], variables)

    def key(self, variable: Variable) -> Hashable:
        return variable.ref() if hasattr(variable, "ref") else id(variable)

    def prefix(self, variables: Sequence[Variable]) -> Optional[str]:
        return None if tf.executing_eagerly() else node_name("gradient")

    def in_one_group(self) -> bool:
        return bool(tf.executing_eagerly())

    def is_sparse(self, grad: Gradient) -> bool:
        return isinstance(grad, tf.IndexedSlices)

    def reduce_sparse(self, grad: Gradient, name: Optional[str]) -> Gradient:
        return allreduce(grad, None, name=name, **self._common)

    def reduce_groups(self, groups: list[list[Any]], names: list[Optional[str]]) -> list[list[Any]]:
        prescale, postscale = self.options.scales
        return [
            grouped_allreduce(
                group, None, name=name, prescale_factor=prescale, postscale_factor=postscale, **self._common
            )
            for group, name in zip(groups, names)
        ]

    def scaled(self, grad: Gradient, factor: float) -> Gradient:
        return _sparse.scale(grad, factor)
