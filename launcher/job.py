"""Runs one job: starts the agents, follows them, ends them."""

from __future__ import annotations

import base64
import getpass
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Optional

from ronde.launcher import directory, frames
from ronde.launcher.hosts import Host, is_local
from ronde.launcher.output import Output
from ronde.launcher.processes import how_it_ended, python_command

MAX_PROCESSES = 1 << 20
AGENT_START_SECONDS = 60.0
# After the order to stop: TERM's grace in the agent and what it takes to report.
STOP_SECONDS = 9.0
# After the first failure: the survivors' time to leave, TERM's grace, KILL, and the last output.
FAILURE_SECONDS = 30.0
# How long after the first failure a rank may still turn out to be its reason. Less than the survivors' time to leave.
VERDICT_SECONDS = 1.5
OUTPUT_SECONDS = 5.0  # for a reader that stands still, once the job has failed


class LaunchError(RuntimeError):
    """The job cannot be started; the message says which part of it, and why."""


@dataclass
class JobSpec:
    command: list[str]
    num_proc: int
    hosts: list[Host]
    env: dict[str, str]
    cwd: Optional[str] = None  # else the launcher's
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
    """(host, ranks on it), filling hosts in order. Raises LaunchError when there are too few slots, or
    absurdly many processes."""
    if num_proc > MAX_PROCESSES:
        raise LaunchError(f"{num_proc} processes: a job has at most {MAX_PROCESSES}")
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
    """One job on this host. ``stop`` may be called from a signal handler. Raises LaunchError."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        placed = place(spec.num_proc, spec.hosts)
        for host, _ in placed:
            if not is_local(host.name):
                raise LaunchError(f"starting on other hosts is not available yet: host '{host.name}'")
            if host.user is not None and host.user != getpass.getuser():
                raise LaunchError(f"'{host.user}@{host.name}' is this host, where ranks run as {getpass.getuser()}")
        try:
            self.cwd = spec.cwd or os.getcwd()
        except FileNotFoundError:
            raise LaunchError("the working directory does not exist any more") from None
        self.ranks = identities(placed)[0]
        self.host_name = self.ranks[0]["hostname"]
        # Of this kind because a signal handler puts into it, too.
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.outcome = Outcome()
        self.signal: Optional[int] = None
        self._failed_at = 0.0  # when the rank of the outcome did
        self._limit: Optional[float] = None  # when to stop waiting for the agent
        self._stopping = False
        self._agent_directory: Optional[str] = None
        self._worker_pids: list[int] = []
        self._send_lock = threading.Lock()  # guards the agent's stdin

    def stop(self, number: int) -> None:
        self.signal = number
        self.events.put(("stop", None))

    def run(self) -> Outcome:
        spec = self.spec
        try:
            output = Output(self._credit, spec.output_directory, spec.timestamps, spec.num_proc)
        except OSError as error:
            raise LaunchError(f"--output-filename {spec.output_directory}: {error}") from None
        self.agent = subprocess.Popen(
            python_command("ronde.launcher.agent"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C comes through the launcher
        )
        threading.Thread(target=self._read, name="ronderun agent", daemon=True).start()
        try:
            self._follow(output)
        finally:
            self._close_stdin()
            try:
                self.agent.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.agent.kill()
                self.agent.wait(STOP_SECONDS)
            output.close(self._patience)
        if self.signal is not None and self.outcome.code == 0:
            self.outcome.code = 128 + self.signal
        return self.outcome

    def _patience(self) -> float:
        return OUTPUT_SECONDS if self.outcome.code or self.signal is not None else frames.READER_SECONDS

    def _follow(self, output: Output) -> None:
        self._limit = time.monotonic() + AGENT_START_SECONDS
        marked = False
        while True:
            try:
                kind, message = self.events.get(
                    timeout=None if self._limit is None else max(0.0, self._limit - time.monotonic())
                )
            except queue.Empty:
                self._out_of_time(marked)
                return
            if kind == "marker":
                marked = True
                self._limit = None
                self._start()
            elif kind == "stop":
                if not marked:
                    return  # nothing runs yet; the agent ends with its input
                if not self._stopping:
                    self._stopping = True
                    self._limit = time.monotonic() + STOP_SECONDS
                    self._send(frames.control({"type": "stop"}))
            elif kind == "o":
                output.add(*message)
            elif kind == "eof":
                self._agent_lost()
                return
            elif self._control(message, output):
                return

    def _control(self, message: dict[str, Any], output: Output) -> bool:
        """Whether the job is over."""
        if message["type"] == "started":
            self._agent_directory = message["directory"]
            self._worker_pids = list(message["pids"].values())
            if self.spec.verbose:
                for rank, pid in message["pids"].items():
                    output.say(f"rank {rank} is process {pid} on host {self.host_name}")
        elif message["type"] == "refused":
            self.outcome.code = 1
            self.outcome.error = f"host {self.host_name}: {message['error']}"
        elif message["type"] == "exit":
            if self.spec.verbose:
                output.say(f"rank {message['rank']} ended: {how_it_ended(message['code'])}")
            self._ended(message)
        elif message["type"] == "result":
            self.outcome.results[message["rank"]] = base64.b64decode(message["value"])
        return bool(message["type"] == "done")

    def _start(self) -> None:
        job = {
            "type": "start",
            "command": self.spec.command,
            "cwd": self.cwd,
            "env": self.spec.env,
            "ranks": self.ranks,
            "task": base64.b64encode(self.spec.task).decode() if self.spec.task is not None else None,
        }
        self._send(frames.control(job))

    def _ended(self, message: dict[str, Any]) -> None:
        code, rank = message["code"], message["rank"]
        if code == 0 or self._stopping:
            return
        if self.outcome.code:
            # A rank that leaves tells the others before it has ended: they may have failed by that, and ended, first.
            late = time.monotonic() > self._failed_at + VERDICT_SECONDS
            if late or not _is_consequence(self.outcome.error) or _is_consequence(message["error"]):
                return
        self._failed_at = time.monotonic()
        self._limit = time.monotonic() + FAILURE_SECONDS
        self.outcome.code = 128 - code if code < 0 else code
        self.outcome.rank = rank
        what = f"was killed by {how_it_ended(code)}" if code < 0 else f"exited with code {code}"
        self.outcome.error = f"rank {rank} on host {self.host_name} {what}" + (
            f": {message['error']}" if message["error"] else ""
        )

    def _out_of_time(self, marked: bool) -> None:
        if not marked:
            raise LaunchError(f"the agent on host {self.host_name} did not start within {AGENT_START_SECONDS:.0f} s")
        if self.signal is None:
            self.outcome.code = self.outcome.code or 1
        self.outcome.error += "; " if self.outcome.error else ""
        self.outcome.error += f"the agent on host {self.host_name} did not end the ranks in time"

    def _agent_lost(self) -> None:
        """The workers died with the agent; what they had started is in their process groups, unless it left these."""
        try:
            code: Optional[int] = self.agent.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        for pid in self._worker_pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass
        if self._agent_directory is not None:
            directory.remove(self._agent_directory)
        if not self.outcome.code and not self._stopping:
            self.outcome.code = 1
            self.outcome.error = f"the agent on host {self.host_name} ended unexpectedly" + (
                f": {how_it_ended(code)}" if code is not None else ""
            )

    def _send(self, data: bytes) -> None:
        with self._send_lock:
            try:
                assert self.agent.stdin is not None
                self.agent.stdin.write(data)
                self.agent.stdin.flush()
            except (OSError, ValueError):
                pass  # the agent is gone; its output's end says so

    def _close_stdin(self) -> None:
        with self._send_lock:
            try:
                assert self.agent.stdin is not None
                self.agent.stdin.close()
            except OSError:
                pass

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


def _is_consequence(error: str) -> bool:
    """Whether a rank failed because another did: what its last line of error output says."""
    return "PeerLostError" in error or "ShutdownError" in error
