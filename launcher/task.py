"""A worker of ``ronde.run``: takes the function from the agent's store and leaves the result there."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

from ronde import _core
from ronde.launcher import frames
from ronde.launcher.payload import get, put


def work() -> int:
    import cloudpickle

    store = _core.Store(os.environ["RONDE_STORE"])
    key = f"result/{os.environ['RONDE_RANK']}"
    try:
        func, args, kwargs = pickle.loads(get(store, "task", 60.0))
        value = cloudpickle.dumps((True, func(*args, **kwargs)))
        if len(value) > frames.PAYLOAD_LIMIT:
            raise ValueError(
                f"the result of rank {os.environ['RONDE_RANK']} has {len(value)} bytes, the limit is "
                f"{frames.PAYLOAD_LIMIT}: write it to a file and return the file's name"
            )
    except BaseException as error:
        put(store, key, pickle.dumps((False, traceback.format_exc())))
        traceback.print_exc()
        if _core.is_initialized():
            _core.shutdown(f"{type(error).__name__}: {error}")
        return 1
    put(store, key, value)
    return 0


def main() -> None:
    sys.exit(work())


if __name__ == "__main__":
    main()
