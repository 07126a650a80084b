"""Timelines and metrics of ranks, and what `ronde timeline` makes of a file."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import trace_format

import ronde
from ronde._command import main
from ronde._timeline.summary import find_late, find_steps, summarise
from ronde._timeline.trace import TraceError, read

# ---- On ranks ----


@pytest.mark.ranks(2)
def test_metrics_count_operations_bytes_and_time() -> None:
    before = ronde.metrics()
    assert before["operations"] == before["bytes"] == before["failed"] == before["stalls"] == 0
    for i in range(10):
        if ronde.rank() == 1:
            time.sleep(0.005)
        ronde.allreduce(np.full(1000, i, np.float32), name="x")
    ronde.allgather(np.ones((2 + ronde.rank(), 3), np.int64))
    with pytest.raises(ronde.MismatchError):
        ronde.broadcast(np.ones(2 + ronde.rank()), 0, name="wrong")
    ronde.barrier()
    now = ronde.metrics()
    assert now["operations"] == 13 and now["failed"] == 1
    assert now["tensors"] == now["lists"] == 11 and now["batches"] == 13
    assert now["ops"]["allreduce"] == {"operations": 10, "tensors": 10, "lists": 10, "bytes": 40_000, "lent": 0}
    assert now["ops"]["allgather"]["bytes"] == (2 + ronde.rank()) * 24
    assert now["ops"]["broadcast"] == {"operations": 1, "tensors": 0, "lists": 0, "bytes": 0, "lent": 0}
    assert now["ops"]["barrier"] == {"operations": 1}
    assert now["bytes"] == 40_000 + (2 + ronde.rank()) * 24
    assert now["cache"] == {"hits": 9, "misses": 4}
    seconds = now["seconds"]
    assert set(seconds) == {"negotiate", "queue", "run", "pack", "network", "reduce", "unpack"}
    assert all(value > 0 for value in seconds.values())
    assert sum(seconds[phase] for phase in ("pack", "network", "reduce", "unpack")) <= seconds["run"]
    if ronde.rank() == 0:  # which waits for the other one's sleep
        assert 0.03 < seconds["negotiate"] < 5


@pytest.mark.ranks(1, init=False)
def test_before_init_there_is_neither() -> None:
    for call in (ronde.metrics, ronde.stop_timeline, lambda: ronde.start_timeline("t.json")):
        with pytest.raises(ValueError, match=r"init\(\)"):
            call()
    ronde.init()
    ronde.allreduce(np.ones(3))
    assert ronde.metrics()["operations"] == 1
    ronde.shutdown()
    ronde.init()
    assert ronde.metrics()["operations"] == 0


@pytest.mark.ranks(2, env={"RONDE_TIMELINE_ALL_RANKS": "1"})
def test_start_and_stop_twice_and_from_threads(tmp_path: Path) -> None:
    def file(name: str) -> Path:
        return tmp_path / f"{name}.rank{ronde.rank()}.json"

    ronde.stop_timeline()  # of none
    with pytest.raises(ValueError, match="missing/t.rank. cannot be written: No such file"):
        ronde.start_timeline(f"{tmp_path}/missing/t")
    ronde.start_timeline(tmp_path / "a.json", mark_cycles=True)
    with pytest.raises(ValueError, match="a.rank..json already"):
        ronde.start_timeline(tmp_path / "b.json")
    ronde.allreduce(np.ones(3), name='odd "name"\n\\ é')
    ronde.stop_timeline()
    ronde.stop_timeline()
    events = trace_format.load(file("a"))
    trace_format.check(events)
    assert sum(event["name"] == 'odd "name"\n\\ é' for event in events) == 6
    assert any(event["ph"] == "i" and event["name"] == "cycle" for event in events)

    # Threads that start and stop while others reduce.
    stop = threading.Event()
    errors: list[BaseException] = []

    def toggle(number: int) -> None:
        rounds = 0
        while not stop.is_set() or rounds < 5:
            rounds += 1
            try:
                ronde.start_timeline(f"{tmp_path}/{number}-{rounds % 3}.json")
                time.sleep(0.002)
                ronde.stop_timeline()
            except ronde.RondeError as error:
                if "already" not in str(error):
                    errors.append(error)

    threads = [threading.Thread(target=toggle, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for i in range(200):
        assert ronde.allreduce(np.full(50, i), op=ronde.Sum, name="x")[3] == 2 * i
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not errors
    ronde.stop_timeline()
    files = list(tmp_path.glob(f"?-?.rank{ronde.rank()}.json"))
    assert files
    for each in files:
        trace_format.check(trace_format.load(each))


@pytest.mark.ranks(2)
def test_without_the_option_rank_0_writes(tmp_path: Path) -> None:
    ronde.start_timeline(str(tmp_path / "t.json"))
    ronde.allreduce(np.ones(3), name="x")
    ronde.barrier()
    rank = ronde.rank()
    ronde.shutdown()  # ends it, too
    if rank == 0:
        trace_format.check(trace_format.load(tmp_path / "t.json"))
        assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.ranks(3, env={"RONDE_TIMELINE_ALL_RANKS": "1"})
def test_every_kind_of_operation_is_recorded(tmp_path: Path) -> None:
    ronde.start_timeline(tmp_path / "t.json")
    rank = ronde.rank()
    some = ronde.add_process_set([0, 2])
    ronde.grouped_allreduce([np.full(3 + i, rank, np.float32) for i in range(4)], name="group")
    ronde.allgather(np.ones((rank, 2)), name="gather")
    ronde.broadcast(np.full(7, rank), 1, name="broadcast")
    ronde.alltoall(np.arange(6), name="alltoall")
    ronde.reducescatter(np.arange(9), name="scatter")
    if some.included():
        ronde.allreduce(np.ones(200_000), process_set=some, name="set")
    ronde.barrier()
    with pytest.raises(ronde.MismatchError):
        ronde.allreduce(np.ones(3 + rank), name="wrong")
    ronde.join()
    ronde.stop_timeline()
    events = trace_format.load(tmp_path / f"t.rank{rank}.json")
    trace_format.check(events)
    runs = {event["name"]: event["args"]["op"] for event in events if event["ph"] == "b" and event["cat"] == "run"}
    expected = {f"group.{i}": "allreduce" for i in range(4)}
    expected.update(gather="allgather", broadcast="broadcast", alltoall="alltoall", scatter="reducescatter")
    if rank != 1:
        expected["set"] = "allreduce"
    assert runs == expected
    ends = {event["name"]: event["args"] for event in events if event["ph"] == "e" and event["cat"] == "negotiate"}
    assert ends["wrong"]["failed"] is True and "failed" not in ends["gather"]
    phases = {event["name"] for event in events if event.get("cat") == "phase"}
    assert phases == {"pack", "network", "reduce", "unpack"}


# ---- What a file says ----


class Writer:
    """A timeline with round times, in milliseconds."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        args = {"format": 1, "rank": rank, "size": size, "host": "h"}
        self.rank = rank
        self.events: list[dict[str, Any]] = [
            {"name": "ronde", "ph": "M", "pid": rank, "tid": 0, "args": args},
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": 1, "args": {"name": "execution"}},
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": 100, "args": {"name": "waiting"}},
        ]
        self.id = 0

    def complete(self, name: str, category: str, start: float, end: float) -> None:
        self._add(name, "X", category, start, dur=(end - start) * 1000, tid=100 if category == "wait" else 1)

    def asynchronous(self, name: str, category: str, start: float, end: Optional[float], **ready: float) -> None:
        self.id += 1
        self._add(name, "b", category, start, id=hex(self.id), args={"op": "allreduce"})
        for rank, time_ in ready.items():
            self._add(f"ready: {rank}", "n", category, time_, id=hex(self.id), args={"rank": int(rank[4:])})
        if end is not None:
            self._add(name, "e", category, end, id=hex(self.id), args={"op": "allreduce", "batch": 1})

    def _add(self, name: str, kind: str, category: str, time_: float, **fields: Any) -> None:
        event = {"name": name, "ph": kind, "cat": category, "ts": time_ * 1000, "pid": self.rank, "tid": 1}
        self.events.append({**event, **fields})

    def save(self, path: Path, ended: bool = True) -> str:
        end = {"name": "ronde_end", "ph": "M", "pid": self.rank, "tid": 0, "args": {"dropped": 0, "cut": False}}
        path.write_text(json.dumps(self.events + [end] * ended))
        return str(path)


