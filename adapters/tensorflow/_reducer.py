"""Reduces the gradients of a list of variables. The optimizers and the gradient tape share it."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Optional

import tensorflow as tf
from ronde._gradient_options import GradientOptions
from ronde.common.util import split_list
from ronde.tensorflow import _sparse
from ronde.tensorflow._names import node_name
from ronde.tensorflow.mpi_ops import allreduce, grouped_allreduce

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None
Variable = Any


class GradientReducer:
    """Sends each gradient by itself while others are still computed, in a graph; all at once in eager mode.

    Args:
        scale_local: gradients of local variables are divided by the number of ranks, as averages are.
    """

    def __init__(
        self, options: GradientOptions, device_dense: str = "", device_sparse: str = "", scale_local: bool = True
    ) -> None:
        self.options = options
        self._devices: dict[str, Any] = {"device_dense": device_dense, "device_sparse": device_sparse}
        self._scale_local = scale_local
        self._local: set[Any] = set()

    def register_local(self, variable: Variable) -> None:
        """The gradient of this variable stays on this rank."""
        self._local.add(_key(variable))

    def is_local(self, variable: Variable) -> bool:
        return _key(variable) in self._local

    def densify(self, grad: Gradient) -> Gradient:
        """The gradient in the form in which it is sent."""
        if isinstance(grad, tf.IndexedSlices) and self.options.sparse_as_dense:
            return tf.convert_to_tensor(grad)
        return grad

    def reduce(self, grads: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """The gradients of all ranks together. None stays None: it must be so on all ranks."""
        grads, variables = list(grads), list(variables)
        options = self.options
        if not options.process_set.included():
            return grads
        prefix = _prefix(variables)
        dense, sent = [], {}
        for place, (grad, variable) in enumerate(zip(grads, variables)):
            grad = self.densify(grad)
            if grad is None:
                continue
            if self.is_local(variable):
                sent[place] = self._scaled(grad)
            elif isinstance(grad, tf.IndexedSlices):
                sent[place] = allreduce(
                    grad, None, **self._devices, compression=options.compression, op=options.op,
                    name=prefix and f"{prefix}.{place}", process_set=options.process_set,
                )  # fmt: skip
            else:
                grads[place] = grad
                dense.append(place)
        for number, group in enumerate(self._groups(dense, variables)):
            what = str(group[0]) if len(group) == 1 else f"group.{number}"
            prescale, postscale = options.scales
            results = grouped_allreduce(
                [grads[place] for place in group], None, **self._devices, compression=options.compression,
                op=options.op, prescale_factor=prescale, postscale_factor=postscale, name=prefix and f"{prefix}.{what}",
                process_set=options.process_set,
            )  # fmt: skip
            sent.update(zip(group, results))
        return [sent.get(place, grad) for place, grad in enumerate(grads)]

    def _groups(self, places: list[int], variables: Sequence[Variable]) -> list[list[int]]:
        """Which gradients are sent together."""
        groups = self.options.groups
        if not places:
            return []
        if isinstance(groups, (list, tuple)):
            number_of = {_key(variable): number for number, group in enumerate(groups) for variable in group}
            members: defaultdict[Any, list[int]] = defaultdict(list)
            for place in places:
                members[number_of.get(_key(variables[place]), ("alone", place))].append(place)
            together = list(members.values())
        else:
            together = split_list(places, groups) if groups else [[place] for place in places]
        # An eager op ends before the next one starts.
        return [places] if tf.executing_eagerly() and groups is None else together

    def _scaled(self, grad: Gradient) -> Gradient:
        return _sparse.scale(grad, 1 / self.options.process_set.size()) if self._scale_local else grad


def _prefix(variables: Sequence[Variable]) -> Optional[str]:
    """Names gradients in a graph by the traced function and the variables' shapes; their places there follow.

    The same each time a function is traced, and each time a tape is made.
    """
    if tf.executing_eagerly():
        return None
    shapes = [(str(variable.shape), str(variable.dtype)) for variable in variables]
    return node_name(f"gradient.{zlib.crc32(repr(shapes).encode()):08x}")


def _key(variable: Variable) -> Any:
    """Variables by identity; `==` compares their values."""
    return variable.ref() if hasattr(variable, "ref") else id(variable)
