"""Options that Python code reads. The table is the core's (core/base/options.def)."""

import math
import os
import warnings

from ronde import _core


def option(name: str) -> str:
    """The value of an option: RONDE_<name>, else HOROVOD_<name>, else the default."""
    for prefix in ("RONDE_", "HOROVOD_"):
        value = os.environ.get(prefix + name)
        if value is not None:
            return value
    return next(row[2] for row in _core.OPTIONS if row[0] == name)


def number(name: str) -> float:
    """The value of an option that is a number from 0; ArgumentError names the variable when it is none."""
    text = option(name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise _core.ArgumentError(f"RONDE_{name}: {text!r} is not a number from 0")
    return value


def warn_of_missing() -> None:
    """Warns of variables that ask for what this release does not have: a job that runs without it shall not surprise."""
    for name in ("AUTOTUNE", "HIERARCHICAL_ALLREDUCE", "HIERARCHICAL_ALLGATHER", "TORUS_ALLREDUCE"):
        for variable in (f"RONDE_{name}", f"HOROVOD_{name}"):
            if os.environ.get(variable, "0").lower() not in ("", "0", "false", "no", "off"):
                warnings.warn(f"{variable} has no effect: this release does not have it yet", stacklevel=4)