def steps_of_100_ms(path: Path) -> str:
    """Four steps of a job: 10 ms until rank 1 is ready, 8 ms in which data moves, 6 of them while the program waits."""
    writer = Writer()
    for step in range(4):
        start = 100.0 * step
        writer.asynchronous("w", "negotiate", start, start + 10, rank0=start, rank1=start + 10)
        writer.asynchronous("other", "negotiate", start + 1, start + 10, rank0=start + 9.5, rank1=start + 9)
        writer.complete("list", "list", start + 10, start + 18)
        writer.complete("pack", "phase", start + 10, start + 11)
        writer.complete("network", "phase", start + 11, start + 18)
        writer.complete("allreduce 'w'", "wait", start + 5, start + 16)
        writer.asynchronous("w", "queue", start + 10, start + 10.5)
        writer.asynchronous("w", "run", start + 10, start + 18)
    return writer.save(path)


def test_a_step_is_taken_apart(tmp_path: Path) -> None:
    path = steps_of_100_ms(tmp_path / "t.json")
    trace_format.check(trace_format.load(tmp_path / "t.json"))
    summary = summarise([read(path)])
    rank = summary.ranks[0]
    assert (rank.steps.count, rank.steps.median) == (3, 100_000)
    shares = rank.shares
    assert shares.total == pytest.approx(300_000)
    assert shares.not_ready == pytest.approx(15_000)
    assert shares.exposed == pytest.approx(18_000)
    assert shares.overlapped == pytest.approx(6_000)
    assert shares.alone == pytest.approx(300_000 - 39_000)
    assert shares.overlap == pytest.approx(0.25)
    assert shares.phases == pytest.approx({"pack": 3_000, "network": 21_000})
    slowest = summary.tensors[0]
    assert (slowest.name, slowest.count) == ("w", 4)
    assert (slowest.negotiate, slowest.queue, slowest.run) == pytest.approx((10_000, 500, 8_000))
    late = find_late([read(path)])
    assert [(each.ranks, each.operations, each.of) for each in late] == [((1,), 4, 8), ((0,), 4, 8)]
    assert (late[0].total, late[0].most, late[1].most) == pytest.approx((40_000, 10_000, 500))


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = steps_of_100_ms(tmp_path / "t.json")
    assert main(["timeline", path, "--tensors", "1"]) == 0
    text = capsys.readouterr().out
    assert "3 steps, 100.0 ms each" in text
    assert "25.0% of it overlapped" in text
    assert "latest rank: rank 1, the last to be ready for 4 of 8 operations, by 10.0 ms on average" in text
    assert "of 2; means" in text and "  w\n" in text + "\n" and "  other" not in text


