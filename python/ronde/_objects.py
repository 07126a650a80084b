"""Collectives on Python objects: pickled bytes."""

import ctypes
import pickle
from typing import Any, Optional

from ronde import _core
from ronde._core import ArgumentError
from ronde.process_sets import ProcessSet, global_process_set, set_id

_INT64, _UINT8 = _core.DTYPES["int64"], _core.DTYPES["uint8"]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object on every rank: anything that cloudpickle can pickle.

    Unpickle only what ranks of your own job send. What cannot be pickled is an error on all ranks.
    """
    name = name or "broadcast_object"
    is_root = _core.topology()["rank"] == root_rank
    payload = _dump(obj) if is_root else (b"", True)
    header = (ctypes.c_int64 * 2)(len(payload[0]), payload[1])
    _broadcast(header, 2, _INT64, root_rank, f"{name}.size", process_set)
    data = bytearray(payload[0] if is_root else header[0])
    _broadcast((ctypes.c_char * len(data)).from_buffer(data), len(data), _UINT8, root_rank, name, process_set)
    if not header[1]:
        raise ArgumentError(f"{name}: rank {root_rank} cannot pickle its object: {data.decode()}")
    return obj if is_root else pickle.loads(data)


def allgather_object(obj: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in rank order."""
    name = name or "allgather_object"
    data, ok = _dump(obj)
    header = (ctypes.c_int64 * 2)(len(data), ok)
    headers = memoryview(_allgather(header, (1, 2), _INT64, f"{name}.size", process_set)).cast("q")
    block = ctypes.create_string_buffer(data, len(data))
    gathered = memoryview(_allgather(block, (len(data),), _UINT8, name, process_set))
    objects, errors, start = [], [], 0
    for number in range(len(headers) // 2):
        piece = gathered[start : start + headers[2 * number]]
        start += len(piece)
        if not headers[2 * number + 1]:
            errors.append(f"{number} cannot pickle its object: {bytes(piece).decode()}")
        elif not errors:
            objects.append(pickle.loads(piece))
    if errors:
        raise ArgumentError(f"{name}: rank {'; rank '.join(errors)}")
    return objects


def _dump(obj: Any) -> tuple[bytes, bool]:
    """The pickled object, else the reason why there is none: the other ranks wait for one of them."""
    import cloudpickle  # here, so that `import ronde` is quick

    try:
        return cloudpickle.dumps(obj), True
    except Exception as error:
        return f"{type(error).__name__}: {error}".encode(), False


def _broadcast(memory: Any, count: int, dtype: int, root: int, name: str, process_set: ProcessSet) -> None:
    address = ctypes.addressof(memory)
    _core.submit(
        _core.OPS["broadcast"], name, [(address, address, dtype, (count,))], memory, root=root,
        process_set=set_id(process_set),
    ).wait()  # fmt: skip


def _allgather(memory: Any, shape: tuple[int, ...], dtype: int, name: str, process_set: ProcessSet) -> Any:
    handle = _core.submit(
        _core.OPS["allgather"], name, [(ctypes.addressof(memory), 0, dtype, shape)], memory,
        process_set=set_id(process_set),
    )  # fmt: skip
    handle.wait()
    return handle.output(0)
