"""ronde for Keras: `import ronde.keras as hvd`. Keras 3 on its backends tensorflow, torch and jax; and Keras 2."""

from typing import TYPE_CHECKING, Any

try:
    import keras as _keras
except ImportError as error:
    advice = "pip install keras"
    if error.name not in (None, "keras"):
        advice = f"pip install {error.name}, or set KERAS_BACKEND to tensorflow, torch or jax, whichever is installed"
    raise ImportError(
        f"ronde.keras needs Keras, and the module 'keras' cannot be imported ({error}): {advice}", name="keras"
    ) from error

from ronde._common import *  # noqa: F403
from ronde._common import __all__ as _common
from ronde._keras.frontend import make_frontend as _make_frontend
from ronde._numpy import allgather_object, barrier, broadcast_object, join

_frontend = _make_frontend(_keras)
Compression = _frontend.Compression
DistributedOptimizer = _frontend.DistributedOptimizer
PartialDistributedOptimizer = _frontend.PartialDistributedOptimizer
load_model = _frontend.load_model
broadcast_global_variables = _frontend.broadcast_global_variables
allreduce = _frontend.allreduce
allgather = _frontend.allgather
broadcast = _frontend.broadcast
reducescatter = _frontend.reducescatter

from ronde.keras import callbacks  # noqa: E402  (made of the frontend)

if TYPE_CHECKING:
    from ronde.launcher import run


def __getattr__(name: str) -> Any:
    if name == "elastic":
        raise AttributeError("ronde.keras.elastic: this release has no elastic training yet")
    if name != "run":
        raise AttributeError(f"module 'ronde.keras' has no attribute {name!r}")
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
