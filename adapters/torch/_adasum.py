"""The Adasum form of DistributedOptimizer: what is reduced is how far a rank's own steps moved the parameters.

Each rank steps with its own gradients, with the optimizer and state that it has. The differences between the parameters
after and before are then combined by Adasum and added to where all ranks began, so that all hold the same bits again.
Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from ronde._gradient_options import GradientOptions
from ronde.torch import mpi_ops
from ronde.torch._reducer import Parameter, check_names, drop_prefix, prefix_of


class DeltaReducer:
    """See DistributedOptimizer for the arguments."""

    def __init__(
        self, params: Sequence[Parameter], named: Sequence[tuple[str, Parameter]], options: GradientOptions
    ) -> None:
        if options.groups:
            raise ValueError("groups: with op=Adasum the parameters are sent all together; leave it out")
        self._options = options
        # What one rank does alone is its optimizer's.
        self._active = options.process_set.included() and options.process_set.size() > 1
        self._names: dict[Parameter, str] = {}
        check_names(params, named, self._names)
        self._starts: dict[Parameter, torch.Tensor] = {}  # before the first step that is not reduced yet
        self._passes = options.passes
        self._counts: dict[Parameter, int] = {}  # backward passes since the last step
        self._counted = 0  # passes of the steps that are not reduced yet
        self._hooked: set[Parameter] = set()
        self.add_parameters(params)
        weakref.finalize(self, drop_prefix, id(self))

    def set_passes(self, passes: int) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}; it must be at least 1")
        self._passes = passes
        self.add_parameters(list(self._names))

    def add_parameters(self, params: Sequence[Parameter]) -> None:
        for param in params:
            self._names.setdefault(param, f"parameter.{len(self._names)}")
            self._hook(param)

    def before_step(self) -> None:
        if not self._active:
            return
        for param in self._trained():
            self._hook(param)  # may have been unfrozen
            if param.grad is not None and param.grad.is_sparse and not self._options.sparse_as_dense:
                raise ValueError(
                    f"the gradient of {self._names[param]!r} is sparse, but with op=Adasum all of the parameter would be "
                    "sent: allow it with sparse_as_dense=True"
                )
            if param not in self._starts:
                self._starts[param] = param.detach().clone()

    def after_step(self) -> None:
        # Without a gradient there is nothing to count, but other ranks have had all their passes.
        self._counted += max(self._counts.values(), default=self._passes)
        self._counts.clear()
        if self._counted >= self._passes:
            self.reduce()

    def reduce(self) -> None:
        """Combines the steps since the last time."""
        starts, self._starts, self._counted = self._starts, {}, 0
        if not starts:
            return
        options = self._options
        pairs = [options.compression.compress(param.detach() - start) for param, start in starts.items()]
        name = prefix_of(self, "delta", self._names.values(), options.process_set) + "all"
        results = mpi_ops.grouped_allreduce_(
            [delta for delta, _ in pairs], None, name, options.op, process_set=options.process_set
        )
        with torch.no_grad():
            for (param, start), result, (_, ctx) in zip(starts.items(), results, pairs):
                param.copy_(start.add_(options.compression.decompress(result, ctx)))

    def _trained(self) -> list[Parameter]:
        return [param for param in self._names if param.requires_grad]

    def _hook(self, param: Parameter) -> None:
        """Counts the backward passes, where one step may be less than what is reduced at once."""
        if self._passes == 1 or not (self._active and param.requires_grad and param.is_leaf) or param in self._hooked:
            return
        self._hooked.add(param)
        reference = weakref.ref(self)

        def computed(param: Parameter) -> None:
            reducer = reference()
            if reducer is None:
                hook.remove()
            else:
                reducer._counts[param] = reducer._counts.get(param, 0) + 1

        hook = param.register_post_accumulate_grad_hook(computed)


class DistributedAdasum:
    """What the dynamic subclass adds to the optimizer's class."""

    _reducer: DeltaReducer

    def synchronize(self) -> None:
        """Reduces steps that wait for more of `backward_passes_per_step`. Gradients stay as they are: they are this
        rank's own, also to clip them."""
        self._reducer.reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For scripts that call synchronize() to clip gradients: step() is the same within it, as there are no gradients
        to wait for."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on, steps are reduced after so many backward passes."""
        self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters are reduced, too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_reducer" in self.__dict__:
            self._reducer.add_parameters(self.__dict__["param_groups"][-1]["params"])


def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._reducer.before_step()


def after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._reducer.after_step()
