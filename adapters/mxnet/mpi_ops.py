"""The collectives on MXNet's arrays. Each is described in ronde._collectives.

They return at once: results can be used like those of any other operator of MXNet, and who reads them waits, and gets
the error if there was one. An exception are allgather, alltoall and reducescatter, which wait.

priority: where several operations could start, that with the highest starts first.
"""

from collections.abc import Sequence
from typing import Any, Optional

from ronde._common import *  # noqa: F403
from ronde.basics import Average, reduction
from ronde.compression import Compressor
from ronde.mxnet._engine import EngineApi, NDArray, unique_name
from ronde.process_sets import ProcessSet, global_process_set

api = EngineApi()


def _at(priority: int) -> EngineApi:
    return api if priority == 0 else EngineApi(priority)


def allreduce(
    tensor: NDArray,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[int] = None,
    compression: Optional[Compressor[NDArray]] = None,
) -> NDArray:
    """Combines arrays of one shape and dtype, element by element, into a new one."""
    op, name = reduction(op, average), name or unique_name("allreduce", process_set)
    return _at(priority).allreduce(tensor, None, name, compression, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: NDArray,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[int] = None,
) -> NDArray:
    """allreduce into the array itself, which is returned."""
    op = reduction(op, average)
    return _at(priority).allreduce_(tensor, None, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[int] = None,
    compression: Optional[Compressor[NDArray]] = None,
) -> list[NDArray]:
    """allreduce of several arrays, all or nothing."""
    op, name = reduction(op, average), name or unique_name("allreduce", process_set)
    return _at(priority).grouped_allreduce(
        tensors, None, name, compression, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[int] = None,
) -> list[NDArray]:
    """grouped_allreduce into the arrays themselves, which are returned."""
    op = reduction(op, average)
    return _at(priority).grouped_allreduce_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)


def allgather(
    tensor: NDArray, name: Optional[str] = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> NDArray:
    """Joins arrays along their first dimension, which may differ, in rank order."""
    return api.allgather(tensor, name or unique_name("allgather", process_set), process_set)


def grouped_allgather(
    tensors: Sequence[NDArray],
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray]:
    """allgather of several arrays, all or nothing."""
    return api.grouped_allgather(tensors, name or unique_name("allgather", process_set), process_set)


def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """The root's array on every rank, as a new one."""
    return _at(priority).broadcast(tensor, root_rank, name or unique_name("broadcast", process_set), process_set)


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """broadcast into the array itself, which is returned."""
    return _at(priority).broadcast_(tensor, root_rank, name, process_set)


def alltoall(
    tensor: NDArray,
    splits: Any = None,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every member and receives rows from each; with splits, also returns how many came from each."""
    return api.alltoall(tensor, splits, name or unique_name("alltoall", process_set), process_set)


def reducescatter(
    tensor: NDArray,
    op: int = Average,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Optional[Compressor[NDArray]] = None,
) -> NDArray:
    """allreduce of which each rank receives its rows only."""
    name = name or unique_name("reducescatter", process_set)
    return api.reducescatter(tensor, name, compression, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: int = Average,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Optional[Compressor[NDArray]] = None,
) -> list[NDArray]:
    """reducescatter of several arrays, all or nothing."""
    name = name or unique_name("reducescatter", process_set)
    return api.grouped_reducescatter(tensors, name, compression, op, process_set, prescale_factor, postscale_factor)


join = api.join
barrier = api.barrier
