"""Workers' output on the launcher's terminal or in files: whole lines, each with its rank."""

from __future__ import annotations

import os
import queue
import re
import select
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, Callable, Optional

_NAMES = ("stdout", "stderr")
# A carriage return ends a line too: progress bars redraw theirs.
_ENDS = re.compile(rb"\r\n|\n|\r")
_MAX_LINE = 8 << 20


class Output:
    """Takes chunks of bytes; a thread of its own writes them, so that a slow terminal never blocks the launcher.

    ``written(rank, n)`` is called from that thread after n bytes of a rank's output were written: its agent's credit. With a
    ``directory``, each of the ranks gets its files in it. Raises OSError when these cannot be made.
    """

    def __init__(
        self,
        written: Callable[[int, int], None],
        directory: Optional[str] = None,
        timestamps: bool = False,
        ranks: int = 0,
    ) -> None:
        self._written = written
        self._timestamps = timestamps
        self._rest: dict[tuple[int, int], bytes] = {}
        self._files: dict[tuple[int, int], BinaryIO] = {}
        self._lost: set[str] = set()  # targets that cannot be written to any more
        self._moved = 0
        for rank in range(ranks if directory is not None else 0):
            folder = Path(str(directory)) / f"rank.{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            for stream, name in enumerate(_NAMES):
                self._files[rank, stream] = open(folder / name, "wb", buffering=0)
        self._queue: queue.SimpleQueue[Optional[tuple[int, int, bytes]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="ronderun output", daemon=True)
        self._thread.start()

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """``data`` empty: the stream ended."""
        self._queue.put((rank, stream, data))

    def say(self, text: str) -> None:
        """A line of the launcher itself, on stderr."""
        self._queue.put((-1, 1, f"ronderun: {text}\n".encode(errors="replace")))

    def close(self, patience: Callable[[], float]) -> bool:
        """Writes what is left; gives up, with False, once nothing could be written for ``patience()`` seconds."""
        self._queue.put(None)
        moved, since = self._moved, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self._moved != moved:
                moved, since = self._moved, time.monotonic()
            elif time.monotonic() - since > patience():
                return False
        return True

    # ---- The thread ----

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            rank, stream, data = item
            if rank < 0:
                self._show(stream, data)
                continue
            file = self._files.get((rank, stream))
            if file is None:
                self._lines(rank, stream, data)
            else:
                self._save(file, data)
            self._written(rank, len(data))
        for (rank, stream), rest in list(self._rest.items()):
            if rest:
                self._lines(rank, stream, b"")
        for file in self._files.values():
            file.close()

    def _lines(self, rank: int, stream: int, data: bytes) -> None:
        before = self._rest.get((rank, stream), b"")
        text = before + data
        lines = []
        start = 0
        for match in _ENDS.finditer(text, max(0, len(before) - 1)):
            if match.end() == len(text) and match.group() == b"\r" and data:
                break  # perhaps the first half of \r\n
            end = b"\r" if match.group() == b"\r" else b"\n"
            lines.append(text[start : match.start()] + end)
            start = match.end()
        rest = text[start:]
        if rest and (not data or len(rest) > _MAX_LINE):
            lines.append(rest.rstrip(b"\r") + b"\n")
            rest = b""
        self._rest[rank, stream] = rest
        stamp = time.strftime("%a %b %d %H:%M:%S %Y").encode() if self._timestamps else b""
        prefix = stamp + f"[{rank}]<{_NAMES[stream]}>:".encode()
        # An empty piece before a carriage return is a progress bar going back to its start.
        shown = b"".join(prefix + line for line in lines if line != b"\r")
        if shown:
            self._show(stream, shown)

    def _show(self, stream: int, data: bytes) -> None:
        name = _NAMES[stream]
        if name in self._lost:
            return
        target = (sys.stdout, sys.stderr)[stream]
        own = (sys.__stdout__, sys.__stderr__)[stream]
        try:
            if target is None:
                return
            if own is not None and target is own:
                # Not through the file object: a write that blocks for ever would hold its lock when the process ends.
                self._write(own.fileno(), data)
            else:  # a notebook's, a test's
                target.write(data.decode(errors="replace"))
                target.flush()
                self._moved += 1
        except Exception:  # the reader has gone; workers must not notice
            self._lost.add(name)

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view[:65536]) :]
                self._moved += 1
            except BlockingIOError:
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(1000)

    def _save(self, file: BinaryIO, data: bytes) -> None:
        if file.name in self._lost:
            return
        try:
            self._write(file.fileno(), data)
        except OSError as error:  # the disk is full; workers must not notice
            self._lost.add(file.name)
            self._show(1, f"ronderun: no more output to {file.name}: {error.strerror}\n".encode(errors="replace"))
