"""What the distributed optimizers of all frameworks are told."""

import warnings
from dataclasses import dataclass
from typing import Any, Optional

from ronde import _core
from ronde.basics import Adasum, Average, reduction
from ronde.process_sets import ProcessSet


@dataclass
class GradientOptions:
    """How gradients are reduced.

    Attributes:
        compression: how they travel.
        op: Average, Sum, Min, Max, Product or, where it is allowed, Adasum.
        predivide: divides gradients before they are summed; the rest of the average comes after.
        groups: into how many groups to cut them, or lists of variables, that are sent together; None: each by itself.
        sparse_as_dense: sends sparse gradients as dense ones.
        process_set: the ranks that train together. On others the optimizer works as if it were not distributed.
        passes: backward passes whose gradients are summed before they are sent.
        allows_adasum: whether who asks has an Adasum form.
    """

    compression: Any
    op: int
    predivide: float
    groups: Any
    sparse_as_dense: bool
    process_set: ProcessSet
    passes: int = 1
    allows_adasum: bool = False

    def __post_init__(self) -> None:
        self.op = reduction(self.op, None)
        if not (hasattr(self.compression, "compress") and hasattr(self.compression, "decompress")):
            raise TypeError(
                f"compression={self.compression!r}: use one of Compression, or a class with its two methods"
            )
        if self.op == Adasum and not self.allows_adasum:
            raise ValueError(
                "op=Adasum: optimizers of Keras have no Adasum form, those of torch and of tf.compat.v1.train have one. "
                "DistributedGradientTape of ronde.tensorflow reduces gradients by Adasum, and allreduce() any tensors"
            )
        if self.predivide != 1 and self.op != Average:
            raise ValueError("gradient_predivide_factor needs op=Average")
        if not self.predivide > 0:
            raise ValueError(f"gradient_predivide_factor is {self.predivide}; it must be above 0")
        if isinstance(self.groups, int) and self.groups < 0:
            raise ValueError(f"groups is {self.groups}; it must not be negative")
        if isinstance(self.groups, float):
            raise TypeError(f"groups is {self.groups}; it must be a whole number or lists of variables")
        if not isinstance(self.passes, int):
            raise TypeError(f"backward_passes_per_step is {self.passes!r}; it must be a whole number")
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step is {self.passes}; it must be at least 1")
        _core.topology()  # NotInitializedError before init()

    @property
    def scales(self) -> tuple[float, float]:
        """What each rank's gradient is multiplied by before, and the result after."""
        return (1 / self.predivide, self.predivide) if self.op == Average else (1.0, 1.0)


def chosen_groups(groups: Any, num_groups: int, stacklevel: int = 3) -> Optional[Any]:
    """`groups`, or what the deprecated `num_groups` asks for."""
    if not num_groups:
        return groups
    warnings.warn("`num_groups` is deprecated: use `groups`", DeprecationWarning, stacklevel=stacklevel)
    return num_groups if groups is None else groups
