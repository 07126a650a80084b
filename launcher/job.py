"""Runs one job: starts the agents, follows them, ends them."""

from __future__ import annotations

import base64
import contextlib
import getpass
import os
import queue
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, Optional

from ronde import _core
from ronde.launcher import frames, sweep
from ronde.launcher.errors import LaunchError
from ronde.launcher.hosts import Host, is_local
from ronde.launcher.links import Link
from ronde.launcher.output import Output
from ronde.launcher.placement import identities, place
from ronde.launcher.processes import how_it_ended
from ronde.launcher.ssh import Ssh

# For the agents to be up; less, where the limit for the whole start is.
AGENT_START_SECONDS = 60.0
# After the order to stop: TERM's grace in the agent and what it takes to report.
STOP_SECONDS = 9.0
# After the first failure: the survivors' time to leave, TERM's grace, KILL, and the last output.
FAILURE_SECONDS = 30.0
# How long after the first failure a rank may still turn out to be its reason. Less than the survivors' time to leave.
VERDICT_SECONDS = 1.5
OUTPUT_SECONDS = 5.0  # for a reader that stands still, once the job has failed


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
    ssh: Ssh = field(default_factory=Ssh)


@dataclass
class Outcome:
    code: int = 0  # for the launcher's exit: the first failing worker's, 128+signal
    rank: Optional[int] = None  # that worker
    error: str = ""
    results: dict[int, bytes] = field(default_factory=dict)


