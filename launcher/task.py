"""A worker of ``ronde.run``: takes the function from the agent's store and leaves the result there."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

from ronde import _core
from ronde.launcher.agent import get, put


def main() -> int:
    import cloudpickle

    store = _core.Store(os.environ["RONDE_STORE"])
    key = f"result/{os.environ['RONDE_RANK']}"
    try:
        func, args, kwargs = pickle.loads(get(store, "task", 60.0))
        value = cloudpickle.dumps((True, func(*args, **kwargs)))
    except BaseException as error:
        put(store, key, pickle.dumps((False, traceback.format_exc())))
        traceback.print_exc()
        if _core.is_initialized():
            _core.shutdown(f"{type(error).__name__}: {error}")
        return 1
    put(store, key, value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
