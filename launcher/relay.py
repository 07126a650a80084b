"""How the ranks of several hosts exchange blobs (addresses, before they are connected), though every agent serves a store
of its own to the ranks of its host.

A rank that hands a blob in to its host's store (Store.Exchange) also sends it to its agent, in a datagram. The agent passes
on what its ranks said together, by way of the launcher, to the other agents, which hand it in to their stores.
"""

from __future__ import annotations

import base64
import json
import socket
import time
from typing import Any, Optional

from ronde import _core

VARIABLE = "RONDE_RELAY"  # tells the ranks the socket's path
_SOCKET = "relay"
# How long a rank's blob waits for those of its neighbours.
_LINGER_SECONDS = 0.1


class Relay:
    """``local`` ranks of ``size`` are on this host. Used by the agent's thread."""

    def __init__(self, directory: str, store: _core.Store, local: int, size: int) -> None:
        self.path = f"{directory}/{_SOCKET}"
        self._store = store
        self._local, self._size = local, size
        self._waiting: dict[str, tuple[int, dict[int, str], float]] = {}  # key -> count, blobs, when to go
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.socket.bind(self.path)
        self.socket.setblocking(False)

    def read(self) -> None:
        """Takes what ranks sent. Only this user's processes reach the socket's directory."""
        while True:
            try:
                message = json.loads(self.socket.recv(1 << 20))
            except BlockingIOError:
                return
            except ValueError:
                continue  # not from a rank
            key, count = message["key"], message["count"]
            blobs = self._waiting.setdefault(key, (count, {}, time.monotonic() + _LINGER_SECONDS))[1]
            blobs[message["index"]] = message["blob"]

    def due(self) -> Optional[float]:
        """When take() has something."""
        if any(self._whole(count, blobs) for count, blobs, _ in self._waiting.values()):
            return 0.0
        return min((when for _, _, when in self._waiting.values()), default=None)

    def take(self) -> list[dict[str, Any]]:
        """Frames for the other agents."""
        now, taken = time.monotonic(), []
        for key, (count, blobs, when) in list(self._waiting.items()):
            if now >= when or self._whole(count, blobs):
                del self._waiting[key]
                taken.append({"type": "blobs", "key": key, "count": count, "blobs": list(blobs.items())})
        return taken

    def hand_in(self, frame: dict[str, Any]) -> None:
        """What the ranks of another host said."""
        for index, blob in frame["blobs"]:
            try:
                self._store.exchange(frame["key"], index, frame["count"], base64.b64decode(blob), 0.0)
            except _core.TimeoutError:
                pass  # others are still missing

    def close(self) -> None:
        self.socket.close()

    def _whole(self, count: int, blobs: dict[int, str]) -> bool:
        return count == self._size and len(blobs) >= self._local
