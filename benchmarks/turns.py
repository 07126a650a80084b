"""Measuring by turns in one run what cannot share a process: libraries with their own launchers, other programs.

A *group* is the processes of one launcher. Each rank connects to the driver (`serve`) and sleeps in a read until the
driver asks its group for something; one group works at a time, and before it does, all others are asleep. A *block* is
some calls in a row by one group, timed one by one. Going round the peers block by block, a disturbance or a change of
the machine's speed meets all of them alike, and ratios are taken within a round.

Standard library only: the ranks of other libraries run in environments that have neither torch nor ronde.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, Optional

SOCKET = "RONDE_BENCHMARK_SOCKET"
FEWEST, MOST = 3, 2000  # timed calls in a block
TRIALS = (3, 100)  # calls of the blocks that find out how many calls fit, the second one for what is short


class Failure(Exception):
    """A group that cannot go on, and why."""


# --- in a rank


def serve(rank: int, handlers: dict[str, Callable[..., Any]]) -> None:
    """Does what the driver asks, until it hangs up: a line with a handler's name and arguments, a line of answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        stream = connection.makefile("rw")

        def answer(what: dict[str, Any]) -> None:
            stream.write(json.dumps(what) + "\n")
            stream.flush()

        answer({"rank": rank, "pid": os.getpid()})
        for line in stream:
            question = json.loads(line)
            try:
                answer({"answer": handlers[question["do"]](**question["with"])})
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})


def is_rank() -> bool:
    return SOCKET in os.environ


def time_block(call: Callable[[], Any], barrier: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each call; the driver knows which of them only warm what others' blocks have cooled down."""
    barrier()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


# --- in the driver


class Link(NamedTuple):
    connection: socket.socket
    stream: Any  # its lines


class Group:
    """`np` ranks started by one command. It ends what it started, whatever happens."""

    def __init__(
        self, name: str, command: Sequence[str], np: int, folder: Path, environment: dict[str, str], timeout: float
    ):
        self.name, self.failure = name, ""
        self._log = folder / f"{name}.log"
        self._links: list[Link] = []
        address = str(folder / f"{name}.socket")
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("w") as log:
            listener.bind(address)
            listener.listen(np)
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment, SOCKET: address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self.pids = [self._process.pid]
            try:
                self._links = self._accept(listener, np, time.monotonic() + timeout)
            except Failure:
                self.close()
                raise

    def _accept(self, listener: socket.socket, np: int, deadline: float) -> list[Link]:
        links: list[Any] = [None] * np
        listener.settimeout(0.2)
        while None in links:
            if time.monotonic() > deadline:
                raise self._failed("did not start in time")
            if self._process.poll() is not None:
                raise self._failed(f"ended with code {self._process.returncode} at its start")
            try:
                connection, _ = listener.accept()
            except socket.timeout:
                continue
            link = Link(connection, connection.makefile("r"))
            hello = self._read(link, deadline)
            links[hello["rank"]] = link
            self.pids.append(hello["pid"])
        return links

    def _read(self, link: Link, deadline: float) -> Any:
        try:
            link.connection.settimeout(max(0.1, deadline - time.monotonic()))
            line = link.stream.readline()
        except socket.timeout:
            raise self._failed("gave no answer in time") from None
        except OSError as error:
            raise self._failed(str(error)) from None
        if not line:
            raise self._failed("died")
        return json.loads(line)

    def _failed(self, what: str) -> Failure:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        self.failure = f"{self.name} {what}" + (f" ({lines[-1].strip()[:200]})" if lines else "")
        return Failure(self.failure)

    def ask(self, do: str, timeout: float, **arguments: Any) -> list[Any]:
        """The answers of all ranks; after a failure the group is closed."""
        if self.failure:
            raise Failure(self.failure)
        try:
            for link in self._links:
                link.connection.sendall((json.dumps({"do": do, "with": arguments}) + "\n").encode())
            deadline = time.monotonic() + timeout
            answers = [self._read(link, deadline) for link in self._links]
            errors = [f"{answer['error']} on rank {r}" for r, answer in enumerate(answers) if "error" in answer]
            if errors:
                raise self._failed("failed: " + errors[0])
        except (Failure, OSError) as error:
            self.failure = self.failure or f"{self.name} died ({error})"
            self.close()
            raise Failure(self.failure) from None
        return [answer["answer"] for answer in answers]

    def close(self) -> None:
        """Hangs up, so that the ranks end by themselves; those that do not are ended."""
        for link in self._links:
            link.stream.close()
            link.connection.close()
        self._links = []
        for wait, number in ((0.0 if self.failure else 10.0, signal.SIGTERM), (5.0, signal.SIGKILL)):
            try:
                self._process.wait(wait)
                return
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, number)
        self._process.wait()


