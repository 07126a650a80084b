"""The collectives on torch tensors. Each is described in ronde._api."""

from typing import Any, Optional

import torch
from ronde import _core
from ronde._api import make_api
from ronde._common import *  # noqa: F403
from ronde._frontend import dtype_number
from ronde.basics import Average
from ronde.process_sets import ProcessSet, global_process_set
from ronde.torch._frontend import TorchFrontend
from ronde.torch._sparse import SparseAllreduce

_frontend = TorchFrontend()
api = make_api(_frontend)

allreduce = api.allreduce
allreduce_ = api.allreduce_
allreduce_async = api.allreduce_async
allreduce_async_ = api.allreduce_async_
grouped_allreduce = api.grouped_allreduce
grouped_allreduce_ = api.grouped_allreduce_
grouped_allreduce_async = api.grouped_allreduce_async
grouped_allreduce_async_ = api.grouped_allreduce_async_
allgather = api.allgather
allgather_async = api.allgather_async
grouped_allgather = api.grouped_allgather
grouped_allgather_async = api.grouped_allgather_async
broadcast = api.broadcast
broadcast_ = api.broadcast_
broadcast_async = api.broadcast_async
broadcast_async_ = api.broadcast_async_
alltoall = api.alltoall
alltoall_async = api.alltoall_async
reducescatter = api.reducescatter
reducescatter_async = api.reducescatter_async
grouped_reducescatter = api.grouped_reducescatter
grouped_reducescatter_async = api.grouped_reducescatter_async
join = api.join
barrier = api.barrier
poll = api.poll
synchronize = api.synchronize


def empty_shared(*size: Any, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """A CPU tensor in memory that the other ranks of this host reach: collectives need not copy it.

    Worth it from some 64 KiB on, for tensors that are used again and again: an allreduce in place is about twice as
    fast. While an operation runs other ranks write into its tensor; afterwards it is a tensor like any other. Where
    ranks share no memory (one rank, RONDE_TRANSPORT=tcp) it is ordinary memory.

    Args:
        size: as of torch.empty: numbers, or one sequence of them. The elements are not set.
        dtype: of the elements [torch.get_default_dtype()].

    Raises:
        TypeError: the size is neither numbers nor a sequence of numbers.
        ValueError: a number is negative or too large; before init(); the rank's shared memory (RONDE_SHARED_BYTES) or the host's memory is used up.
    """
    shape = size[0] if len(size) == 1 else size
    kind = dtype or torch.get_default_dtype()
    return _frontend.wrap(_core.allocate_shared(dtype_number(str(kind).removeprefix("torch."), kind), shape))


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: Optional[int] = None,
    process_set: ProcessSet = global_process_set,
) -> SparseAllreduce:
    """Starts an allreduce (Average or Sum) of a sparse COO tensor; synchronize() gives a coalesced one.

    Ranks may have different rows; equal rows are merged before they are sent, and when the ranks have so many rows that
    a dense tensor is smaller, that is sent instead.
    """
    return SparseAllreduce(api, tensor, name, Average if op is None else op, process_set)
