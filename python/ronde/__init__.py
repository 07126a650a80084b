"""ronde trains one model on many processes.

This package has the life cycle (init, rank, size, ...) and the collectives on NumPy arrays; ronde.torch has them on
PyTorch's tensors, with the distributed optimizer. Importing it imports no framework: NumPy comes with the first use of a
collective.
"""

from typing import TYPE_CHECKING, Any

from ronde._common import *  # noqa: F403
from ronde._common import __all__ as _common
from ronde.basics import ReduceOp

if TYPE_CHECKING:
    from ronde._numpy import *  # noqa: F403
    from ronde.launcher import run as run

# What another module brings when it is first asked for.
_LATER = dict.fromkeys(
    (
        "allreduce allreduce_ allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_ "
        "grouped_allreduce_async grouped_allreduce_async_ allgather allgather_async grouped_allgather "
        "grouped_allgather_async broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async "
        "reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll "
        "synchronize broadcast_object allgather_object Compression empty_shared"
    ).split(),
    "ronde._numpy",
)
_LATER["run"] = "ronde.launcher"

__all__ = ["ReduceOp", *_common, *_LATER]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'ronde' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
