"""ronderun as a user runs it: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launching import RONDERUN, python, run, run_command, wait_for


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


def test_a_directory_full_of_modules_confuses_nobody(tmp_path: Path) -> None:
    for name in ("queue", "selectors", "signal", "json", "numpy", "ronde", "frames"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    script = Path(sys.executable).parent / "ronderun"
    if not script.exists():
        pytest.skip("ronderun is not installed next to this Python")
    result = run_command([str(script), "-np", "1", "bash", "-c", "pwd"], cwd=tmp_path)
    assert result.returncode == 0 and result.stdout == f"[0]<stdout>:{tmp_path.resolve()}\n", result.stderr


def test_a_long_temporary_directory_is_no_problem(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    result = run(
        "-np", "2", *python("import ronde; ronde.init(); print(ronde.size())"), env={**os.environ, "TMPDIR": str(deep)}
    )
    assert result.returncode == 0 and result.stdout.count(":2") == 2, result.stderr


def test_any_bytes_in_arguments_and_environment_arrive() -> None:
    value = os.fsdecode(b"caf\xe9 \xff \n'\"")
    code = "import os, sys; print(ascii((os.environ['RONDE_X_TEST'], sys.argv[1])))"
    result = run("-np", "1", *python(code), value, env={**os.environ, "RONDE_X_TEST": value})
    assert result.stdout == f"[0]<stdout>:{(value, value)!a}\n", result.stderr


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


def test_a_reader_that_pauses_at_the_end_misses_nothing() -> None:
    # Sizes around what is under way when the credit is used up: the rank has ended, its last output is still in a pipe.
    counts = [((1 << 20) + more * 1024) // 64 for more in (50, 70, 90, 110)]
    launchers = [
        subprocess.Popen(
            [*RONDERUN, "-np", "1", *python(f"for i in range({count}): print(f'{{i:063d}}')")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for count in counts
    ]
    try:
        time.sleep(7)  # longer than what is left to the output of a job that failed
        for launcher, count in zip(launchers, counts):
            assert launcher.stdout is not None
            assert launcher.stdout.read().splitlines() == [f"[0]<stdout>:{i:063d}" for i in range(count)]
            assert launcher.wait(15) == 0
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()


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
        (["-np", "2", "--python"], 2, "--python"),
        (["-np", "1", "/no/such/program"], 127, "/no/such/program"),
        (["-np", "1", "/etc/hostname"], 126, "/etc/hostname"),
        (["-np", "1", "--min-np", "1", "true"], 2, "elastic training is not available"),
        (["-np", "1", "--no-such-flag", "true"], 2, "--no-such-flag"),
        (["-np", "1", "--output-filename", "/dev/null/x", "true"], 2, "--output-filename /dev/null/x"),
        (["-np", "1", "--fusion-threshold-mb", "much", "true"], 2, "--fusion-threshold-mb must be a number"),
    ],
)
def test_bad_calls_are_refused_and_named(arguments: list[str], code: int, text: str) -> None:
    result = run(*arguments)
    assert result.returncode == code, result.stderr
    assert text in result.stderr


def test_each_rank_gets_its_share_of_the_cores() -> None:
    show = python("import os; print(os.environ['OMP_NUM_THREADS'])")
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    cores = len(os.sched_getaffinity(0))
    assert run("-np", "1", *show, env=env).stdout == f"[0]<stdout>:{cores}\n"
    assert run("-np", "1", *show, env={**env, "OMP_NUM_THREADS": "3"}).stdout == "[0]<stdout>:3\n"


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


def test_hosts_from_a_file_give_the_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1:1\n")
    result = run("-hostfile", str(tmp_path / "hosts"), *python("import os; print(os.environ['RONDE_SIZE'])"))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{r}]<stdout>:3" for r in range(3)]


def test_version_and_check_build() -> None:
    import ronde

    assert run("--version").stdout.strip() == ronde.__version__
    report = run("--check-build").stdout
    assert "[X] host" in report and "looked for" in report


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


def end_on_one(code: int) -> str:
    import ronde as hvd

    hvd.init()
    if hvd.rank() == 1:
        os._exit(code)
    if code:
        hvd.barrier()
    return "done"


def test_run_names_the_rank_that_ended_without_a_result() -> None:
    import ronde

    with pytest.raises(RuntimeError, match="ended with code 0 without a result of rank 1"):
        ronde.run(end_on_one, (0,), np=2)
    with pytest.raises(RuntimeError, match="rank 1 on host .* exited with code 3"):
        ronde.run(end_on_one, (3,), np=3)


class OnlyThere:
    """Can be unpickled on a rank only."""

    def __reduce__(self) -> Any:
        return _only_there, ()


def _only_there() -> None:
    if "RONDE_RANK" not in os.environ:
        raise ValueError("not here")


def test_run_names_the_rank_whose_result_cannot_be_unpickled() -> None:
    import ronde

    with pytest.raises(RuntimeError, match="(?s)rank 1 failed.*unpickled here: ValueError: not here"):
        ronde.run(lambda: OnlyThere() if os.environ["RONDE_RANK"] == "1" else 0, np=2)


@pytest.mark.parametrize("np", ["x", 2.0, True])
def test_run_needs_a_whole_number_of_ranks(np: Any) -> None:
    import ronde

    with pytest.raises(TypeError, match=f"must be a whole number, not {np!r}"):
        ronde.run(print, np=np)


def test_run_from_a_thread_and_with_a_path_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ronde

    (tmp_path / "only_here.py").write_text(
        "import os\ndef f(x): return x + os.environ['WHO'] + os.environ['RONDE_RANK']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(ronde.run(only_here.f, ("me",), np=2, env={"WHO": "you"})))
    thread.start()
    thread.join(60)
    assert results == ["meyou0", "meyou1"]


def test_ctrl_c_in_run_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    code = (
        "import os, time, ronde\n"
        f"def f(): open({str(tmp_path)!r} + '/up', 'w'); time.sleep(1000)\n"
        "try: ronde.run(f, np=1)\n"
        "except KeyboardInterrupt: print('INTERRUPTED')\n"
    )
    program = subprocess.Popen(python(code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert wait_for(lambda: (tmp_path / "up").exists(), 30)
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=20)[0] == "INTERRUPTED\n"
    finally:
        if program.poll() is None:
            program.kill()
