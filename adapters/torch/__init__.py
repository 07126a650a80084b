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

from ronde import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    __version__,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    exceptions,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ronde.exceptions import *  # noqa: F403
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
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "__version__",
    "add_process_set",
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
    "ccl_built",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "exceptions",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "optimizer",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    *exceptions.__all__,
]
