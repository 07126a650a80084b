"""ronde for TensorFlow: `import ronde.tensorflow as hvd`. Works with TensorFlow 2.13 and later; compiled against none.

Eager mode, tf.function, and TF 1 graphs and sessions (tf.compat.v1).
"""

from typing import TYPE_CHECKING, Any

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"ronde.tensorflow needs TensorFlow, and the module 'tensorflow' cannot be imported ({error}): "
        "pip install tensorflow",
        name="tensorflow",
    ) from error

from ronde._common import *  # noqa: F403
from ronde._common import __all__ as _common
from ronde.tensorflow import compression, functions, mpi_ops, util
from ronde.tensorflow.compression import Compression
from ronde.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ronde.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from ronde.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from ronde.tensorflow.optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from ronde.launcher import run
    from ronde.tensorflow.sync_batch_norm import SyncBatchNormalization

# What another module brings when it is first asked for: Keras takes long to import.
_LATER = {"SyncBatchNormalization": "ronde.tensorflow.sync_batch_norm", "run": "ronde.launcher"}


def __getattr__(name: str) -> Any:
    if name == "elastic":
        raise AttributeError("ronde.tensorflow.elastic: this release has no elastic training yet")
    if name not in _LATER:
        raise AttributeError(f"module 'ronde.tensorflow' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "compression",
    "functions",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "mpi_ops",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "run",
    "size_op",
    "util",
    *_common,
]
