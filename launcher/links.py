"""The launcher's side of one agent: its process, what goes to it, and what comes from it."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections import deque
from typing import Any, Optional

from ronde.launcher import frames
from ronde.launcher.hosts import Host
from ronde.launcher.processes import python_command
from ronde.launcher.ssh import Ssh, module_path_line

_SAID_BYTES = 4096
_LAST_WORDS_SECONDS = 1.0


class Link:
    """Puts what happens into ``events`` as (link, kind, message): "marker", "j" and "o" (frames.py), "eof".

    Sending never blocks: a thread writes what is queued, so a host that does not read holds up nobody.
    """

    def __init__(self, host: Host, name: str, ranks: list[dict[str, Any]], events: queue.SimpleQueue[Any]) -> None:
        self.host, self.name, self.ranks = host, name, ranks
        self.remote = False
        self.marked = False  # the agent's Python runs
        self.ready = False  # the agent does
        self.machine: Optional[str] = None  # which it is, whatever its name
        self.over = False  # nothing more will come
        self.heard = time.monotonic()
        self.directory: Optional[str] = None
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}  # of the ranks that have ended
        self._events = events
        self._outbox: queue.SimpleQueue[Optional[bytes]] = queue.SimpleQueue()
        self._before = b""  # what came before the marker
        self._errors: deque[bytes] = deque(maxlen=40)

    def open(self, ssh: Optional[Ssh], limit: float, peer_timeout: float) -> None:
        """Starts the agent; without ``ssh``, on this host."""
        self.remote = ssh is not None
        command = ssh.command(self.host, limit, peer_timeout) if ssh else python_command("ronde.launcher.agent")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if ssh else None,
            start_new_session=True,  # the terminal's Ctrl-C comes through the launcher
        )
        threading.Thread(target=self._read, name=f"ronderun from {self.name}", daemon=True).start()
        threading.Thread(target=self._write, name=f"ronderun to {self.name}", daemon=True).start()
        if ssh:
            self._listener = threading.Thread(target=self._listen, name=f"ronderun ssh {self.name}", daemon=True)
            self._listener.start()

    def mark(self) -> None:
        """The marker came. Before that nothing is sent, which a shell would take for itself."""
        self.marked = True
        if self.remote:
            self._outbox.put(module_path_line())

    def send(self, message: dict[str, Any]) -> None:
        self.send_bytes(frames.control(message))

    def send_bytes(self, data: bytes) -> None:
        if not self.over:
            self._outbox.put(data)

    def close(self) -> None:
        """Ends the agent's input, after what is queued."""
        self._outbox.put(None)

    def wait(self, seconds: float) -> Optional[int]:
        """Its exit code; None: it runs on."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def end(self, seconds: float) -> None:
        self.close()
        if self.wait(seconds) is None:
            self.process.kill()
            self.wait(seconds)

    def said(self) -> str:
        """What shell and ssh said, for messages: stdout before the marker, then the end of stderr."""
        if self.remote:
            self._listener.join(_LAST_WORDS_SECONDS)
        return (b"" if self.marked else self._before + b"\n").decode(errors="replace") + b"\n".join(
            self._errors
        ).decode(errors="replace")

    def ranks_text(self) -> str:
        numbers = [str(identity["rank"]) for identity in self.ranks]
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"

    # ---- Threads ----

    def _write(self) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        try:
            while (data := self._outbox.get()) is not None:
                stdin.write(data)
                stdin.flush()
        except (OSError, ValueError):
            pass  # the agent is gone; its output's end says so
        try:
            stdin.close()
        except OSError:
            pass

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line.rstrip()[:500])

    def _read(self) -> None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        parser = frames.Parser()
        marked = False
        try:
            while data := os.read(fd, 65536):
                self.heard = time.monotonic()
                if not marked:
                    self._before += data
                    at = self._before.find(frames.MARKER)
                    if at < 0:
                        self._before = self._before[-_SAID_BYTES:]
                        continue
                    marked = True
                    data = self._before[at + len(frames.MARKER) :]
                    self._events.put((self, "marker", None))
                for kind, message in parser.feed(data):
                    self._events.put((self, kind, message))
        except (OSError, ValueError):
            pass
        self._events.put((self, "eof", None))
