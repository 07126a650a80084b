"""The agent of one host: starts its workers, relays their output, serves their store, and ends them.

It runs as ``python -m ronde.launcher.agent`` and talks to the launcher only through stdin and stdout (frames.py). End-of-file
on stdin means that the launcher is gone: everything here is ended. The agent is the subreaper of all it started, so
processes that workers leave behind become its children and are ended too.
"""

from __future__ import annotations

import base64
import ctypes
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Optional

from ronde import _core
from ronde.launcher import frames

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# After the first failure: how long survivors may take to raise and leave by themselves, and how long TERM may take.
SURVIVOR_SECONDS = 2.0
GRACE_SECONDS = 5.0
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit|Warning: .*rror)\b|\berror\b", re.IGNORECASE)
STORE_PART = 8 << 20  # a store's value is limited, so large payloads go in parts


def put(store: _core.Store, key: str, value: bytes) -> None:
    parts = [value[i : i + STORE_PART] for i in range(0, len(value), STORE_PART)] or [b""]
    for i, part in enumerate(parts):
        store.set(f"{key}/{i}", part)
    store.set(key, str(len(parts)).encode())


def get(store: _core.Store, key: str, timeout: float) -> bytes:
    count = int(store.get(key, timeout))
    return b"".join(store.get(f"{key}/{i}", timeout) for i in range(count))


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    code: Optional[int] = None  # as Popen has it: negative for signals
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=40))  # the last lines of stderr
    tail: bytes = b""
    open_pipes: int = 2


def _before_exec() -> None:
    # Runs between fork and exec: one system call through a library that is loaded already.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                after_name = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == pid and after_name[0] != b"Z":
            found.append(int(entry))
    return found


