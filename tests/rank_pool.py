"""Runs test functions on real ranks: processes that are started once for each number of ranks and each environment that
tests ask for, and used again.

The parent (pytest) serves the store and hands out test functions by name; a rank (this file run as a program) calls
them between init() and shutdown(). A rank that died or did not answer in time costs its pool, which is then started
anew.
"""

import contextlib
import faulthandler
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Optional

import cloudpickle


@dataclass
class Job:
    """A test function and how to run it."""

    module: str
    name: str
    arguments: dict[str, Any]
    init: bool = True  # between init() and shutdown()
    env: Mapping[str, str] = field(default_factory=dict)
    deadline: float = 100.0  # seconds, the import of the test's module included
    dies: tuple[int, ...] = ()  # ranks whose process ends in the test


class Failed(Exception):
    """A test failed; the text is what pytest shall print."""


class Skipped(Exception):
    """A test asked to be skipped."""


class Pool:
    """Some ranks, ready to run jobs.

    Args:
        environment: variables that the ranks' processes are started with.
    """

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        from ronde import _core

        self.size = size
        self._environment = environment
        self._folder = Path(tempfile.mkdtemp(prefix="ronde-"))
        self._server = _core.StoreServer(f"unix:{self._folder}/store")
        self._store = _core.Store(self._server.url)
        self._store.set("secret", os.urandom(16).hex().encode())
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Any] = []
        for rank in range(size):
            self._start(rank)

    def run(self, job: Job) -> None:
        """Runs a job on all ranks; raises Failed or Skipped."""
        payload = cloudpickle.dumps((job, sys.path))
        waiting = dict(zip(self._connections, range(self.size)))
        end = time.monotonic() + job.deadline
        for each in self._connections:
            each.send_bytes(payload)
        answers: dict[int, tuple[str, str]] = {}
        while waiting:
            ready = connection.wait(list(waiting), max(end - time.monotonic(), 0))
            for each in ready:
                rank = waiting.pop(each)
                answers[rank] = self._receive(each, rank)
            if not ready:
                for rank in waiting.values():
                    answers[rank] = ("fail", f"did not end within {job.deadline:g} s\n{self._stacks(rank)}")
                break
        usable = not waiting and all(process.poll() is None for process in self._processes)
        if not usable:
            self.close()
        bad = {r: text for r, (kind, text) in answers.items() if kind == ("ok" if r in job.dies else "fail")}
        bad.update({r: text for r, (kind, text) in answers.items() if kind == "died" and r not in job.dies})
        if bad:
            raise Failed("\n".join(f"---- rank {rank} of {self.size} ----\n{bad[rank]}" for rank in sorted(bad)))
        skips = [text for kind, text in answers.values() if kind == "skip"]
        if skips:
            raise Skipped(skips[0])

    @property
    def usable(self) -> bool:
        return bool(self._processes)

    def close(self) -> None:
        if not self.usable:
            return
        for each in self._connections:
            each.close()
        for process in self._processes:
            process.kill()
            process.wait(10)
        self._processes, self._connections = [], []
        self._store.close()
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> None:
        here, there = socket.socketpair()
        env = {
            **os.environ,
            "RONDE_RANK": str(rank),
            "RONDE_SIZE": str(self.size),
            "RONDE_LOCAL_RANK": str(rank),
            "RONDE_LOCAL_SIZE": str(self.size),
            "RONDE_CROSS_RANK": "0",
            "RONDE_CROSS_SIZE": "1",
            "RONDE_HOSTNAME": "testhost",
            "RONDE_STORE": self._server.url,
            "RONDE_START_TIMEOUT": "30",
            "OMP_NUM_THREADS": "1",
            **self._environment,
        }
        with open(self._folder / f"log{rank}", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno())],
                env=env,
                pass_fds=[there.fileno()],
                stdout=log,
                stderr=log,
            )
        there.close()
        self._processes.append(process)
        self._connections.append(connection.Connection(here.detach()))

    def _receive(self, each: Any, rank: int) -> tuple[str, str]:
        try:
            return each.recv()
        except (EOFError, OSError):
            code = self._processes[rank].wait(10)
            why = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
            self._store.set(f"death/{rank}", why.encode())  # as the launcher does
            return "died", f"died: {why}\n{self._log(rank)}"

    def _stacks(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        return self._log(rank)

    def _log(self, rank: int) -> str:
        return (self._folder / f"log{rank}").read_text(errors="replace")[-5000:]


class Pools:
    """One pool for each number of ranks and environment; of these the ones that were used last."""

    _KEPT = 8  # a rank with a framework has some 0.5 GB

    def __init__(self) -> None:
        self._pools: dict[Any, Pool] = {}

    def run(self, size: int, environment: Mapping[str, str], job: Job) -> None:
        key = (size, frozenset(environment.items()))
        pool = self._pools.pop(key, None)
        if pool is None or not pool.usable:
            pool = Pool(size, environment)
        self._pools[key] = pool  # at the end
        while len(self._pools) > self._KEPT:
            self._pools.pop(next(iter(self._pools))).close()
        pool.run(job)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


# ---- In a rank's process ----


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _call(job: Job, paths: Iterable[str]) -> tuple[str, str]:
    import pytest

    import ronde
    from ronde import basics

    failure: Optional[str] = None
    try:
        with _environment(job.env):
            sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
            function = getattr(importlib.import_module(job.module), job.name)
            if job.init:
                ronde.init()
            function(**job.arguments)
            return "ok", ""
    except pytest.skip.Exception as skip:
        return "skip", str(skip)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        return "fail", traceback.format_exc()
    finally:
        try:
            basics._end(failure)
        except BaseException:
            traceback.print_exc()


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    parent = connection.Connection(int(sys.argv[1]))
    while True:
        try:
            job, paths = cloudpickle.loads(parent.recv_bytes())
        except EOFError:
            return
        parent.send(_call(job, paths))


if __name__ == "__main__":
    sys.modules["rank_pool"] = sys.modules["__main__"]  # what a pickled Job names
    main()
