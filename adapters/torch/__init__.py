"""ronde for PyTorch: `import ronde.torch as hvd`. Works with torch 2.1 and later; compiled against none."""

try:
    import torch as _torch
except ImportError as error:
    raise ImportError(
        f"ronde.torch needs PyTorch, and the module 'torch' cannot be imported ({error}): pip install torch",
        name="torch",
    ) from error

if not hasattr(_torch.Tensor, "register_post_accumulate_grad_hook"):
    raise ImportError(f"ronde.torch needs torch 2.1 or later; this is torch {_torch.__version__}", name="torch")

from ronde._common import *  # noqa: F403
from ronde._common import __all__ as _common
from ronde.torch import compression, functions, mpi_ops, optimizer
from ronde.torch.compression import Compression
from ronde.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ronde.torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    empty_shared,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from ronde.torch.optimizer import DistributedOptimizer
from ronde.torch.sync_batch_norm import SyncBatchNorm


def __getattr__(name: str) -> object:
    if name == "run":
        from ronde.launcher import run

        return run
    if name == "elastic":
        raise AttributeError("ronde.torch.elastic: this release has no elastic training yet")
    raise AttributeError(f"module 'ronde.torch' has no attribute {name!r}")


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "compression",
    "empty_shared",
    "functions",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "mpi_ops",
    "optimizer",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "run",
    "sparse_allreduce_async",
    "synchronize",
    *_common,
]
