"""DistributedOptimizer: reduces gradients across ranks while the backward pass still computes others.

A hook on every parameter starts the allreduce of its gradient as soon as that is there; the optimizer's step waits for
all of them first. The optimizer that was given stays the same object and becomes an instance of a subclass of its own
class, so that learning rate schedulers and restored state remain valid.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Optional, Union

import torch
from ronde._gradient_options import GradientOptions, chosen_groups
from ronde.basics import Adasum, Average
from ronde.compression import Compressor
from ronde.process_sets import ProcessSet, global_process_set
from ronde.torch import _adasum
from ronde.torch._reducer import GradientReducer
from ronde.torch.compression import Compression


class _Copied:
    """What all optimizers made here have in common."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy (pickled or deep) is an optimizer of the original class, on one process."""
        return _new, (type(self).__mro__[3],), self.__getstate__()  # type: ignore[attr-defined]


class _Distributed:
    """What the dynamic subclass adds to the optimizer's class."""

    _reducer: GradientReducer

    def synchronize(self) -> None:
        """Waits until the gradients are reduced, zeros standing for those that this rank does not have.

        step() does so by itself. Call it before, to clip or unscale gradients: step() will then not send again.
        """
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context step() neither sends nor waits."""
        self._reducer.enabled = False
        try:
            yield
        finally:
            self._reducer.enabled = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next pass on, gradients are sent after so many of them."""
        self._reducer.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; AssertionError while gradients are on their way."""
        self._reducer.check_idle("zero_grad()")
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own. Gradients that are on their way are dropped."""
        self._reducer.drop()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters' gradients are reduced, too."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if "_reducer" in self.__dict__:
            self._reducer.add_parameters(self.__dict__["param_groups"][-1]["params"])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own. Who reads them between backward pass and step (a GradScaler that unscales, say) gets
        gradients that are reduced already."""
        reducer = self.__dict__.get("_reducer")
        if reducer is not None:
            reducer.finish_before_access()
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Optional[Iterable[tuple[str, torch.Tensor]]] = None,
    compression: Optional[Compressor[torch.Tensor]] = None,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Optional[Union[int, Sequence[Sequence[torch.Tensor]]]] = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_as_bucket_view: bool = False,
) -> Any:
    """Makes an optimizer step with the gradients of all ranks.

    A rank's parameter without a gradient contributes zeros. A closure given to step() may compute gradients several
    times (LBFGS): they and the loss are reduced each time.

    Args:
        optimizer: any torch optimizer; it is changed and returned.
        named_parameters: names for messages and to pair gradients: model.named_parameters(). All of the optimizer's
            parameters or none; without, their positions are their names, so the order must agree on all ranks.
        compression: how gradients travel: Compression.none, .fp16 or .bf16.
        backward_passes_per_step: backward passes whose gradients are summed here before they are sent.
        op: how gradients are combined: Average, Sum, Min, Max or Product. Or Adasum, which combines steps: each rank's
            optimizer steps with the rank's own gradients, and what that has changed is reduced (see docs/adasum.md).
            Then several backward passes may also be several steps: all that come to backward_passes_per_step are
            reduced at once.
        gradient_predivide_factor: divides gradients before they are summed; the rest of the average comes after.
        num_groups: deprecated, see groups.
        groups: gradients are sent together: into how many groups of parameters to cut them, or lists of parameters.
        sparse_as_dense: sends sparse gradients as dense ones.
        process_set: the ranks that train together. On others the optimizer works as if it were not distributed.
        gradient_as_bucket_view: gradients of contiguous CPU parameters live in memory that the other ranks of this host
            reach (see empty_shared), as large as the parameters, so that nothing is copied for the allreduce. A gradient
            that backward makes anew, as after zero_grad(), is moved there; with zero_grad(set_to_none=False) it
            stays. Keep no reference to a gradient beyond a step: the next one writes into the same memory.

    Raises:
        ValueError: wrong names, groups or factors; called before init().
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer needs a torch optimizer, not a {type(optimizer).__name__}")
    if isinstance(optimizer, _Copied):
        raise ValueError("this optimizer is distributed already")
    options = GradientOptions(
        compression=compression or Compression.none,
        op=op,
        predivide=gradient_predivide_factor,
        groups=chosen_groups(groups, num_groups),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        passes=backward_passes_per_step,
        allows_adasum=True,
    )
    adasum = options.op == Adasum
    if adasum and gradient_as_bucket_view:
        raise ValueError("gradient_as_bucket_view: with op=Adasum steps are sent, not gradients; leave it out")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    named = list(named_parameters or ())
    reducer: Any = (
        _adasum.DeltaReducer(params, named, options)
        if adasum
        else GradientReducer(params, named, options, gradient_as_bucket_view)
    )
    original = type(optimizer)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    added = _adasum.DistributedAdasum if adasum else _Distributed
    optimizer.__class__ = type(original.__name__, (_Copied, added, original), names)
    optimizer._reducer = reducer  # type: ignore[attr-defined]
    # Hooks instead of an overridden step(): schedulers that were made before replace the method by their own.
    # Ours comes first, so that others see reduced gradients.
    handle = optimizer.register_step_pre_hook(_adasum.before_step if adasum else _before_step)
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    after = optimizer.register_step_post_hook(_adasum.after_step if adasum else _after_step)
    if adasum:  # others see parameters that are equal on all ranks
        after_hooks: Any = optimizer._optimizer_step_post_hooks
        after_hooks.move_to_end(after.id, last=False)
    return optimizer


def _new(class_: Any) -> Any:
    return class_.__new__(class_)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reducer: GradientReducer = optimizer._reducer
    if not reducer.enabled:
        return None
    closure = kwargs.get("closure") or next((arg for arg in args if callable(arg) and arg is not optimizer), None)
    if closure is None:
        if not reducer.synchronized:
            reducer.synchronize()
        return None
    ours = closure if isinstance(closure, _Closure) else _Closure(closure, reducer)
    return tuple(ours if arg is closure else arg for arg in args), {
        key: ours if value is closure else value for key, value in kwargs.items()
    }


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._reducer.stepped()


class _Closure:
    """A closure that computes gradients and loss of all ranks, so that all take the same decisions by them."""

    def __init__(self, closure: Callable[[], Any], reducer: GradientReducer) -> None:
        self._closure, self._reducer = closure, reducer

    def __call__(self) -> Any:
        loss = self._closure()
        self._reducer.synchronize()
        return self._reducer.reduce_loss(loss)
