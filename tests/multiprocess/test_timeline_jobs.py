"""Timelines of whole jobs: a training run with a slow rank, ranks that are killed, paths that cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trace_format
from launching import python, run, run_command

TRAINING = """
import sys, time, torch
import ronde.torch as hvd
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1 + hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(30):
    if hvd.rank() == int(sys.argv[1]): time.sleep(0.01)
    optimizer.zero_grad()
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
hvd.shutdown()
"""


@pytest.mark.parametrize("slow", [0, 1])
def test_the_summary_of_a_training_run_names_the_slow_rank(tmp_path: Path, slow: int) -> None:
    pytest.importorskip("torch")
    flags = ["--timeline-filename", str(tmp_path / "t.json"), "--timeline-all-ranks", "--timeline-mark-cycles"]
    result = run("-np", "2", *flags, *python(TRAINING), str(slow), timeout=100)
    assert result.returncode == 0, result
    paths = [tmp_path / f"t.rank{rank}.json" for rank in range(2)]
    assert sorted(tmp_path.iterdir()) == paths
    for rank, path in enumerate(paths):
        events = trace_format.load(path)
        trace_format.check(events)
        assert {event["pid"] for event in events} == {rank}
        names = {event["name"] for event in events if event.get("cat") == "run"}
        assert sum(name.endswith((".weight", ".bias")) for name in names) >= 8  # parameters, gradients
        categories = {event["cat"] for event in events if event["ph"] != "M"}
        assert categories == {"negotiate", "queue", "run", "batch", "list", "phase", "wait", "cycle"}

    shown = run_command([sys.executable, "-m", "ronde", "timeline", *map(str, paths)])
    assert shown.returncode == 0, shown
    assert f"latest rank: rank {slow}, the last to be ready" in shown.stdout
    assert "29 steps" in shown.stdout and "gradient" in shown.stdout


KILLED = """
import os, signal, sys, threading, time
import numpy as np, ronde
ronde.init()
x = [np.ones(100, np.float32) for _ in range(20)]
for i in range(3): ronde.allreduce(x[0], name="warm")
if ronde.rank() == 0:
    threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
end = time.monotonic() + 30
while time.monotonic() < end:
    handles = [ronde.allreduce_async(each, name='t"%d' % i) for i, each in enumerate(x)]
    for handle in handles: ronde.synchronize(handle)
"""


@pytest.mark.parametrize("after", [0.0, 0.05, 0.26, 0.51, 1.03])
def test_a_killed_rank_leaves_a_whole_file(tmp_path: Path, after: float) -> None:
    path = tmp_path / "t.json"
    result = run("-np", "2", "--timeline-filename", str(path), *python(KILLED), str(after))
    assert result.returncode != 0 and "signal 9" in result.stderr + result.stdout, result
    events = trace_format.load(path)
    trace_format.check(events, ended=False)
    assert all(event["name"] != "ronde_end" for event in events)
    if after > 0.2:
        assert sum(event["name"] == 't"7' for event in events) > 12
    shown = run_command([sys.executable, "-m", "ronde", "timeline", str(path)])
    assert "the process was killed" in shown.stdout


def test_a_path_that_cannot_be_written_is_an_error_of_init(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "t.json"
    code = "import ronde\ntry: ronde.init()\nexcept ronde.RondeError as error: print('SAW', error, flush=True)"
    result = run("-np", "2", "--timeline-filename", str(path), *python(code))
    seen = [line for line in result.stdout.splitlines() if "SAW" in line]
    mine = [line for line in seen if line.startswith("[0]")]
    assert len(mine) == 1 and f"the timeline {path} cannot be written: No such file or directory" in mine[0], result


def test_dynamic_means_that_a_script_starts_it(tmp_path: Path) -> None:
    code = "import ronde; ronde.init(); ronde.start_timeline('t.json'); ronde.barrier(); ronde.shutdown()"
    result = run("-np", "1", "--timeline-filename", "DYNAMIC", *python(code), cwd=tmp_path)
    assert result.returncode == 0, result
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    trace_format.check(trace_format.load(tmp_path / "t.json"))
