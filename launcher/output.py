"""Workers' output on the launcher's terminal or in files: whole lines, each with its rank."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
from typing import BinaryIO, Callable, Optional

_STREAMS = ("stdout", "stderr")
# A carriage return ends a line too (progress bars redraw theirs), except before a newline.
_ENDS = re.compile(rb"\r\n|\n|\r(?!$)|\r$")
_MAX_LINE = 8 << 20


class Output:
    """Takes chunks of bytes; a thread of its own writes them, so that a slow terminal never blocks the launcher.

    ``written(n)`` is called from that thread after n bytes of workers' output were written: the agent's credit.
    """

    def __init__(
        self, written: Callable[[int], None], directory: Optional[str] = None, timestamps: bool = False
    ) -> None:
        self._written = written
        self._directory = directory
        self._timestamps = timestamps
        self._rest: dict[tuple[int, int], bytes] = {}
        self._files: dict[tuple[int, int], BinaryIO] = {}
        self._queue: queue.Queue[Optional[tuple[int, int, bytes]]] = queue.Queue()
        self._thread = threading.Thread(target=self._main, name="ronderun output", daemon=True)
        self._thread.start()

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """``data`` empty: the stream ended."""
        self._queue.put((rank, stream, data))

    def close(self, timeout: float = 10.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _main(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                break
            rank, stream, data = item
            try:
                self._write(rank, stream, data)
            except OSError:
                pass  # the terminal or the disk is gone; workers must not notice
            self._written(len(data))
        for (rank, stream), rest in list(self._rest.items()):
            if rest:
                self._emit(rank, stream, rest + b"\n")
        for file in self._files.values():
            file.close()

    def _write(self, rank: int, stream: int, data: bytes) -> None:
        if self._directory is not None:
            self._file(rank, stream).write(data)
            return
        key = (rank, stream)
        rest = self._rest.get(key, b"") + data
        lines = []
        start = 0
        for match in _ENDS.finditer(rest):
            if match.end() == len(rest) and match.group() == b"\r" and data:
                break  # perhaps the first half of \r\n
            end = b"\r" if match.group() == b"\r" else b"\n"
            lines.append(rest[start : match.start()] + end)
            start = match.end()
        rest = rest[start:]
        if not data and rest:
            lines.append(rest.rstrip(b"\r") + b"\n")
            rest = b""
        if len(rest) > _MAX_LINE:
            lines.append(rest + b"\n")
            rest = b""
        self._rest[key] = rest
        if lines:
            self._emit(rank, stream, b"", lines)

    def _emit(self, rank: int, stream: int, line: bytes, lines: Optional[list[bytes]] = None) -> None:
        stamp = time.strftime("%a %b %d %H:%M:%S %Y").encode() if self._timestamps else b""
        prefix = stamp + f"[{rank}]<{_STREAMS[stream]}>:".encode()
        # An empty piece before a carriage return is a progress bar going back to its start.
        text = b"".join(prefix + item for item in (lines or [line]) if item != b"\r")
        target = (sys.stdout, sys.stderr)[stream]
        target.buffer.write(text)
        target.buffer.flush()

    def _file(self, rank: int, stream: int) -> BinaryIO:
        key = (rank, stream)
        if key not in self._files:
            assert self._directory is not None
            directory = os.path.join(self._directory, f"rank.{rank}")
            os.makedirs(directory, exist_ok=True)
            self._files[key] = open(os.path.join(directory, _STREAMS[stream]), "wb", buffering=0)
        return self._files[key]
