"""How a job under ronderun ends: failures, signals, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from launching import RONDERUN, lives, pids_in, python, run, wait_for


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_outlives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RONDE_RANK'], 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(1000)"
    )
    # These tests may run under nohup, whose launcher would rightly ignore a hangup.
    command = ["env", "--default-signal=HUP", *RONDERUN, "-np", "2", *python(code)]
    launcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        pids = pids_in(tmp_path, 2)
        assert all(lives(pid) for pid in pids)
        launcher.send_signal(number)
        launcher.wait(12)
        assert wait_for(lambda: not any(lives(pid) for pid in pids), 10)
        if number != signal.SIGKILL:
            assert launcher.returncode == 128 + number
    finally:
        if launcher.poll() is None:
            launcher.kill()


def test_what_ignores_term_and_hides_in_sessions_ends_too(tmp_path: Path) -> None:
    # Each of three generations in a session of its own; none ends by TERM.
    code = (
        "import os, signal, subprocess, sys, time\n"
        "for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\n"
        "depth = int(os.environ.get('DEPTH', '0'))\n"
        f"open({str(tmp_path)!r} + f'/{{depth}}', 'w').write(f'{{os.getpid()}} ')\n"
        "env = {**os.environ, 'DEPTH': str(depth + 1)}\n"
        "if depth < 2: subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=env, start_new_session=True)\n"
        "time.sleep(1000)"
    )
    launcher = subprocess.Popen([*RONDERUN, "-np", "1", *python(code)], stderr=subprocess.DEVNULL)
    try:
        pids = pids_in(tmp_path, 3)
        launcher.terminate()
        assert launcher.wait(10) == 128 + signal.SIGTERM
        assert not any(lives(pid) for pid in pids)
    finally:
        if launcher.poll() is None:
            launcher.kill()


def test_the_death_of_the_agent_ends_the_job_and_is_named(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"for n, pid in enumerate((os.getpid(), child.pid)): open({str(tmp_path)!r} + f'/{{n}}', 'w').write(f'{{pid}} ')\n"
        "time.sleep(1000)"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    launcher = subprocess.Popen(
        [*RONDERUN, "-np", "1", *python(code)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        pids = pids_in(tmp_path, 2)
        agent = psutil.Process(pids[0]).parent()
        assert agent is not None
        agent.kill()
        _, errors = launcher.communicate(timeout=20)
        assert wait_for(lambda: not any(lives(pid) for pid in pids), 2)
        assert launcher.returncode == 1
        lines = [line for line in errors.splitlines() if line.startswith("ronderun:")]
        assert len(lines) == 1 and "the agent on host" in lines[0] and "signal 9 (SIGKILL)" in lines[0]
        assert list(temporary.iterdir()) == []
    finally:
        if launcher.poll() is None:
            launcher.kill()


def test_a_launcher_under_nohup_survives_the_terminal(tmp_path: Path) -> None:
    flag = tmp_path / "go"
    code = f"import os, time\nopen({str(tmp_path)!r} + '/up', 'w')\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.05)"
    launcher = subprocess.Popen(["nohup", *RONDERUN, "-np", "1", *python(code)], stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: (tmp_path / "up").exists(), 20)
        launcher.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(1)
        flag.touch()
        assert launcher.wait(10) == 0
    finally:
        if launcher.poll() is None:
            launcher.kill()


def test_a_death_by_a_real_time_signal_is_told() -> None:
    result = run("-np", "1", "bash", "-c", "kill -40 $$")
    assert result.returncode == 168 and "was killed by signal 40" in result.stderr


def test_orphans_of_a_finished_job_are_ended(tmp_path: Path) -> None:
    code = f"import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); open({str(tmp_path)!r} + '/pid', 'w').write(str(p.pid))"
    result = run("-np", "1", *python(code))
    assert result.returncode == 0
    assert not lives(int((tmp_path / "pid").read_text()))


def test_a_worker_that_never_calls_init_is_named_at_the_start_timeout() -> None:
    code = "import os, time, ronde as hvd\nif os.environ['RONDE_RANK'] == '1': time.sleep(100)\nhvd.init()"
    start = time.monotonic()
    result = run("-np", "3", "--start-timeout", "2", *python(code))
    assert result.returncode != 0 and time.monotonic() - start < 15
    assert "rank 1 did not call init()" in result.stderr


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('boom')"])
def test_the_rank_that_failed_by_itself_is_blamed_not_those_that_it_left(end: str) -> None:
    code = (
        "import sys, numpy as np, ronde\n"
        "ronde.init()\n"
        "ronde.allreduce(np.ones(3))\n"
        f"if ronde.rank() == 2: {end}\n"
        "ronde.allreduce(np.ones(3))\n"
    )
    for _ in range(4):
        result = run("-np", "4", *python(code))
        assert result.returncode == (3 if "exit" in end else 1), result.stderr
        assert "ronderun: rank 2 on host" in result.stderr


@pytest.mark.parametrize("option", ["-np=99999999999", "-H=localhost:99999999999"])
def test_an_absurd_number_of_processes_is_refused_at_once(option: str) -> None:
    start = time.monotonic()
    result = run(*option.split("="), "true")
    assert result.returncode == 2 and "99999999999 processes: a job has at most" in result.stderr
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise ValueError('boom')"])
def test_a_rank_that_ends_before_init_is_named_at_once(end: str) -> None:
    code = (
        "import os, sys, time, ronde\n"
        f"if os.environ['RONDE_RANK'] == '1': {end}\n"
        "try: ronde.init()\n"
        "except ronde.PeerLostError as error: print('SAW', error); raise\n"
    )
    start = time.monotonic()
    result = run("-np", "3", *python(code))
    assert time.monotonic() - start < 15
    saw = [line for line in result.stdout.splitlines() if "SAW" in line]
    how = "exit code 0" if "exit" in end else "exit code 1: ValueError: boom"
    assert len(saw) == 2 and all(f"rank 1 did not call init() and has ended: {how}" in line for line in saw), result
    assert result.returncode == 1 and "rank 1" in result.stderr.split("ronderun: ")[-1], result.stderr


def test_a_rank_that_vanishes_with_code_0_is_told_as_such() -> None:
    code = (
        "import os, numpy as np, ronde\n"
        "ronde.init()\n"
        "if ronde.rank() == 1: os._exit(0)\n"
        "try: ronde.allreduce(np.ones(3))\n"
        "except ronde.PeerLostError as error: print('SAW', error)\n"
    )
    result = run("-np", "2", *python(code))
    assert "rank 1" in result.stdout and "exit code 0" in result.stdout, result


@pytest.mark.parametrize("before", ["too bad", ""])
@pytest.mark.parametrize(
    "warning",
    [
        "[ronde 2026-01-31 12:00:00.123456 rank 0 warning] an error may follow: PeerLostError",
        "I0000 00:00:1796274808.583474    7749 port.cc:153] oneDNN: you may see an error",
        "2026-01-31 12:00:00.123456: W tensorflow/core/x.cc:153] Error: not so bad",
    ],
)
def test_warnings_in_logs_are_not_quoted_as_the_last_error(before: str, warning: str) -> None:
    code = (
        f"import sys; print({before!r}, file=sys.stderr)\n"
        f"for _ in range(50): print({warning!r}, file=sys.stderr)\n"
        f"sys.stderr.write({warning!r}); sys.exit(3)"
    )
    result = run("-np", "1", *python(code))
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("ronderun:")]
    assert line.endswith(f"exited with code 3: {before}" if before else "exited with code 3"), line


def test_the_next_job_removes_the_directory_that_a_killed_launcher_and_agent_left(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    code = f"import os, time; open({str(tmp_path)!r} + '/0', 'w').write(f'{{os.getpid()}} '); time.sleep(1000)"
    launcher = subprocess.Popen([*RONDERUN, "-np", "1", *python(code)], env=env)
    try:
        (worker,) = pids_in(tmp_path, 1)
        agent = psutil.Process(worker).parent()
        assert agent is not None
        launcher.send_signal(signal.SIGSTOP)  # it must not clean up between the two
        agent.kill()
    finally:
        launcher.kill()
        launcher.wait(10)
    assert wait_for(lambda: not lives(worker), 5)
    (left,) = temporary.iterdir()
    os.utime(left, (0, 0))
    assert run("-np", "1", "true", env=env).returncode == 0
    assert list(temporary.iterdir()) == []
