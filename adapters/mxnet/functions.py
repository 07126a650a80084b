"""Broadcasts of what a script starts from: parameters, objects."""

from collections.abc import Mapping
from typing import Any, Optional

import mxnet as mx
from mxnet.gluon.parameter import Parameter, ParameterDict
from ronde._objects import allgather_object, broadcast_object
from ronde.mxnet import mpi_ops
from ronde.process_sets import ProcessSet, global_process_set, set_id

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(
    params: Any,
    root_rank: int = 0,
    prefix: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the root's parameters, in place.

    A gluon parameter whose shape is not known yet is broadcast as soon as it has been initialized, in the first forward
    pass; all ranks must come to that.

    Args:
        params: net.collect_params() (met by position, since gluon's names depend on what else a rank has built), or a
            dict of arrays or gluon parameters (met by name), such as Module.get_params() returns.
        prefix: of the names, to tell several broadcasts apart that are under way at once.
    """
    if not isinstance(params, (Mapping, ParameterDict)):
        raise ValueError(f"broadcast_parameters needs a dict or net.collect_params(), not a {type(params).__name__}")
    set_id(process_set)
    by_position = isinstance(params, ParameterDict)
    for position, (key, value) in enumerate(params.items() if by_position else sorted(params.items())):
        name = f"broadcast_parameters.{prefix or ''}{position if by_position else key}"
        if isinstance(value, Parameter):
            _broadcast_parameter(value, root_rank, name, process_set)
        elif isinstance(value, mx.nd.NDArray):
            mpi_ops.broadcast_(value, root_rank, name, process_set=process_set)
        else:
            raise TypeError(f"broadcast_parameters: {key!r} is a {type(value).__name__}, not an array or a Parameter")


def _broadcast_parameter(param: Parameter, root_rank: int, name: str, process_set: ProcessSet) -> None:
    if not param._deferred_init:
        first, *others = param.list_data()  # one on each device
        mpi_ops.broadcast_(first, root_rank, name, process_set=process_set)
        for other in others:
            first.copyto(other)
        return

    def init_then_broadcast(data: Any, contexts: Any) -> None:
        del param._init_impl  # the class's own is back
        param._init_impl(data, contexts)
        _broadcast_parameter(param, root_rank, name, process_set)

    param._init_impl = init_then_broadcast
