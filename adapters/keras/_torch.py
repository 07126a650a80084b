"""Gradients of all ranks for Keras on PyTorch."""

from collections.abc import Hashable, Sequence
from typing import Any, Optional

import torch

from ronde._gradient_reducer import GradientReducer
from ronde.torch import mpi_ops

Tensor = torch.Tensor


class TorchReducer(GradientReducer):
    """All gradients of a step together: Keras hands them over when backward has ended."""

    _owned: frozenset[int] = frozenset()  # gradients that belong to the variables: results may go into them

    @torch.compiler.disable
    def reduce(self, grads: Sequence[Optional[Tensor]], variables: Sequence[Any]) -> list[Optional[Tensor]]:
        self._owned = frozenset(id(variable.value.grad) for variable in variables)
        return super().reduce(grads, variables)

    def key(self, variable: Any) -> Hashable:
        return id(variable)

    def prefix(self, variables: Sequence[Any]) -> Optional[str]:
        return "gradient"  # all are awaited before others can come

    def in_one_group(self) -> bool:
        return True

    def scaled(self, grad: Tensor, factor: float) -> Tensor:
        return grad * factor

    def reduce_groups(self, groups: list[list[Tensor]], names: list[Optional[str]]) -> list[list[Tensor]]:
        started = [self._start(group, name) for group, name in zip(groups, names)]
        decompress = self.options.compression.decompress
        return [[decompress(grad, ctx) for grad, ctx in zip(handle.wait(), contexts)] for handle, contexts in started]

    def _start(self, group: list[Tensor], name: Optional[str]) -> tuple[Any, list[Any]]:
        options = self.options
        pairs = [options.compression.compress(grad) for grad in group]
        tensors = [tensor for tensor, _ in pairs]
        ours = all(tensor is not grad or id(grad) in self._owned for tensor, grad in zip(tensors, group))
        start = mpi_ops.grouped_allreduce_async_ if ours else mpi_ops.grouped_allreduce_async
        handle = start(tensors, None, name, options.op, *options.scales, options.process_set)
        return handle, [ctx for _, ctx in pairs]
