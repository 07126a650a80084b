"""ronde for `tf.keras`: `import ronde.tensorflow.keras as hvd`. Keras 3 on TensorFlow is that of ronde.keras; with
TF_USE_LEGACY_KERAS=1, and before TensorFlow 2.16, it is Keras 2."""

from typing import TYPE_CHECKING, Any

import tensorflow as _tf
from ronde._common import *  # noqa: F403
from ronde._common import __all__ as _common
from ronde._keras.frontend import make_frontend as _make_frontend
from ronde._numpy import allgather_object, barrier, broadcast_object, join

if hasattr(_tf.keras, "ops") and _tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"ronde.tensorflow.keras needs Keras on TensorFlow, and here KERAS_BACKEND is {_tf.keras.backend.backend()}: "
        "import ronde.keras, which is for all backends"
    )

_frontend = _make_frontend(_tf.keras)
Compression = _frontend.Compression
DistributedOptimizer = _frontend.DistributedOptimizer
PartialDistributedOptimizer = _frontend.PartialDistributedOptimizer
load_model = _frontend.load_model
broadcast_global_variables = _frontend.broadcast_global_variables
allreduce = _frontend.allreduce
allgather = _frontend.allgather
broadcast = _frontend.broadcast
reducescatter = _frontend.reducescatter

from ronde.tensorflow.keras import callbacks  # noqa: E402  (made of the frontend)

if TYPE_CHECKING:
    from ronde.launcher import run


def __getattr__(name: str) -> Any:
    if name == "elastic":
        raise AttributeError("ronde.tensorflow.keras.elastic: this release has no elastic training yet")
    if name != "run":
        raise AttributeError(f"module 'ronde.tensorflow.keras' has no attribute {name!r}")
    from ronde.launcher import run

    return run


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "join",
    "load_model",
    "reducescatter",
    "run",
    *_common,
]
