"""Reduces the gradients of a list of variables, whatever the framework: which are sent, together with which others."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, Optional

from ronde._gradient_options import GradientOptions
from ronde.common.util import split_list

Gradient = Any  # a tensor, a sparse gradient of the framework's or None
Tensor = Any
Variable = Any


class GradientReducer(ABC):
    """For frameworks that hand over all gradients of a step at once.

    Args:
        scale_local: gradients of local variables are divided by the number of ranks, as averages are.
    """

    def __init__(self, options: GradientOptions, scale_local: bool = True) -> None:
        self.options = options
        self._scale_local = scale_local
        self._local: set[Hashable] = set()

    def register_local(self, variable: Variable) -> None:
        """The gradient of this variable stays on this rank."""
        self._local.add(self.key(variable))

    def is_local(self, variable: Variable) -> bool:
        return self.key(variable) in self._local

    def reduce(self, grads: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """The gradients of all ranks together. None stays None: it must be so on all ranks."""
        results = list(grads)
        if not self.options.process_set.included() or self.options.process_set.size() == 1:
            return results  # of one rank: all that the options say comes to nothing
        prefix = self.prefix(variables)
        numbers: dict[int, int] = {}  # by place; of the sent ones only: a rank may know of variables that no loss uses
        dense: list[int] = []
        sparse: list[int] = []
        for place, (grad, variable) in enumerate(zip(grads, variables)):
            if grad is None:
                continue
            if self.is_local(variable):
                results[place] = self.scaled(grad, 1 / self.options.process_set.size()) if self._scale_local else grad
                continue
            numbers[place] = len(numbers)
            (sparse if self.is_sparse(grad) else dense).append(place)
        groups = self._groups(dense, variables)
        grouped = self.options.groups or self.in_one_group()
        names = [f"group.{number}" if grouped else f"{numbers[group[0]]}" for number, group in enumerate(groups)]
        sent = self.reduce_groups(
            [[grads[place] for place in group] for group in groups], [prefix and f"{prefix}.{name}" for name in names]
        )
        for group, values in zip(groups, sent):
            for place, value in zip(group, values):
                results[place] = value
        for place in sparse:  # after the others: a rank to which one of them is dense has another group, an error
            results[place] = self.reduce_sparse(grads[place], prefix and f"{prefix}.{numbers[place]}")
        return results

    def _groups(self, places: list[int], variables: Sequence[Variable]) -> list[list[int]]:
        """Which gradients are sent together."""
        groups = self.options.groups
        if not places:
            return []
        if isinstance(groups, (list, tuple)):
            number_of = {self.key(variable): number for number, group in enumerate(groups) for variable in group}
            members: defaultdict[Any, list[int]] = defaultdict(list)
            for place in places:
                members[number_of.get(self.key(variables[place]), ("alone", place))].append(place)
            return list(members.values())
        if groups:
            return split_list(places, groups)
        return [places] if self.in_one_group() else [[place] for place in places]

    # ---- What differs between frameworks ----

    @abstractmethod
    def key(self, variable: Variable) -> Hashable:
        """The variable's identity; `==` may compare values."""

    @abstractmethod
    def prefix(self, variables: Sequence[Variable]) -> Optional[str]:
        """What the names of these variables' gradients start with, the same on all ranks; None: without names."""

    @abstractmethod
    def in_one_group(self) -> bool:
        """Whether gradients go together where the user has not said how."""

    @abstractmethod
    def reduce_groups(self, groups: list[list[Tensor]], names: list[Optional[str]]) -> list[list[Tensor]]:
        """Groups of gradients of all ranks together."""

    @abstractmethod
    def scaled(self, grad: Gradient, factor: float) -> Gradient:
        """A gradient times a factor."""

    def is_sparse(self, grad: Gradient) -> bool:
        """Whether a gradient is to be sent as a sparse one."""
        return False

    def reduce_sparse(self, grad: Gradient, name: Optional[str]) -> Gradient:
        """A sparse gradient of all ranks together."""
        raise NotImplementedError


def local_variables(layers: Any) -> list[Any]:
    """The trainable weights of a layer or of several."""
    if layers is None:
        return []
    several = layers if isinstance(layers, (list, tuple, set)) else [layers]
    if not all(hasattr(layer, "trainable_weights") for layer in several):
        raise ValueError(f"local_layers must be Keras layers, not {layers!r}")
    for layer in several:
        if not getattr(layer, "built", True):
            raise ValueError(f"local_layers: layer '{layer.name}' is not built, so it has no weights yet")
    return [weight for layer in several for weight in layer.trainable_weights]
