"""The benchmarks run, print what they promise, and notice wrong sums, deaths and hangs. Their numbers play no part."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import checks  # noqa: E402
import report  # noqa: E402
import resnet50  # noqa: E402
import training  # noqa: E402
import turns  # noqa: E402

RANK = """
import os, sys, time
sys.path.insert(0, {folder!r})
import turns

def block(peer, calls):
    if peer == "dies":
        os._exit(3)
    if peer == "hangs":
        time.sleep(60)
    if peer == "raises":
        raise ValueError("no such luck")
    return turns.time_block(lambda: None, lambda: None, calls)

turns.serve(int(sys.argv[1]), {{"block": block}})
"""


def program(name: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["benchmark"] == name and result["quick"]
    assert result["machine"]["cores"] > 0 and 0 <= result["machine"]["others"]
    return result


def group(tmp_path: Path, name: str = "group", code: str = RANK) -> turns.Group:
    """One rank without any library."""
    script = tmp_path / f"{name}.py"
    script.write_text(code.format(folder=str(FOLDER)))
    return turns.Group(name, [sys.executable, str(script), "0"], 1, tmp_path, {}, 30)


def assert_positive(summary: dict[str, Any], rounds: int = 2) -> None:
    assert summary["seconds"] > 0 and len(summary["rounds"]) == rounds and min(summary["rounds"]) > 0


def test_allreduce(tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "allreduce.png"
    result = program("allreduce", "-np", "2", "--sizes", "4", "65536", "--plot", str(plot))
    (run,) = result["runs"]
    assert run["np"] == 2 and list(run["cases"]) == ["4 B", "64 KiB", "many"]
    for name in ("4 B", "64 KiB"):
        case = run["cases"][name]
        for peer in ("ronde", "gloo", "limit", "numpy"):
            assert_positive(case[peer])
        for peer in ("openmpi", "mpich"):
            assert peer in case or "bench-peers" in run["missing"][peer]
    goals = {(goal["what"], goal["goal"]): goal for goal in result["goals"]}
    measured = goals["64 KiB", "1/5 of gloo"]
    assert measured["verdict"] == ("ok" if measured["measured"] <= 0.2 else "missed")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_fusion() -> None:
    result = program("fusion")
    (case,) = result["cases"].values()
    assert set(case) == {"0", str(128 << 20), "gloo", "together"}
    for summary in case.values():
        assert_positive(summary)


def test_training() -> None:
    result = program("training", "--models", "cnn")
    case = result["cases"]["cnn"]
    assert {"ronde", "ddp", "ddp views", "compute", "alone", "ronde comm", "gloo comm"} <= set(case)
    for summary in case.values():
        assert_positive(summary)
    assert "ronde views" in case or "gradient_as_bucket_view" in result["missing"]["ronde views"]
    of_ranks = [rank["ronde"] for rank in result["weights"]["cnn"]]
    assert len(of_ranks) == 2 and len(set(of_ranks)) == 1
    assert [goal["verdict"] for goal in result["goals"] if "weights" in goal["what"]] == ["ok"]


def test_negotiation() -> None:
    result = program("negotiation", "-np", "2", "3")
    assert list(result["cases"]) == ["1", "100"] and not result["missing"]
    for count, case in result["cases"].items():
        assert set(case) == {f"{kind}, {np} ranks" for kind in ("first", "steady") for np in (2, 3)}
        for summary in case.values():
            assert_positive(summary)
            assert summary["us_per_request"] == pytest.approx(summary["seconds"] * 1e6 / int(count))


def test_parameter_server() -> None:
    result = program("parameter_server")
    assert set(result["results"]) == {f"{kind} 3" for kind in ("ronde", "ronde server", "gloo", "gloo server")}
    for summary in result["results"].values():
        assert_positive(summary)


def test_the_hidden_share_of_communication() -> None:
    def summary(seconds: float, spread: float = 0.01) -> dict[str, float]:
        return {"seconds": seconds, "spread": spread}

    case = {"ronde": summary(13.0), "compute": summary(10.0), "ronde comm": summary(4.0)}
    assert training.overlap(case, "ronde") == 0.25  # of 4 s, 3 are seen
    case["compute"] = summary(10.0, 0.3)
    assert training.overlap(case, "ronde") is None  # it says nothing when steps differ by more
    low, high = training.interval([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    assert 1.0 <= low < 2.5 < high <= 4.0


@pytest.mark.parametrize("wrong", ["value", "place"])
def test_a_wrong_sum_is_noticed(wrong: str) -> None:
    right = checks.values(5000, 0) + checks.values(5000, 1) + checks.values(5000, 2)
    checks.check_sum(right, 3, "me")
    if wrong == "value":
        right[4321] += 1
    else:
        right = np.roll(right, 1)
    with pytest.raises(checks.WrongSum, match=r"me: .* of 5000 sums are wrong"):
        checks.check_sum(right, 3, "me")


def test_a_group_that_dies_hangs_or_raises_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    groups = [group(tmp_path, name) for name in ("well", "dies", "hangs", "raises")]
    peers = [turns.Peer(one.name, one, one.name) for one in groups]
    try:
        start = time.monotonic()
        turns.measure(peers, groups, seconds=0.001, rounds=3, timeout=2)
        assert time.monotonic() - start < 20
    finally:
        for one in groups:
            one.close()
    failures = [peer.failure for peer in peers]
    assert failures[0] == "" and len(peers[0].rounds) == 3
    assert "dies died" in failures[1]
    assert "hangs gave no answer in time" in failures[2]
    assert "ValueError: no such luck on rank 0" in failures[3]
    with pytest.raises(turns.Failure, match="died"):
        groups[1].ask("block", 1, peer="well", calls=1)


def test_a_group_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(turns.Failure, match="bad ended with code 1 at its start .*nothing works"):
        group(tmp_path, "bad", "raise SystemExit('nothing works')")


def test_a_group_waits_asleep_for_its_turn(tmp_path: Path) -> None:
    one = group(tmp_path)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert turns.wait_asleep([one], 5)
        one.pids.append(busy.pid)
        assert not turns.wait_asleep([one], 0.2)
    finally:
        busy.kill()
        busy.wait()
        one.close()


def test_goals_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    goals = [
        report.Goal("a", "1/2 of b", 0.4, 0.5),
        report.Goal("b", "1/2 of b", 0.51, 0.5, note="2 us / 4 us"),
        report.Goal("c", "1/2 of b", None, 0.5, reason="nobody came"),
    ]
    report.print_goals(goals)
    lines = capsys.readouterr().out.strip().splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["ok", "us)", "came"]
    assert "FELL SHORT (2 us / 4 us)" in lines[1] and "not available: nobody came" in lines[2]


def test_ratios_are_taken_within_rounds() -> None:
    assert turns.ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == 0.5


def test_shapes_of_resnet50() -> None:
    shapes = resnet50.backward_shapes()
    assert len(shapes) == 161 and sum(map(resnet50.floats, shapes)) == 25_557_032
    buckets = resnet50.buckets(shapes)
    assert sum(buckets) == 25_557_032 and all(count * 4 >= 25 << 20 for count in buckets[1:-1])
