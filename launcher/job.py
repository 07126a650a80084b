"""Runs one job: starts the agents, follows them, ends them."""

from __future__ import annotations

import base64
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Optional

from ronde.launcher import frames
from ronde.launcher.hosts import Host, is_local
from ronde.launcher.output import Output

AGENT_START_SECONDS = 60.0
# After the order to stop: TERM's grace in the agent and what it takes to report.
STOP_SECONDS = 9.0


class LaunchError(RuntimeError):
    """The job cannot be started; the message says which part of it, and why."""


@dataclass
class JobSpec:
    command: list[str]
    num_proc: int
    hosts: list[Host]
    env: dict[str, str]
    cwd: str = field(default_factory=os.getcwd)
    output_directory: Optional[str] = None
    timestamps: bool = False
    verbose: bool = False
    task: Optional[bytes] = None  # of ronde.run


@dataclass
class Outcome:
    code: int = 0  # for the launcher's exit: the first failing worker's, 128+signal
    rank: Optional[int] = None  # that worker
    error: str = ""
    results: dict[int, bytes] = field(default_factory=dict)


def place(num_proc: int, hosts: list[Host]) -> list[tuple[Host, int]]:
    """(host, ranks on it), filling hosts in order. Raises LaunchError when there are too few slots."""
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        names = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(f"-np {num_proc} asks for more processes than there are slots ({slots} on {names})")
    placed = []
    left = num_proc
    for host in hosts:
        count = min(left, host.slots)
        if count:
            placed.append((host, count))
        left -= count
    return placed


def identities(placed: list[tuple[Host, int]]) -> list[list[dict[str, Any]]]:
    """By host: what each of its workers is told about itself."""
    size = sum(count for _, count in placed)
    all_hosts = []
    rank = 0
    for index, (host, count) in enumerate(placed):
        name = socket.gethostname() if is_local(host.name) else host.name
        ranks = []
        for local in range(count):
            with_this_local = [i for i, (_, n) in enumerate(placed) if n > local]
            ranks.append(
                {
                    "rank": rank,
                    "size": size,
                    "local_rank": local,
                    "local_size": count,
                    "cross_rank": with_this_local.index(index),
                    "cross_size": len(with_this_local),
                    "hostname": name,
                }
            )
            rank += 1
        all_hosts.append(ranks)
    return all_hosts


class Job:
    """One job on this host. ``stop`` may be called from a signal handler."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        placed = place(spec.num_proc, spec.hosts)
        for host, _ in placed:
            if not is_local(host.name):
                raise LaunchError(
                    f"starting workers on other hosts is not available in this release: host '{host.name}'"
                )
        self.ranks = identities(placed)[0]
        self.host_name = self.ranks[0]["hostname"]
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.outcome = Outcome()
        self.stopping: Optional[float] = None
        self.signal: Optional[int] = None
        self._send_lock = threading.Lock()  # guards the agent's stdin

    def stop(self, number: int) -> None:
        self.signal = number
        self.events.put(("stop", None))

    def run(self) -> Outcome:
        spec = self.spec
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "ronde.launcher.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C comes through the launcher
        )
        output = Output(self._credit, spec.output_directory, spec.timestamps)
        threading.Thread(target=self._read, name="ronderun agent", daemon=True).start()
        try:
            self._follow(output)
        finally:
            if self.agent.stdin is not None:
                try:
                    self.agent.stdin.close()
                except OSError:
                    pass
            try:
                self.agent.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.agent.kill()
                self.agent.wait(STOP_SECONDS)
            output.close()
        if self.signal is not None and self.outcome.code == 0:
            self.outcome.code = 128 + self.signal
        return self.outcome

    def _follow(self, output: Output) -> None:
        limit: Optional[float] = time.monotonic() + AGENT_START_SECONDS
        while True:
            try:
                kind, message = self.events.get(timeout=None if limit is None else max(0.0, limit - time.monotonic()))
            except queue.Empty:
                if self.stopping is None:
                    raise LaunchError(
                        f"the agent on host {self.host_name} did not start within {AGENT_START_SECONDS:.0f} s"
                    ) from None
                return
            if kind == "marker":
                limit = None
                job = {
                    "type": "start",
                    "command": self.spec.command,
                    "cwd": self.spec.cwd,
                    "env": self.spec.env,
                    "ranks": self.ranks,
                    "task": base64.b64encode(self.spec.task).decode() if self.spec.task is not None else None,
                }
                self._send(frames.control(job))
            elif kind == "stop":
                if self.stopping is None:
                    self.stopping = time.monotonic()
                    limit = self.stopping + STOP_SECONDS
                    self._send(frames.control({"type": "stop"}))
            elif kind == "o":
                output.add(*message)
            elif kind == "eof":
                if not self.outcome.code and self.stopping is None:
                    self.outcome.code = 1
                    self.outcome.error = (
                        f"the agent on host {self.host_name} ended unexpectedly (code {self.agent.poll()})"
                    )
                return
            elif message["type"] == "started":
                if self.spec.verbose:
                    for rank, pid in message["pids"].items():
                        print(f"ronderun: rank {rank} is process {pid} on host {self.host_name}", file=sys.stderr)
            elif message["type"] == "exit":
                self._ended(message)
            elif message["type"] == "result":
                self.outcome.results[message["rank"]] = base64.b64decode(message["value"])
            elif message["type"] == "done":
                return

    def _ended(self, message: dict[str, Any]) -> None:
        code, rank = message["code"], message["rank"]
        if self.spec.verbose:
            print(f"ronderun: rank {rank} ended with code {code}", file=sys.stderr)
        if code == 0 or self.outcome.code or self.stopping is not None:
            return
        self.outcome.code = 128 - code if code < 0 else code
        self.outcome.rank = rank
        what = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
        )
        self.outcome.error = f"rank {rank} on host {self.host_name} {what}" + (
            f": {message['error']}" if message["error"] else ""
        )

    def _send(self, data: bytes) -> None:
        with self._send_lock:
            try:
                assert self.agent.stdin is not None
                self.agent.stdin.write(data)
                self.agent.stdin.flush()
            except (OSError, ValueError):
                pass  # the agent is gone; its output's end says so

    def _credit(self, amount: int) -> None:
        if amount:
            self._send(frames.control({"type": "credit", "bytes": amount}))

    def _read(self) -> None:
        assert self.agent.stdout is not None
        fd = self.agent.stdout.fileno()
        parser = frames.Parser()
        before = b""
        marked = False
        try:
            while data := os.read(fd, 65536):
                if not marked:
                    before += data
                    at = before.find(frames.MARKER)
                    if at < 0:
                        before = before[-4096:]
                        continue
                    marked = True
                    data = before[at + len(frames.MARKER) :]
                    self.events.put(("marker", None))
                for event in parser.feed(data):
                    self.events.put(event)
        except (OSError, ValueError):
            pass
        self.events.put(("eof", None))
