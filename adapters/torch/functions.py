"""Broadcasts of what a script starts from: parameters, optimizer state, objects."""

from collections.abc import Iterable, Mapping
from typing import Any, Union

import torch

from ronde._objects import allgather_object, broadcast_object
from ronde.process_sets import ProcessSet, global_process_set
from ronde.torch import mpi_ops

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Union[Mapping[str, Any], Iterable[tuple[str, torch.Tensor]]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's parameters, in place.

    Args:
        params: model.state_dict(), model.named_parameters(), or such.
    """
    handles = []
    for name, tensor in params.items() if isinstance(params, Mapping) else params:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"broadcast_parameters: {name!r} is a {type(tensor).__name__}, not a tensor")
        name = f"broadcast_parameters.{name}"
        handles.append(mpi_ops.broadcast_async_(tensor, root_rank, name, process_set))
    for handle in handles:
        handle.wait()


class _Placeholder:
    """Stands in the broadcast structure for a tensor, which follows by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"


def broadcast_optimizer_state(
    optimizer: Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]],
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's optimizer state: hyperparameters, momenta, counters. Parameters are not touched.

    Any torch optimizer, fresh or restored, on any rank; the parameter groups must have equal lengths everywhere.

    Args:
        optimizer: one, or a list.
        model: not needed; accepted for compatibility.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        for each in optimizer:
            broadcast_optimizer_state(each, root_rank, model, process_set)
        return
    name = "broadcast_optimizer_state"
    is_root = mpi_ops.rank() == root_rank
    tensors: list[torch.Tensor] = []
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if is_root:
        state = optimizer.state_dict()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
        lengths = [len(group["params"]) for group in state["param_groups"]]
        structure = (lengths, _pack(groups, tensors), _pack(state["state"], tensors))
    else:
        structure = None  # type: ignore[assignment]
    lengths, groups, packed = broadcast_object(structure, root_rank, f"{name}.structure", process_set)
    own = [len(group["params"]) for group in optimizer.param_groups]
    if own != lengths:
        # The tensors are received all the same: the others go on, and this rank's error is about this rank.
        _exchange(packed, groups, [torch.device("cpu")], root_rank, process_set)
        raise ValueError(f"{name}: parameter groups of lengths {own}, but rank {root_rank} has {lengths}")
    if is_root:
        for number, tensor in enumerate(tensors):
            mpi_ops.broadcast_(tensor, root_rank, f"{name}.{number}", process_set)
        return
'''
'''