class Agent:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.workers: dict[int, Worker] = {}
        self.parser = frames.Parser()
        self.outbox = bytearray()  # control frames and output that had credit
        self.credit = frames.CREDIT
        self.paused: list[tuple[Any, Any]] = []  # pipes not read for want of credit
        self.failed = False
        self.stop_at: Optional[float] = None  # when survivors get TERM
        self.kill_at: Optional[float] = None
        self.stdin_open = True
        self.directory = tempfile.mkdtemp(prefix="ronde-")  # mode 0700
        self.server: Optional[_core.StoreServer] = None
        self.store: Optional[_core.Store] = None
        self.want_results = False

    # ---- Talking to the launcher ----

    def send(self, message: dict[str, Any]) -> None:
        self.outbox += frames.control(message)
        self.flush()

    def flush(self) -> None:
        while self.outbox:
            try:
                n = os.write(1, self.outbox[:65536])
            except BlockingIOError:
                break
            except OSError:  # the launcher is gone; its end of stdin says so too
                self.outbox.clear()
                break
            del self.outbox[:n]
        events = selectors.EVENT_WRITE if self.outbox else 0
        try:
            self.selector.unregister(1)
        except (KeyError, ValueError):
            pass
        if events:
            self.selector.register(1, events, "stdout")

    # ---- Workers ----

    def start(self, job: dict[str, Any]) -> None:
        url = f"unix:{self.directory}/store"
        self.server = _core.StoreServer(url)
        self.store = _core.Store(url)
        self.store.set("secret", os.urandom(32).hex().encode())
        self.want_results = bool(job.get("task"))
        if self.want_results:
            put(self.store, "task", base64.b64decode(job["task"]))
        for identity in job["ranks"]:
            env = dict(job["env"])
            env.update({f"RONDE_{key.upper()}": str(value) for key, value in identity.items()})
            env["RONDE_STORE"] = url
            rank = identity["rank"]
            try:
                process = subprocess.Popen(
                    job["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=job["cwd"],
                    env=env,
                    start_new_session=True,
                    preexec_fn=_before_exec,
                )
            except OSError as error:
                code = 127 if isinstance(error, FileNotFoundError) else 126
                reason = f"cannot start {job['command'][0]!r} in {job['cwd']}: {error.strerror}"
                self.store.set(f"death/{rank}", reason.encode())
                self.send({"type": "exit", "rank": rank, "code": code, "error": reason})
                self.fail()
                break
            worker = Worker(rank, process)
            self.workers[rank] = worker
            for number, pipe in enumerate((process.stdout, process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                self.selector.register(pipe, selectors.EVENT_READ, (worker, number))
        self.send({"type": "started", "pids": {w.rank: w.process.pid for w in self.workers.values()}})

    def read_pipe(self, pipe: Any, worker: Worker, number: int) -> None:
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(pipe)
            pipe.close()
            worker.open_pipes -= 1
            self.outbox += frames.output(worker.rank, number, b"")  # end of the stream
            self.flush()
            return
        if number == 1:
            lines = (worker.tail + data).replace(b"\r", b"\n").split(b"\n")
            worker.tail = lines.pop()[-4096:]
            worker.errors.extend(line.decode(errors="replace") for line in lines if line.strip())
        self.credit -= len(data)
        self.outbox += frames.output(worker.rank, number, data)
        self.flush()
        if self.credit <= 0:
            for key in list(self.selector.get_map().values()):
                if isinstance(key.data, tuple):
                    self.paused.append((key.fileobj, key.data))
                    self.selector.unregister(key.fileobj)

    def resume(self, amount: int) -> None:
        self.credit += amount
        if self.credit > 0:
            for pipe, data in self.paused:
                self.selector.register(pipe, selectors.EVENT_READ, data)
            self.paused.clear()

    def reap(self) -> None:
        ended: list[tuple[Worker, int]] = []
        by_pid = {w.process.pid: w for w in self.workers.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            worker = by_pid.get(pid)
            if worker is not None and worker.code is None:
                worker.code = os.waitstatus_to_exitcode(status)
                worker.process.returncode = worker.code
                ended.append((worker, worker.code))
        # Of several that ended together, one killed by a signal is the cause rather than the consequence.
        for worker, code in sorted(ended, key=lambda item: item[1]):
            self.ended(worker, code)

    def ended(self, worker: Worker, code: int) -> None:
        message: dict[str, Any] = {"type": "exit", "rank": worker.rank, "code": code, "error": ""}
        if code != 0:
            for key in list(self.selector.get_map().values()):  # what it still said
                if isinstance(key.data, tuple) and key.data[0] is worker:
                    self.read_pipe(key.fileobj, *key.data)
            error = self.last_error(worker)
            what = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
            assert self.store is not None
            self.store.set(f"death/{worker.rank}", (f"{what}: {error}" if error else what).encode())
            message["error"] = error
        self.send(message)
        if code != 0:
            self.fail()

    def last_error(self, worker: Worker) -> str:
        lines = list(worker.errors)
        if worker.tail.strip():
            lines.append(worker.tail.decode(errors="replace"))
        for line in reversed(lines):
            if _ERROR_LINE.search(line) and not line.startswith("[ronde"):
                return line.strip()[:500]
        return lines[-1].strip()[:500] if lines else ""

    def fail(self) -> None:
        if not self.failed:
            self.failed = True
            self.stop_at = time.monotonic() + SURVIVOR_SECONDS

    def signal_all(self, number: int) -> None:
        for worker in self.workers.values():
            try:
                os.killpg(worker.process.pid, number)
            except (ProcessLookupError, PermissionError):
                pass
        for pid in _children(os.getpid()):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def stop(self, when: float) -> None:
        self.failed = True
        if self.stop_at is None or when < self.stop_at:
            self.stop_at = when

    # ---- The loop ----

    def alive(self) -> bool:
        return any(w.code is None for w in self.workers.values())

    def run(self) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for fd in (0, 1):
            os.set_blocking(fd, False)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop(time.monotonic()))
        self.selector.register(wake_read, selectors.EVENT_READ, "wake")
        self.selector.register(0, selectors.EVENT_READ, "stdin")
        os.write(1, frames.MARKER)
        started = False
        try:
            while not started or self.alive():
                started = self.step(wake_read) or started
                if not self.stdin_open and not started:
                    return
            self.finish()
        finally:
            self.signal_all(signal.SIGKILL)
            self.reap()
            if self.server is not None:
                self.server.stop()
            shutil.rmtree(self.directory, ignore_errors=True)

    def step(self, wake_read: int) -> bool:
        """One round; whether the job was started in it."""
        started = False
        deadlines = [t for t in (self.stop_at, self.kill_at) if t is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self.selector.select(timeout):
            if key.data == "stdin":
                started = self.read_stdin() or started
            elif key.data == "stdout":
                self.flush()
            elif key.data == "wake":
                os.read(wake_read, 4096)
            elif key.fileobj in self.selector.get_map():
                self.read_pipe(key.fileobj, *key.data)
        self.reap()
        now = time.monotonic()
        if self.stop_at is not None and now >= self.stop_at:
            self.stop_at = None
            if self.kill_at is None:
                self.kill_at = now + GRACE_SECONDS
                self.signal_all(signal.SIGTERM)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = now + 1.0
            self.signal_all(signal.SIGKILL)
        return started

    def read_stdin(self) -> bool:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(0)
            self.stdin_open = False
            self.stop(time.monotonic())
            return False
        started = False
        for _, message in self.parser.feed(data):
            if message["type"] == "start":
                self.start(message)
                started = True
            elif message["type"] == "stop":
                self.stop(time.monotonic())
            elif message["type"] == "credit":
                self.resume(message["bytes"])
        return started

    def finish(self) -> None:
        """All workers are gone: their last output, their results, and what they left behind."""
        limit = time.monotonic() + GRACE_SECONDS
        self.signal_all(signal.SIGTERM)
        while time.monotonic() < limit and _children(os.getpid()):
            self.pump(0.05)
            self.reap()
        self.signal_all(signal.SIGKILL)
        limit = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < limit and any(w.open_pipes for w in self.workers.values()) and self.stdin_open:
            self.pump(0.1)
        if self.want_results and self.store is not None:
            for worker in self.workers.values():
                try:
                    value = base64.b64encode(get(self.store, f"result/{worker.rank}", 0.0)).decode()
                except _core.RondeError:
                    continue  # it ended before it had one
                self.send({"type": "result", "rank": worker.rank, "value": value})
        self.send({"type": "done"})
        while self.outbox and time.monotonic() < limit + GRACE_SECONDS and self.stdin_open:
            self.pump(0.1)

    def pump(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            if key.data == "stdin":
                self.read_stdin()
            elif key.data == "stdout":
                self.flush()
            elif isinstance(key.data, tuple) and key.fileobj in self.selector.get_map():
                self.read_pipe(key.fileobj, *key.data)
            elif key.data == "wake":
                os.read(key.fd, 4096)


if __name__ == "__main__":
    Agent().run()
    sys.exit(0)