class Job:
    """One job. ``stop`` may be called from a signal handler. Raises LaunchError."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        # Of this kind because a signal handler puts into it, too.
        self.events: queue.SimpleQueue[tuple[Optional[Link], str, Any]] = queue.SimpleQueue()
        placed = place(spec.num_proc, spec.hosts)
        self.links: list[Link] = []
        for (host, _), ranks in zip(placed, identities(placed)):
            if is_local(host.name) and host.user is not None and host.user != getpass.getuser():
                raise LaunchError(f"'{host.user}@{host.name}' is this host, where ranks run as {getpass.getuser()}")
            self.links.append(Link(host, ranks[0]["hostname"], ranks, self.events))
        try:
            self.cwd = spec.cwd or os.getcwd()
        except FileNotFoundError:
            raise LaunchError("the working directory does not exist any more") from None
        self._start_seconds = min(AGENT_START_SECONDS, _seconds(spec.env, "START_TIMEOUT"))
        self._patience_seconds = max(1.0, _seconds(spec.env, "GLOO_TIMEOUT_SECONDS"))
        self._link_of = {identity["rank"]: link for link in self.links for identity in link.ranks}
        self.outcome = Outcome()
        self.signal: Optional[int] = None
        self._failed_at = 0.0  # when the rank of the outcome did
        self._consequence = False  # the outcome's failure may be another's
        self._limit: Optional[float] = None  # when to stop waiting for the agents
        self._stopping = False
        self._sweeps: list[subprocess.Popen[bytes]] = []  # that clean up on other hosts
        self._begun = False  # the agents were told to start the ranks
        self._next_sign: Optional[float] = time.monotonic()

    def stop(self, number: int) -> None:
        self.signal = number
        self.events.put((None, "stop", None))

    def run(self) -> Outcome:
        spec = self.spec
        remote = [link for link in self.links if not is_local(link.host.name)]
        if remote and shutil.which("ssh") is None:
            raise LaunchError(f"there is no ssh here to reach host '{remote[0].host.name}'")
        try:
            self.output = Output(self._credit, spec.output_directory, spec.timestamps, spec.num_proc)
        except OSError as error:
            raise LaunchError(f"--output-filename {spec.output_directory}: {error}") from None
        opened: list[Link] = []
        try:
            for link in self.links:
                link.open(spec.ssh if link in remote else None, self._start_seconds, self._patience_seconds)
                opened.append(link)
            self._follow()
        except OSError as error:
            raise LaunchError(f"the agent for host {self.links[len(opened)].name} cannot be started: {error}") from None
        finally:
            for link in opened:
                link.close()
                if link.remote and not link.ready:
                    link.process.kill()  # ssh would wait for a host that does not answer
            limit = time.monotonic() + STOP_SECONDS
            for link in opened:
                link.end(limit - time.monotonic())
            self._end_sweeps()
            self.output.close(self._patience)
        if self.signal is not None and self.outcome.code == 0:
            self.outcome.code = 128 + self.signal
        return self.outcome

    def _end_sweeps(self) -> None:
        limit = time.monotonic() + sweep.SECONDS
        for process in self._sweeps:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)

    def _patience(self) -> float:
        return OUTPUT_SECONDS if self.outcome.code or self.signal is not None else frames.READER_SECONDS

    # ---- The loop ----

    def _follow(self) -> None:
        self._limit = time.monotonic() + self._start_seconds
        while not all(link.over for link in self.links):
            self._signs_of_life()
            now = time.monotonic()
            if self._limit is not None and now >= self._limit:
                return self._out_of_time()
            wakes = [when for when in (self._limit, self._next_sign) if when is not None]
            try:
                link, kind, message = self.events.get(timeout=max(0.0, min(wakes) - now) if wakes else None)
            except queue.Empty:
                continue
            if link is None:  # a signal
                if not self._begun:
                    return  # nothing runs yet; the agents end with their input
                self._stop()
            elif kind == "o":
                self.output.add(*message)
            elif kind == "marker":
                link.mark()
            elif kind == "eof":
                self._agent_lost(link)
            elif not link.over:
                self._control(link, message)
            if not self._begun and self.outcome.code:
                return  # nothing runs yet, and nothing will

    def _signs_of_life(self) -> None:
        """To and from the agents on other hosts. A cable that is cut says nothing else."""
        now = time.monotonic()
        others = [link for link in self.links if link.remote and link.ready and not link.over]
        for link in others:
            if self._begun and now - link.heard >= self._patience_seconds:
                link.process.kill()
                self._lost(link, f"nothing was heard from it for {now - link.heard:.0f} s (its network or power?)")
        if not any(link.remote for link in self.links):
            self._next_sign = None
        elif self._next_sign is not None and now >= self._next_sign:
            self._next_sign = now + self._patience_seconds / frames.SIGNS
            for link in others:
                link.send({"type": "alive"})

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._limit = time.monotonic() + STOP_SECONDS
            for link in self.links:
                link.send({"type": "stop"})

    def _control(self, link: Link, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "ready":
            link.ready = True
            link.machine = message["machine"]
            twin = next((each for each in self.links if each is not link and each.machine == link.machine), None)
            if message["version"] != _core.__version__:
                self._fail(
                    1, None, f"host {link.name} has ronde {message['version']}, the launcher {_core.__version__}"
                )
            elif twin is not None:
                names = sorted((twin.host.name, link.host.name))
                self._fail(
                    1, None, f"hosts {names[0]} and {names[1]} are the same machine: name it once, with all slots"
                )
            elif all(each.ready for each in self.links):
                self._begin()
        elif kind == "started":
            link.directory = message["directory"]
            link.pids = {int(rank): pid for rank, pid in message["pids"].items()}
            if self.spec.verbose:
                for rank, pid in link.pids.items():
                    self.output.say(f"rank {rank} is process {pid} on host {link.name}")
        elif kind == "refused":
            self._fail(1, None, f"host {link.name}: {message['error']}")
            self._tell_death(link, None, f"host {link.name}: {message['error']}", True)
        elif kind == "exit":
            if self.spec.verbose:
                self.output.say(f"rank {message['rank']} ended: {how_it_ended(message['code'])}")
            self._ended(link, message)
        elif kind == "blobs":
            data = frames.control(message)
            for other in self.links:
                if other is not link:
                    other.send_bytes(data)
        elif kind == "result":
            self.outcome.results[message["rank"]] = base64.b64decode(message["value"])
        elif kind == "done":
            link.over = True

    def _begin(self) -> None:
        self._begun = True
        self._limit = None
        secret = secrets.token_hex(32)
        for link in self.links:
            link.send(
                {
                    "type": "start",
                    "command": self.spec.command,
                    "cwd": self.cwd,
                    "env": self.spec.env,
                    "secret": secret,
                    "ranks": link.ranks,
                    "hosts": len(self.links),
                    "patience": self._patience_seconds if link.remote else None,
                    "task": base64.b64encode(self.spec.task).decode() if self.spec.task is not None else None,
                }
            )

    # ---- What goes wrong ----

    def _fail(self, code: int, rank: Optional[int], error: str, consequence: bool = False) -> None:
        """The job has failed; the first reason counts, unless that may be the consequence of this one."""
        self._failed_at = time.monotonic()
        self._limit = (
            self._limit if self._limit is not None and self.outcome.code else self._failed_at + FAILURE_SECONDS
        )
        self._consequence = consequence
        self.outcome.code, self.outcome.rank, self.outcome.error = code, rank, error

    def _ended(self, link: Link, message: dict[str, Any]) -> None:
        code, rank, error = message["code"], message["rank"], message["error"]
        link.codes[rank] = code
        self._tell_death(link, rank, how_it_ended(code) + (f": {error}" if error else ""), code != 0)
        if code == 0 or self._stopping:
            return
        consequence = _is_consequence(error)
        if self.outcome.code:
            # A rank that leaves tells the others before it has ended: they may have failed by that, and ended, first.
            late = time.monotonic() > self._failed_at + VERDICT_SECONDS
            if late or not self._consequence or consequence:
                return
        what = f"was killed by {how_it_ended(code)}" if code < 0 else f"exited with code {code}"
        text = f"rank {rank} on host {link.name} {what}" + (f": {error}" if error else "")
        self._fail(128 - code if code < 0 else code, rank, text, consequence)

    def _tell_death(self, link: Link, rank: Optional[int], reason: str, failed: bool) -> None:
        """Tells the other hosts' ranks how this one ended (none: all that are left there)."""
        gone = [identity["rank"] for identity in link.ranks if identity["rank"] not in link.codes]
        for each in gone if rank is None else [rank]:
            for other in self.links:
                if other is not link and self._begun:
                    other.send({"type": "death", "rank": each, "reason": reason, "failed": failed})

    def _lost(self, link: Link, reason: str) -> None:
        """All of a host's ranks at once."""
        link.over = True
        if self._stopping:
            return
        text = f"host {link.name}"
        if self._begun:
            text += f" ({link.ranks_text()}) was lost while the job ran"
            self._tell_death(link, None, f"host {link.name} was lost: {reason}", True)
        if not self.outcome.code or self._consequence:
            self._fail(1, None, f"{text}: {reason}")

    def _out_of_time(self) -> None:
        late = [link for link in self.links if not link.over]
        if not self._begun:
            late = [link for link in late if not link.ready]
            stage = "answered, but its agent did not start" if late[0].marked else "did not answer to ssh"
            if not late[0].remote:
                stage = "did not start its agent"
            text = "; ".join(f"host {link.name} {stage} within {self._start_seconds:g} s" for link in late[:1])
            others = ", ".join(link.name for link in late[1:])
            self._fail(1, None, text + (f"; so it is with: {others}" if others else ""))
            for link in late:
                link.process.kill()
            return
        if self.signal is None:
            self.outcome.code = self.outcome.code or 1
        self.outcome.error += "; " if self.outcome.error else ""
        names = ", ".join(link.name for link in late)
        self.outcome.error += "; " if self.outcome.error else ""
        self.outcome.error += f"the agent on host {names} did not end the ranks in time"
        for link in late:
            if link.remote:
                link.process.kill()

    def _agent_lost(self, link: Link) -> None:
        if link.over:
            return
        code = link.wait(1.0)
        if link.remote:
            if link.pids:
                self._sweeps.append(sweep.begin(self.spec.ssh, link.host, list(link.pids.values()), link.directory))
            return self._lost(link, self.spec.ssh.explain(code, link.said(), link.ready))
        sweep.clean(list(link.pids.values()), link.directory)
        reason = "its agent ended unexpectedly" + (f": {how_it_ended(code)}" if code is not None else "")
        link.over = True
        self._tell_death(link, None, f"host {link.name}: {reason}", True)
        if not self.outcome.code and not self._stopping:
            ended = f": {how_it_ended(code)}" if code is not None else ""
            self._fail(1, None, f"the agent on host {link.name} ended unexpectedly{ended}")

    def _credit(self, rank: int, amount: int) -> None:
        if amount:
            self._link_of[rank].send({"type": "credit", "bytes": amount})


def _is_consequence(error: str) -> bool:
    """Whether a rank failed because another did: what its last line of error output says."""
    return "PeerLostError" in error or "ShutdownError" in error


def _seconds(env: dict[str, str], name: str) -> float:
    """An option of the core as the ranks will read it."""
    default = next(row[2] for row in _core.OPTIONS if row[0] == name)
    try:
        return float(env.get(f"RONDE_{name}", env.get(f"HOROVOD_{name}", default)))
    except ValueError:
        return float(default)  # the ranks say what is wrong