def test_a_record_that_does_not_end_says_what_it_waited_for(tmp_path: Path, capsys: Any) -> None:
    writer = Writer(size=3)
    writer.asynchronous("grad\n1", "negotiate", 1, None, rank0=1, rank2=3)
    assert main(["timeline", writer.save(tmp_path / "t.json", ended=False)]) == 0
    text = capsys.readouterr().out
    assert "the process was killed" in text
    assert "grad\\n1: ready on rank 0, 2" in text


def test_ranks_heard_of_together_are_named_together(tmp_path: Path) -> None:
    writer = Writer(size=4)
    for step in range(3):
        start = 10.0 * step
        writer.asynchronous("w", "negotiate", start, start + 5, rank0=start, rank1=start + 1, rank2=start + 4, rank3=start + 4)  # fmt: skip
    late = find_late([read(writer.save(tmp_path / "t.json"))])
    assert [each.ranks for each in late] == [(2, 3)]
    assert late[0].most == pytest.approx(3000)


def test_no_steps_without_repetition(tmp_path: Path, capsys: Any) -> None:
    writer = Writer(rank=1)
    writer.asynchronous("once", "negotiate", 0, 2, rank1=0)
    writer.complete("list", "list", 2, 4)
    path = writer.save(tmp_path / "t.json")
    assert find_steps(read(path)).count == 0
    assert main(["timeline", path]) == 0
    text = capsys.readouterr().out
    assert "no steps; all 4.000 ms" in text and "only rank 0's file" in text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        ("[{", "is not JSON"),
        ("3", "holds no list of events"),
        ("[]", "is no timeline of ronde's"),
        ('[{"name": "ronde", "ph": "M", "args": {}}]', "an event is not as ronde writes it"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, capsys: Any, content: Optional[str], why: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TraceError):
        read(str(path))
    assert main(["timeline", str(path)]) == 2
    error = capsys.readouterr().err
    assert why in error and str(path) in error


def test_two_files_of_one_rank_are_refused(tmp_path: Path, capsys: Any) -> None:
    paths = [steps_of_100_ms(tmp_path / name) for name in ("a.json", "b.json")]
    assert main(["timeline", *paths]) == 2
    assert "of one rank" in capsys.readouterr().err


def test_the_plot(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    path = steps_of_100_ms(tmp_path / "t.json")
    assert main(["timeline", path, "--plot", str(tmp_path / "t.png"), "--steps", "2"]) == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert main(["timeline", path, "--plot", str(tmp_path / "missing" / "t.png")]) == 2
    assert main(["timeline", path, "--plot", str(tmp_path / "t.strange")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_plot_says_what_it_needs(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = steps_of_100_ms(tmp_path / "t.json")
    assert main(["timeline", path, "--plot", str(tmp_path / "t.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
