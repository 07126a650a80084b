"""ronde for MXNet: `import ronde.mxnet as hvd`. Works with MXNet 1.9.1; compiled against none."""

try:
    import mxnet as _mxnet  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"ronde.mxnet needs MXNet, and the module 'mxnet' cannot be imported ({error}): "
        "pip install mxnet==1.9.1 numpy==1.23.5",
        name="mxnet",
    ) from None
except AttributeError as error:  # np.bool and others that NumPy has removed
    import numpy as _numpy

    raise ImportError(
        f"ronde.mxnet needs MXNet, which does not work with NumPy {_numpy.__version__} ({error.args[0].splitlines()[0]}): "
        "pip install numpy==1.23.5",
        name="mxnet",
    ) from None

from ronde._common import *  # noqa: F403
from ronde._common import __all__ as _common
from ronde.mxnet import compression, functions, kvstore, mpi_ops
from ronde.mxnet.compression import Compression
from ronde.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from ronde.mxnet.kvstore import KVStore
from ronde.mxnet.mpi_ops import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    join,
    reducescatter,
)
from ronde.mxnet.optimizer import DistributedOptimizer
from ronde.mxnet.trainer import DistributedTrainer


def __getattr__(name: str) -> object:
    if name == "run":
        from ronde.launcher import run

        return run
    raise AttributeError(f"module 'ronde.mxnet' has no attribute {name!r}")


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "KVStore",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "compression",
    "functions",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "join",
    "kvstore",
    "mpi_ops",
    "reducescatter",
    "run",
    *_common,
]
