"""DistributedOptimizer: updates with the gradients of all ranks, for code that has an optimizer rather than a Trainer."""

from collections.abc import Sequence
from typing import Any, Optional

import mxnet as mx
from ronde._gradient_options import GradientOptions
from ronde.basics import Average, is_initialized
from ronde.common.util import split_list
from ronde.compression import Compressor
from ronde.mxnet._engine import NDArray
from ronde.mxnet._gradients import number_of, reduce_gradients, store
from ronde.mxnet.compression import Compression
from ronde.process_sets import ProcessSet, global_process_set


class _Distributed:
    """What the dynamic subclass adds to the optimizer's class."""

    _options: GradientOptions
    _reduced = False  # within an update, whose gradients are reduced already: one method of MXNet's calls the other

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As the optimizer's own, with the gradients of all ranks, which are also written back."""
        self._with_all_gradients("update", index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As update()."""
        self._with_all_gradients("update_multi_precision", index, weight, grad, state)

    def _with_all_gradients(self, method: str, index: Any, weight: Any, grad: Any, state: Any) -> None:
        update = getattr(super(), method)
        if self._reduced or not self._options.process_set.included():
            return update(index, weight, grad, state)
        several = isinstance(index, (list, tuple))
        indices, grads = (list(index), list(grad)) if several else ([index], [grad])
        groups: Sequence[Sequence[int]] = [[place] for place in range(len(grads))]
        if self._options.groups and grads:
            groups = split_list(range(len(grads)), self._options.groups)
        for group in groups:
            first = indices[group[0]]
            name, priority = f"gradient.{number_of(self)}.{first}", -first if isinstance(first, int) else 0
            results = reduce_gradients(self._options, name, [[grads[place]] for place in group], priority)
            for place, result in zip(group, results):
                store(result, [grads[place]])
        self._reduced = True
        try:
            update(index, weight, grad, state)
        finally:
            self._reduced = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy (pickled or deep) is distributed, too, where ronde is initialized: Trainer.load_states() makes one."""
        return _restore, (type(self).__mro__[2], self._options), self.__getstate__()  # type: ignore[attr-defined]


def DistributedOptimizer(  # noqa: N802
    optimizer: mx.optimizer.Optimizer,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
    compression: Optional[Compressor[NDArray]] = None,
    sparse_as_dense: bool = False,
) -> Any:
    """Makes an optimizer update with the average of all ranks' gradients.

    Module.fit(optimizer=...), Updater and such take it. With gluon, use DistributedTrainer.

    Args:
        optimizer: any optimizer of MXNet's; it is changed and returned.
        gradient_predivide_factor: divides gradients before they are summed; the rest of the average comes after.
        num_groups: into how many groups to cut the gradients that MXNet updates at once, to be sent together.
        process_set: the ranks that train together. On others the optimizer works as if it were not distributed.
        compression: how gradients travel: Compression.none, .fp16 or .bf16.
        sparse_as_dense: sends row_sparse gradients as dense ones.
    """
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise TypeError(f"DistributedOptimizer needs an optimizer of MXNet's, not a {type(optimizer).__name__}")
    if is_distributed(optimizer):
        raise ValueError("this optimizer is distributed already")
    options = GradientOptions(
        compression=compression or Compression.none,
        op=Average,
        predivide=gradient_predivide_factor,
        groups=num_groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return _distribute(optimizer, options)


def is_distributed(optimizer: Any) -> bool:
    return isinstance(optimizer, _Distributed)


def undistributed(optimizer: Any) -> Any:
    """The optimizer, as it was before DistributedOptimizer."""
    optimizer.__class__ = type(optimizer).__mro__[2]
    return optimizer


def _distribute(optimizer: Any, options: GradientOptions) -> Any:
    original = type(optimizer)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    optimizer.__class__ = type(original.__name__, (_Distributed, original), names)
    optimizer._options = options
    return optimizer


def _restore(original: Any, options: GradientOptions) -> Any:
    restored = original.__new__(original)
    return _distribute(restored, options) if is_initialized() else restored
