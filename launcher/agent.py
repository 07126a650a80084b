"""The agent of one host: starts its workers, relays their output, serves their store, and ends them.

It is a process of its own that talks to the launcher only through stdin and stdout (frames.py). End-of-file
on stdin means that the launcher is gone: everything here is ended. The agent is the subreaper of all it started, so
processes that workers leave behind become its children and are ended too.
"""

from __future__ import annotations

import base64
import os
import selectors
import signal
import subprocess
import time
import warnings
from typing import Any, Callable, Optional

from ronde import _core
from ronde.launcher import directory, frames
from ronde.launcher.payload import get, put
from ronde.launcher.processes import become_subreaper, descendants, die_with_parent, how_it_ended, machine
from ronde.launcher.relay import VARIABLE, Relay
from ronde.launcher.worker import Worker

# After the first failure: how long survivors may take to raise and leave by themselves, and how long TERM may take.
SURVIVOR_SECONDS = 2.0
GRACE_SECONDS = 5.0
# For an agent that a launcher elsewhere has started, and not told anything yet.
UNTOLD_SECONDS = 300.0


class Agent:
    def __init__(self, remote: bool = False) -> None:
        self.selector = selectors.DefaultSelector()
        self.workers: dict[int, Worker] = {}
        self.parser = frames.Parser()
        self.outbox = bytearray()  # control frames and output that had credit
        self.credit = frames.CREDIT
        self.paused = False  # no pipe is read for want of credit
        self.moved = 0  # bytes that the launcher took and wrote
        self.failed = False
        self.stop_at: Optional[float] = None  # when survivors get TERM
        self.kill_at: Optional[float] = None
        self.stdin_open = True
        self.directory = ""
        self.server: Optional[_core.StoreServer] = None
        self.store: Optional[_core.Store] = None
        self.relay: Optional[Relay] = None
        self.want_results = False
        # Seconds of the launcher's silence after which it counts as lost; None: it is on this host.
        self.patience = UNTOLD_SECONDS if remote else None
        self.heard = self.spoke = time.monotonic()

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
            self.moved += n
        events = selectors.EVENT_WRITE if self.outbox else 0
        try:
            self.selector.unregister(1)
        except (KeyError, ValueError):
            pass
        if events:
            self.selector.register(1, events, "stdout")

    # ---- Workers ----

    def start(self, job: dict[str, Any]) -> None:
        if self.patience is not None:
            self.patience = job["patience"]
        try:
            if not os.path.isdir(job["cwd"]):
                raise FileNotFoundError(f"there is no directory {job['cwd']}, the job's working directory")
            directory.remove_abandoned()
            self.directory = directory.make()
            url = directory.store_url(self.directory)
            self.server = _core.StoreServer(url)
            self.store = _core.Store(url)
            self.store.set("secret", job["secret"].encode())
            if job["hosts"] > 1:
                self.relay = Relay(self.directory, self.store, len(job["ranks"]), job["ranks"][0]["size"])
                self.selector.register(self.relay.socket, selectors.EVENT_READ, "relay")
            self.want_results = job["task"] is not None
            if self.want_results:
                put(self.store, "task", base64.b64decode(job["task"]))
        except FileNotFoundError as error:
            self.send({"type": "refused", "error": str(error)})
            return
        except (OSError, _core.RondeError) as error:
            self.send({"type": "refused", "error": f"the agent cannot serve its store: {error}"})
            return
        cores = len(os.sched_getaffinity(0))
        for identity in job["ranks"]:
            env = dict(job["env"])
            env.update({f"RONDE_{key.upper()}": str(value) for key, value in identity.items()})
            env["RONDE_STORE"] = url
            if self.relay is not None:
                env[VARIABLE] = self.relay.path
            # Frameworks take all cores each otherwise, and ranks slow each other down.
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores // identity["local_size"])))
            if not self.start_worker(identity["rank"], job["command"], job["cwd"], env):
                break
        pids = {worker.rank: worker.process.pid for worker in self.workers.values()}
        self.send({"type": "started", "pids": pids, "directory": self.directory})

    def start_worker(self, rank: int, command: list[str], cwd: str, env: dict[str, str]) -> bool:
        try:
            with warnings.catch_warnings():
                # The store's server has a thread, so newer Pythons warn of what a forked child does before it becomes
                # the worker: here one system call, through a library that is loaded already.
                warnings.simplefilter("ignore")
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=cwd,
                    env=env,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            reason = f"cannot start {command[0]!r} in {cwd}: {getattr(error, 'strerror', None) or error}"
            if command[0].endswith(".py"):
                reason += f"; to run a script, write: python {command[0]}"
            self.announce(rank, reason)
            self.send({"type": "exit", "rank": rank, "code": code, "error": reason})
            self.fail()
            return False
        assert process.stdout is not None and process.stderr is not None
        worker = Worker(rank, process, pipes={0: process.stdout, 1: process.stderr})
        self.workers[rank] = worker
        for number, pipe in worker.pipes.items():
            os.set_blocking(pipe.fileno(), False)
            if not self.paused:
                self.selector.register(pipe, selectors.EVENT_READ, (worker, number))
        return True

    def announce(self, rank: int, reason: str) -> None:
        """Where the ranks look for how one of them ended."""
        try:
            assert self.store is not None
            self.store.set(f"death/{rank}", reason.encode(errors="replace"))
        except _core.RondeError:
            pass  # the launcher still says it

    def read_pipe(self, worker: Worker, number: int) -> None:
        pipe = worker.pipes.get(number)
        if pipe is None:
            return
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            if not self.paused:
                self.selector.unregister(pipe)
            pipe.close()
            del worker.pipes[number]
        elif number == 1:
            worker.add_errors(data)
        self.credit -= len(data)
        self.outbox += frames.output(worker.rank, number, data)  # without data: the end of the stream
        self.flush()
        if self.credit <= 0 and not self.paused:
            self.paused = True
            for each in self.workers.values():
                for open_pipe in each.pipes.values():
                    self.selector.unregister(open_pipe)

    def resume(self, amount: int) -> None:
        self.credit += amount
        self.moved += amount
        if self.credit > 0 and self.paused:
            self.paused = False
            for worker in self.workers.values():
                for number, pipe in worker.pipes.items():
                    self.selector.register(pipe, selectors.EVENT_READ, (worker, number))

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
        error, what = "", how_it_ended(code)
        if code != 0:
            for number in list(worker.pipes):  # what it still said; more than this a pipe does not hold
                self.read_pipe(worker, number)
            error = worker.last_error()
        self.announce(worker.rank, f"{what}: {error}" if error else what)
        self.send({"type": "exit", "rank": worker.rank, "code": code, "error": error})
        if code != 0:
            self.fail()

    def fail(self) -> None:
        if not self.failed:
            self.failed = True
            self.stop_at = time.monotonic() + SURVIVOR_SECONDS

    def signal_all(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def kill(self) -> None:
        for worker in self.workers.values():
            if worker.code is None:
                try:
                    os.killpg(worker.process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
        self.signal_all(signal.SIGKILL)
        self.reap()

    def kill_all(self) -> None:
        """Until nothing is left: a process may start another while it is being killed."""
        limit = time.monotonic() + GRACE_SECONDS
        self.kill()
        while descendants(os.getpid()) and time.monotonic() < limit:
            time.sleep(0.01)
            self.kill()

    def stop(self, when: float) -> None:
        self.failed = True
        if self.stop_at is None or when < self.stop_at:
            self.stop_at = when

    # ---- The loop ----

    def alive(self) -> bool:
        return any(w.code is None for w in self.workers.values())

    def run(self) -> None:
        die_with_parent(signal.SIGTERM)
        become_subreaper()
        for fd in (0, 1):
            os.set_blocking(fd, False)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop(time.monotonic()))
        self.selector.register(wake_read, selectors.EVENT_READ, "wake")
        self.selector.register(0, selectors.EVENT_READ, "stdin")
        if self.patience is None:  # else it has been said
            os.write(1, frames.MARKER)
        self.send({"type": "ready", "version": _core.__version__, "machine": machine()})
        started = False
        try:
            while not started or self.alive():
                started = self.step(wake_read) or started
                if not self.stdin_open and not started:
                    return
            self.finish()
        finally:
            self.kill_all()
            if self.relay is not None:
                self.relay.close()
            if self.server is not None:
                self.server.stop()
            if self.directory:
                directory.remove(self.directory)

    def step(self, wake_read: int) -> bool:
        """One round; whether the job was started in it."""
        started = False
        due = self.relay.due() if self.relay is not None else None
        deadlines = [t for t in (self.stop_at, self.kill_at, due, self.next_sign()) if t is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self.selector.select(timeout):
            if key.data == "stdin":
                started = self.read_stdin() or started
            elif key.data == "stdout":
                self.flush()
            elif key.data == "wake":
                os.read(wake_read, 4096)
            elif key.data == "relay":
                assert self.relay is not None
                self.relay.read()
            elif not self.paused:
                self.read_pipe(*key.data)
        self.reap()
        for frame in self.relay.take() if self.relay is not None else ():
            self.send(frame)
        self.show_life()
        now = time.monotonic()
        if self.stop_at is not None and now >= self.stop_at:
            self.stop_at = None
            if self.kill_at is None:
                self.kill_at = now + GRACE_SECONDS
                self.signal_all(signal.SIGTERM)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = now + 1.0
            self.kill()
        return started

    def read_stdin(self) -> bool:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.launcher_lost()
            return False
        self.heard = time.monotonic()
        started = False
        for _, message in self.parser.feed(data):
            if message["type"] == "start":
                self.start(message)
                started = True
            elif message["type"] == "stop":
                self.stop(time.monotonic())
            elif message["type"] == "credit":
                self.resume(message["bytes"])
            elif message["type"] == "blobs" and self.relay is not None:
                self.relay.hand_in(message)
            elif message["type"] == "death":  # of a rank on another host
                self.announce(message["rank"], message["reason"])
                if message["failed"]:
                    self.fail()
        return started

    # ---- Signs of life, between hosts ----

    def next_sign(self) -> Optional[float]:
        """When to send one, or to give the launcher up."""
        if self.patience is None or not self.stdin_open:
            return None
        return min(self.spoke + self.patience / frames.SIGNS, self.heard + self.patience)

    def show_life(self) -> None:
        if self.patience is None or not self.stdin_open:
            return
        now = time.monotonic()
        if now - self.heard >= self.patience:
            self.launcher_lost()
        elif now - self.spoke >= self.patience / frames.SIGNS:
            self.spoke = now
            self.send({"type": "alive"})

    def launcher_lost(self) -> None:
        self.selector.unregister(0)
        self.stdin_open = False
        self.stop(time.monotonic())

    def finish(self) -> None:
        """All workers are gone: what they left behind, their last output, and their results."""
        if self.kill_at is None:
            limit = time.monotonic() + GRACE_SECONDS
            self.signal_all(signal.SIGTERM)
            while time.monotonic() < limit and self.stdin_open and descendants(os.getpid()):
                self.pump(0.05)
                self.reap()
        self.kill_all()
        self.drain(lambda: any(worker.pipes for worker in self.workers.values()))
        if self.want_results and self.store is not None:
            for worker in self.workers.values():
                try:
                    value = base64.b64encode(get(self.store, f"result/{worker.rank}", 0.0)).decode()
                except _core.RondeError:
                    continue  # it ended before it had one
                self.send({"type": "result", "rank": worker.rank, "value": value})
        self.send({"type": "done"})
        self.drain(lambda: bool(self.outbox))

    def drain(self, more: Callable[[], bool]) -> None:
        """Goes on while there is more, and the launcher takes it. After a failure a reader that stands still is not
        waited for."""
        moved, since = self.moved, time.monotonic()
        while more() and self.stdin_open:
            self.pump(0.1)
            now = time.monotonic()
            if self.moved != moved:
                moved, since = self.moved, now
            elif now - since > (frames.READER_SECONDS if self.paused and not self.failed else GRACE_SECONDS):
                break

    def pump(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            if key.data == "stdin":
                self.read_stdin()
            elif key.data == "stdout":
                self.flush()
            elif key.data == "wake":
                os.read(key.fd, 4096)
            elif key.data != "relay" and not self.paused:
                self.read_pipe(*key.data)
        self.show_life()


def main(local: bool = True) -> None:
    """``local``: the launcher is on this host. Else this process has said the marker already."""
    Agent(remote=not local).run()


if __name__ == "__main__":
    main()
