"""The function and the results of ``ronde.run`` in the agent's store, whose values are limited in size."""

from __future__ import annotations

from ronde import _core

_PART = 8 << 20


def put(store: _core.Store, key: str, value: bytes) -> None:
    parts = [value[i : i + _PART] for i in range(0, len(value), _PART)]
    for i, part in enumerate(parts):
        store.set(f"{key}/{i}", part)
    store.set(key, str(len(parts)).encode())


def get(store: _core.Store, key: str, timeout: float) -> bytes:
    count = int(store.get(key, timeout))
    return b"".join(store.get(f"{key}/{i}", timeout) for i in range(count))