def running(pids: Sequence[int]) -> bool:
    """Whether any thread of these processes is on a processor or wants one."""
    for pid in pids:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                if (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                    return True
        except OSError:
            pass  # it has ended
    return False


def wait_asleep(groups: Sequence[Any], timeout: float = 1.0) -> bool:
    """Waits until these groups sleep: seen twice, a millisecond apart."""
    pids = [pid for group in groups for pid in group.pids]
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not running(pids):
            time.sleep(1e-3)
            if not running(pids):
                return True
        time.sleep(1e-3)
    return False


class Peer:
    """What one column of a table holds: `kind` as its group knows it, and the medians of its blocks by round."""

    def __init__(self, label: str, group: Any, kind: str, most: int = MOST):
        self.label, self.group, self.kind, self._most = label, group, kind, most
        self.calls = 0
        self.rounds: list[float] = []
        self.firsts: list[float] = []
        self.failure = ""

    def block(self, calls: int, timeout: float) -> list[float]:
        """Seconds of each call, the mean of the ranks that take part."""
        answers = self.group.ask("block", timeout, peer=self.kind, calls=calls)
        return [mean(times) for times in zip(*[times for times in answers if times])]

    def choose_calls(self, trial: Sequence[float], seconds: float) -> None:
        """As many timed calls as fit. By the fastest of the trial: processes that slept may take a while to run well."""
        self.calls = min(self._most, max(FEWEST, int(seconds / max(min(trial), 1e-7))))

    @property
    def warm_up(self) -> int:
        """Calls of a block that are not timed: processes that slept find their processors and caches."""
        return 1 + self.calls // 4

    def take(self, times: Sequence[float]) -> None:
        self.firsts.append(times[0])
        self.rounds.append(median(times[self.warm_up :]))


def measure(peers: Sequence[Peer], groups: Sequence[Any], seconds: float, rounds: int, timeout: float = 60.0) -> int:
    """Fills the peers' rounds, `seconds` of calls for each in all. Returns how often a group did not go to sleep.

    Every second round goes the other way, so that nobody always follows the same."""
    awake = 0

    def turn(peer: Peer, calls: int) -> list[float]:
        nonlocal awake
        awake += not wait_asleep([group for group in groups if group is not peer.group and not group.failure])
        try:
            return peer.block(calls, timeout)
        except Failure as failure:
            peer.failure = str(failure)
            return []

    for calls in TRIALS:
        for peer in peers:
            if not peer.failure and (not peer.calls or peer.calls >= calls):
                trial = turn(peer, calls)
                if trial:
                    peer.choose_calls(trial, seconds / rounds)
    for number in range(rounds):
        for peer in peers if number % 2 == 0 else reversed(peers):
            if not peer.failure:
                times = turn(peer, peer.warm_up + peer.calls)
                if times:
                    peer.take(times)
    return awake


def summary(peer: Peer) -> dict[str, Any]:
    """Median seconds over rounds, half the distance between the quartiles relative to it, the first call of a block."""
    ordered = sorted(peer.rounds)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4 - (len(ordered) % 4 == 0)]
    middle = median(ordered)
    return {
        "seconds": middle,
        "spread": (high - low) / 2 / middle,
        "first": median(peer.firsts),
        "rounds": peer.rounds,
        "calls": peer.calls,
    }


class Run:
    """The groups of one run: started one after another, measured by turns, ended with it."""

    def __init__(self, seconds: float, rounds: int, timeout: float = 60.0):
        """Each peer measures a case for `seconds` in `rounds` blocks; a block may take `timeout`."""
        self._seconds, self._rounds, self._timeout = seconds, rounds, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="ronde-bench-")
        self.folder = Path(self._folder.name)  # what ranks share
        self.groups: list[Any] = []
        self.missing: dict[str, str] = {}  # by label: why there are no numbers
        self.awake = 0  # blocks that began while another group was not asleep

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: Any) -> None:
        for group in self.groups:
            group.close()
        self._folder.cleanup()

    def add(self, name: str, start: Callable[[], Any]) -> None:
        try:
            self.groups.append(start())
        except Failure as failure:
            self.missing[name] = str(failure)

    def ask(self, group: Any, do: str, **arguments: Any) -> list[Any]:
        """Answers of a group's ranks while the others sleep; [] when it failed, which is noted."""
        wait_asleep([other for other in self.groups if other is not group])
        try:
            return list(group.ask(do, self._timeout, **arguments))
        except Failure as failure:
            self.missing[group.name] = str(failure)
            return []

    def case(
        self,
        case: dict[str, Any],
        label: Callable[[str, str], str],
        special: Optional[dict[str, dict[str, Any]]] = None,
    ) -> dict[str, Any]:
        """{label: summary} of one case. Groups say what of it they can call; `label` names it by group and kind.

        `special` has the case of groups, by name, that are to do something else."""
        peers = []
        for group in self.groups:
            offered = self.ask(group, "prepare", case=(special or {}).get(group.name, case))
            if offered:
                self.missing.update(offered[0]["missing"])
                most = offered[0].get("most", {})  # timed calls a block may have
                peers += [
                    Peer(label(group.name, kind), group, kind, most.get(kind, MOST)) for kind in offered[0]["peers"]
                ]
        self.awake += measure(peers, self.groups, self._seconds, self._rounds, self._timeout)
        self.missing.update({peer.label: peer.failure for peer in peers if peer.failure})
        return {peer.label: summary(peer) for peer in peers if peer.rounds and not peer.failure}


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Median of the ratios within rounds: what slows a whole round down cancels out."""
    return median(a / b for a, b in zip(one, other))
