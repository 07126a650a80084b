"""ronderun as a user runs it: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

RONDERUN = [sys.executable, "-m", "ronde.launcher"]


def run(*arguments: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RONDERUN, *arguments], capture_output=True, text=True, timeout=timeout, **options)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_each_rank_learns_who_it_is_and_lines_carry_the_rank() -> None:
    result = run(
        "-np", "3", *python("import os; print('I am', os.environ['RONDE_RANK'], 'of', os.environ['RONDE_SIZE'])")
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{r}]<stdout>:I am {r} of 3" for r in range(3)]


def test_collectives_work_under_it() -> None:
    code = (
        "import numpy as np, ronde as hvd; hvd.init();"
        "print(hvd.allreduce(np.arange(4.) * (hvd.rank() + 1), op=hvd.Sum).tolist(), hvd.local_rank(), hvd.local_size())"
    )
    result = run("-np", "4", *python(code))
    assert result.returncode == 0, result.stderr
    expected = [f"[{r}]<stdout>:[0.0, 10.0, 20.0, 30.0] {r} 4" for r in range(4)]
    assert sorted(result.stdout.splitlines()) == expected


def test_the_first_failure_ends_the_job_with_its_code_and_one_line() -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['RONDE_RANK'] == '2': print('SomeError: too bad', file=sys.stderr); sys.exit(3)\n"
        "time.sleep(120)"
    )
    start = time.monotonic()
    result = run("-np", "4", *python(code))
    assert result.returncode == 3
    assert time.monotonic() - start < 9
    lines = [line for line in result.stderr.splitlines() if line.startswith("ronderun:")]
    assert len(lines) == 1 and "rank 2 on host" in lines[0] and "code 3: SomeError: too bad" in lines[0]


def test_a_rank_that_exits_zero_leaves_the_others_alone() -> None:
    code = "import os, time; time.sleep(1.0 * (os.environ['RONDE_RANK'] == '1')); print('end')"
    result = run("-np", "2", *python(code))
    assert result.returncode == 0 and result.stdout.count("end") == 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_survivors_and_the_launcher(victim: int) -> None:
    code = (
        "import os, time, signal, numpy as np, ronde as hvd\n"
        "hvd.init()\n"
        "for step in range(100000):\n"
        f"    if step == 20 and hvd.rank() == {victim}:\n"
        "        print('DIES', time.time(), flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    try: hvd.allreduce(np.ones(100000), name='x')\n"
        "    except hvd.RondeError as error:\n"
        "        print('SAW', time.time(), error, flush=True); raise\n"
    )
    before = set(os.listdir("/dev/shm"))
    result = run("-np", "3", *python(code))
    assert result.returncode == 128 + 9
    died = next(float(line.split()[1]) for line in result.stdout.splitlines() if "DIES" in line)
    saw = [line for line in result.stdout.splitlines() if "SAW" in line]
    assert len(saw) == 2
    for line in saw:
        assert f"rank {victim}" in line and "signal 9" in line, line
        assert float(line.split("SAW ")[1].split()[0]) - died < 1.0
    assert f"rank {victim} on host" in result.stderr and "signal 9 (SIGKILL)" in result.stderr
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("ronde")]


def test_an_exception_reaches_the_other_ranks() -> None:
    code = (
        "import numpy as np, ronde as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: raise ValueError('boom')\n"
        "try: hvd.allreduce(np.ones(3), name='x')\n"
        "except hvd.RondeError as error: print('SAW', error)\n"
    )
    result = run("-np", "2", *python(code))
    assert result.returncode == 1
    assert "SAW" in result.stdout and "rank 1" in result.stdout and "ValueError: boom" in result.stdout
    assert "rank 1 on host" in result.stderr and "ValueError: boom" in result.stderr


def _wait_for(condition: Any, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_outlives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RONDE_RANK'], 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(1000)"
    )
    launcher = subprocess.Popen([*RONDERUN, "-np", "2", *python(code)], stderr=subprocess.DEVNULL)
    try:
        assert _wait_for(
            lambda: all(
                (tmp_path / str(r)).exists() and len((tmp_path / str(r)).read_text().split()) == 2 for r in range(2)
            ),
            20,
        )
        pids = [int(pid) for r in range(2) for pid in (tmp_path / str(r)).read_text().split()]
        assert all(psutil.pid_exists(pid) for pid in pids)
        launcher.send_signal(number)
        launcher.wait(12)
        assert _wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10)
        if number != signal.SIGKILL:
            assert launcher.returncode == 128 + number
    finally:
        if launcher.poll() is None:
            launcher.kill()


def test_orphans_of_a_finished_job_are_ended(tmp_path: Path) -> None:
    code = f"import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); open({str(tmp_path)!r} + '/pid', 'w').write(str(p.pid))"
    result = run("-np", "1", *python(code))
    assert result.returncode == 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_long_and_half_lines_and_progress_bars_stay_whole() -> None:
    code = (
        "import os, sys\n"
        "r = os.environ['RONDE_RANK']\n"
        "for i in range(5): sys.stdout.write(r * 1000000 + '\\n')\n"
        "for i in range(3): sys.stderr.write(f'\\r{r}: {i}')\n"
        "sys.stdout.write('half' + r)"
    )
    result = subprocess.run([*RONDERUN, "-np", "2", *python(code)], capture_output=True, timeout=60)
    assert result.returncode == 0
    lines = result.stdout.decode().splitlines()
    for r in "01":
        assert lines.count(f"[{r}]<stdout>:" + r * 1000000) == 5
        assert lines.count(f"[{r}]<stdout>:half{r}") == 1
        assert f"[{r}]<stderr>:{r}: 2\n".encode() in result.stderr
    assert len(lines) == 12


def test_output_files(tmp_path: Path) -> None:
    result = run("-np", "2", "--output-filename", str(tmp_path), "bash", "-c", "echo out $RONDE_RANK; echo err >&2")
    assert result.returncode == 0 and result.stdout == ""
    assert (tmp_path / "rank.1" / "stdout").read_text() == "out 1\n"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "err\n"


def test_a_slow_reader_of_the_output_does_not_hold_up_the_end() -> None:
    code = "import os, sys, time\nif os.environ['RONDE_RANK'] == '1': time.sleep(0.5); sys.exit(5)\nwhile True: print('x' * 1000)"
    launcher = subprocess.Popen(
        [*RONDERUN, "-np", "2", *python(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(4)  # nobody reads
        assert launcher.stdout is not None
        while launcher.stdout.read(1 << 20):
            pass
        assert launcher.wait(15) == 5
    finally:
        if launcher.poll() is None:
            launcher.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["-np", "2"], 2, "no command"),
        (["-np", "0", "true"], 2, "at least 1"),
        (["-np", "3", "-H", "localhost:2", "true"], 2, "-np 3 asks for more processes than there are slots (2"),
        (["-H", "somewhere-else.invalid:2", "true"], 2, "'somewhere-else.invalid'"),
        (["-np", "1", "/no/such/program"], 127, "/no/such/program"),
        (["-np", "1", "/etc/hostname"], 126, "/etc/hostname"),
        (["-np", "1", "--min-np", "1", "true"], 2, "elastic training is not available"),
        (["-np", "1", "--fusion-threshold-mb", "much", "true"], 2, "--fusion-threshold-mb must be a number"),
    ],
)
def test_bad_calls_are_refused_and_named(arguments: list[str], code: int, text: str) -> None:
    result = run(*arguments)
    assert result.returncode == code, result.stderr
    assert text in result.stderr


def test_flags_and_the_config_file_reach_the_workers(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("params:\n  fusion-threshold-mb: 32\n  cycle-time-ms: 3\nlogging:\n  log-level: error\n")
    show = python(
        "import os; print({k: os.environ.get('RONDE_' + k) for k in ('FUSION_THRESHOLD', 'CYCLE_TIME', 'LOG_LEVEL')})"
    )
    result = run("-np", "1", "--config-file", str(config), "--fusion-threshold-mb", "1", *show)
    assert "'FUSION_THRESHOLD': '1048576', 'CYCLE_TIME': '3.0', 'LOG_LEVEL': 'error'" in result.stdout, result
    config.write_text("params:\n  no-such-thing: 32\n")
    result = run("-np", "1", "--config-file", str(config), "true")
    assert result.returncode == 2 and "no-such-thing" in result.stderr and str(config) in result.stderr


def test_version_and_check_build() -> None:
    import ronde

    assert run("--version").stdout.strip() == ronde.__version__
    report = run("--check-build").stdout
    assert "[X] host" in report and "looked for" in report


def test_a_worker_that_never_calls_init_is_named_at_the_start_timeout() -> None:
    code = "import os, time, ronde as hvd\nif os.environ['RONDE_RANK'] == '1': time.sleep(100)\nhvd.init()"
    start = time.monotonic()
    result = run("-np", "3", "--start-timeout", "2", *python(code))
    assert result.returncode != 0 and time.monotonic() - start < 15
    assert "1" in result.stderr.split("missing")[-1] and "missing" in result.stderr


def double_rank(offset: int) -> int:
    import ronde as hvd

    hvd.init()
    return hvd.rank() * 2 + offset


def fail_on_one() -> None:
    import ronde as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise KeyError("lost it")
    hvd.barrier()


def test_run_returns_results_by_rank() -> None:
    import ronde

    assert ronde.run(double_rank, args=(5,), np=3) == [5, 7, 9]
    big = ronde.run(lambda: b"x" * (20 << 20), num_proc=1)
    assert len(big[0]) == 20 << 20


def test_run_names_the_rank_that_raised() -> None:
    import ronde

    with pytest.raises(RuntimeError, match="(?s)rank 1 failed.*KeyError: 'lost it'"):
        ronde.run(fail_on_one, np=2)
