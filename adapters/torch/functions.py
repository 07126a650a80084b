"""Broadcasts of what a script starts from: parameters, optimizer state, objects."""

from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch
from ronde._objects import allgather_object, broadcast_object
from ronde.process_sets import ProcessSet, global_process_set
from ronde.torch import mpi_ops

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Union[Mapping[str, Any], Iterable[tuple[str, torch.Tensor]], Iterable[torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's parameters, in place.

    Args:
        params: model.state_dict(), model.named_parameters(), or such; or tensors without names, in the same order on all
            ranks.
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError("broadcast_parameters needs model.state_dict() or model.named_parameters(), not the model")
    handles = []
    items: list[Any] = list(params.items() if isinstance(params, Mapping) else params)
    for number, item in enumerate(items):
        name, tensor = (str(number), item) if isinstance(item, torch.Tensor) else item
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"broadcast_parameters: {name!r} is a {type(tensor).__name__}, not a tensor")
        handles.append(mpi_ops.broadcast_async_(tensor, root_rank, f"broadcast_parameters.{name}", process_set))
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]],
    root_rank: int,
    model: Optional[torch.nn.Module] = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's optimizer state: hyperparameters, momenta, counters. Parameters are not touched.

    Any torch optimizer, fresh or restored, on any rank.

    Args:
        optimizer: one, or several.
        model: not needed; accepted for compatibility.

    Raises:
        ValueError: on every rank, when the ranks' parameter groups differ in length.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        for each in optimizer:
            broadcast_optimizer_state(each, root_rank, model, process_set)
        return
    name = "broadcast_optimizer_state"
    lengths = allgather_object(
        [len(group["params"]) for group in optimizer.param_groups], f"{name}.groups", process_set
    )
    if lengths.count(lengths[0]) != len(lengths):
        raise ValueError(f"{name}: parameter groups must have equal lengths on all ranks, but they have {lengths}")
    is_root = mpi_ops.rank() == root_rank
    tensors: list[torch.Tensor] = []
    structure: Any = None
    if is_root:
        state = optimizer.state_dict()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        structure = (_pack(groups, tensors), _pack(state["state"], tensors), [_Placeholder(each) for each in tensors])
    groups, states, placeholders = broadcast_object(structure, root_rank, f"{name}.structure", process_set)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not is_root:
        tensors = [each.new(params[0].device) for each in placeholders]
    handles = [
        mpi_ops.broadcast_async_(tensor, root_rank, f"{name}.{number}", process_set)
        for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        handle.wait()
    if is_root:
        return
    # In place, so that a learning rate scheduler, which holds the same groups, goes on with them.
    for group, received in zip(optimizer.param_groups, _unpack(groups, tensors)):
        for key in [key for key in group if key != "params" and key not in received]:
            del group[key]
        group.update(received)
    optimizer.state.clear()
    for key, value in _unpack(states, tensors).items():
        optimizer.state[params[key] if isinstance(key, int) else key] = value


class _Placeholder:
    """What a rank must know of a tensor to receive it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu"

    def new(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


class _Number(int):
    """Stands in a structure for the tensor of this number, which travels by itself."""


def _pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with its tensors moved into the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _Number(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _pack(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pack(item, tensors) for item in value)
    return value


def _unpack(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Number):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _unpack(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unpack(item, tensors) for item in value)
    return value
