"""What goes wrong on several hosts: everybody is told within a limit, one line says who, where and why, and nothing
is left anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bed import PORT, SCRIPT, Bed, Launcher, wait_for

# Trains for ever, each rank with a child that ignores TERM, and says when it is under way.
TRAIN = """
import os, subprocess, sys, numpy as np, ronde as hvd
subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 987"])
hvd.init()
for step in range(10 ** 9):
    hvd.allreduce(np.ones(1000) * hvd.rank(), op=hvd.Sum, name="gradient")
    if step == 10: open(sys.argv[1] + f"/{hvd.rank()}", "w").write(f"{os.getpid()} ")
"""
HOSTS = ("-np", "4", "-H", "h1:2,h2:2")
LIMIT = 4.0  # --gloo-timeout-seconds, where silence is to be noticed


class Training:
    """A job on h1 and h2, started from `launcher`, that is in the middle of its steps."""

    def __init__(self, bed: Bed, folder: Path, launcher: str = "h1", *options: str) -> None:
        self.job: Launcher = bed.start(launcher, *options, *HOSTS, sys.executable, "-c", TRAIN, str(folder))
        files = [folder / str(rank) for rank in range(4)]
        ready = wait_for(lambda: all(file.exists() and file.read_text().endswith(" ") for file in files), 30)
        assert ready, self.job.process.poll()
        self.pids = [int(file.read_text()) for file in files]

    def agent(self, rank: int) -> psutil.Process:
        parent = psutil.Process(self.pids[rank]).parent()
        assert parent is not None
        return parent


def report(what: str, seconds: float, summary: str) -> None:
    print(f"\n{what}: {seconds:.1f} s: {summary}")


@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_that_is_killed(bed: Bed, tmp_path: Path, victim: int) -> None:
    training = Training(bed, tmp_path)
    os.kill(training.pids[victim], signal.SIGKILL)
    done = training.job.end(15)
    report(f"worker {victim} killed", done.seconds, done.summary)
    host = "h1" if victim < 2 else "h2"
    assert done.code == 137
    assert done.summary == f"ronderun: rank {victim} on host {host} was killed by signal 9 (SIGKILL)"
    # Survivors on both hosts say who it was and how it ended.
    for rank in {0, 1, 2, 3} - {victim}:
        assert f"[{rank}]<stderr>:" in done.err
    assert f"rank {victim} (host {host}) died: signal 9 (SIGKILL)" in done.err
    bed.assert_empty()


def test_a_host_whose_processes_are_all_killed(bed: Bed, tmp_path: Path) -> None:
    training = Training(bed, tmp_path)
    bed.call("kill", "h2")
    done = training.job.end(15)
    report("host killed", done.seconds, done.summary)
    assert done.code == 1
    assert "host h2 (ranks 2, 3) was lost while the job ran" in done.summary
    assert "PeerLostError" in done.err
    bed.assert_empty(files=False)  # the next agent on h2 removes what is left there


@pytest.mark.parametrize("launcher", ["h1", "h3"])
def test_a_cable_that_is_cut(bed: Bed, tmp_path: Path, launcher: str) -> None:
    training = Training(bed, tmp_path, launcher, "--gloo-timeout-seconds", str(LIMIT))
    bed.call("cut", "h2")
    done = training.job.end(LIMIT + 12)
    report(f"cable cut, launcher on {launcher}", done.seconds, done.summary)
    assert done.code == 1
    assert "host h2 (ranks 2, 3) was lost while the job ran" in done.summary
    # On the host that is cut off, too.
    bed.assert_empty(LIMIT + 12)


def test_a_cable_that_is_cut_from_ranks_that_do_not_talk(bed: Bed, tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path)!r} + '/' + os.environ['RONDE_RANK'], 'w'); time.sleep(987)"
    job = bed.start("h1", "--gloo-timeout-seconds", str(LIMIT), "-H", "h1:1,h2:1", sys.executable, "-c", code)
    assert wait_for(lambda: len(list(tmp_path.iterdir())) == 2, 20)
    bed.call("cut", "h2")
    done = job.end(LIMIT + 12)
    report("cable cut, silent ranks", done.seconds, done.summary)
    assert done.code == 1 and "host h2 (rank 1) was lost" in done.summary
    bed.assert_empty(LIMIT + 12)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_agent_that_is_killed(bed: Bed, tmp_path: Path, rank: int) -> None:
    training = Training(bed, tmp_path)
    training.agent(rank).kill()
    done = training.job.end(15)
    report(f"agent of rank {rank} killed", done.seconds, done.summary)
    assert done.code == 1 and ("host h1" if rank == 0 else "host h2") in done.summary
    assert "agent" in done.summary
    bed.assert_empty()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("launcher", ["h1", "h3"])
def test_a_launcher_that_is_ended(bed: Bed, tmp_path: Path, number: signal.Signals, launcher: str) -> None:
    training = Training(bed, tmp_path, launcher)
    training.job.process.send_signal(number)
    done = training.job.end(15)
    assert done.code == (-9 if number == signal.SIGKILL else 128 + number)
    start = time.monotonic()
    bed.assert_empty(10)
    report(f"launcher on {launcher} ended by {number.name}", done.seconds + time.monotonic() - start, "nothing left")


def test_two_jobs_on_the_same_hosts_at_once(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    training = Training(bed, tmp_path / "long")
    code = "import numpy as np, ronde; ronde.init(); print(ronde.allreduce(np.ones(3), op=ronde.Sum).tolist())"
    for _ in range(2):
        other = bed.run("h2", *HOSTS, sys.executable, "-c", code, seconds=30)
        assert other.code == 0 and other.out.count("[4.0, 4.0, 4.0]") == 4, other.err
    assert training.job.process.poll() is None and all(psutil.pid_exists(pid) for pid in training.pids)
    training.job.process.terminate()
    training.job.end(15)
    bed.assert_empty()


# ---- Before anything runs ----


def refused(bed: Bed, *arguments: str, seconds: float, **options: str) -> str:
    done = bed.run("h1", *arguments, "true", seconds=seconds, **options)
    report("start", done.seconds, done.summary)
    assert done.code == 1
    bed.assert_empty()
    return done.summary


def test_a_host_that_cannot_be_reached(bed: Bed) -> None:
    bed.call("cut", "h3")
    summary = refused(bed, "--start-timeout", "5", "-H", "h1:1,h2:1,h3:1", seconds=7)
    assert "host h3" in summary and ("ssh cannot connect" in summary or "did not answer to ssh within 5 s" in summary)


def test_a_port_that_is_closed(bed: Bed) -> None:
    summary = refused(bed, "-p", "1", "-H", "h1:1,h2:1", seconds=7)
    assert "host h2: ssh cannot connect" in summary and "port 1: Connection refused" in summary


def test_a_wrong_key(bed: Bed, tmp_path: Path) -> None:
    fake = tmp_path / "ssh"
    fake.write_text(
        '#!/bin/sh\nPATH=${PATH#*:}; exec ssh -o IdentityFile=none -o IdentityAgent=none -F /dev/null "$@"\n'
    )
    fake.write_text(
        fake.read_text().replace('"$@"', '-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"')
    )
    fake.chmod(0o755)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=20)
    path = f"{tmp_path}:{os.environ['PATH']}"
    summary = refused(bed, "-i", str(key), "-H", "h1:1,h2:1", seconds=10, PATH=path)
    assert "host h2: ssh cannot connect" in summary and "Permission denied (publickey" in summary


SILENT = """
import socket, time
server = socket.create_server(("0.0.0.0", 12346))
print("up", flush=True)
kept = []
while True: kept.append(server.accept())
"""


def test_an_sshd_that_accepts_and_says_nothing(bed: Bed) -> None:
    silent = subprocess.Popen(
        [str(SCRIPT), "exec", "h2", sys.executable, "-c", SILENT], stdout=subprocess.PIPE, text=True
    )
    try:
        assert silent.stdout is not None and silent.stdout.readline() == "up\n"
        start = time.monotonic()
        done = bed.run("h1", "-p", "12346", "--start-timeout", "5", "-H", "h1:1,h2:1", "true", seconds=7)
        report("silent sshd", time.monotonic() - start, done.summary)
        assert done.code == 1
        assert "host h2" in done.summary and ("ssh" in done.summary)
    finally:
        silent.kill()
        silent.communicate(timeout=10)
    bed.assert_empty()


def test_a_shell_that_starts_nothing(bed: Bed, tmp_path: Path) -> None:
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\necho reading your mail; exec sleep 987\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    summary = refused(bed, "--start-timeout", "3", "-H", "h1:1,h2:1", seconds=6, PATH=path)
    assert summary == "ronderun: host h2 did not answer to ssh within 3 s"


def test_a_machine_that_is_named_twice(bed: Bed) -> None:
    summary = refused(bed, "-H", "h2:1,10.77.0.2:1", seconds=10)
    assert summary == "ronderun: hosts 10.77.0.2 and h2 are the same machine: name it once, with all slots"


def test_one_host_that_is_refused_beside_one_that_is_silent(bed: Bed) -> None:
    bed.call("cut", "h3")
    summary = refused(bed, "--python", "/no/such/python", "-H", "h2:1,h3:1", seconds=6)
    assert "host h2: the Python interpreter /no/such/python" in summary


def test_a_host_name_that_does_not_resolve(bed: Bed) -> None:
    summary = refused(bed, "-H", "h1:1,no-such-host.invalid:1", seconds=30)
    assert "host no-such-host.invalid: ssh cannot connect" in summary and "Could not resolve hostname" in summary


def test_a_python_that_is_missing_there(bed: Bed) -> None:
    summary = refused(bed, "--python", "/no/such/python", "-H", "h1:1,h2:1", seconds=10)
    assert "host h2: the Python interpreter /no/such/python cannot be started there" in summary


def test_a_ronde_that_is_missing_there(bed: Bed, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=60)
    python = str(tmp_path / "bare" / "bin" / "python")
    summary = refused(bed, "--python", python, "-H", "h1:1,h2:1", seconds=10)
    assert f"host h2: ronde is not installed for {python} there" in summary


def test_a_directory_that_is_missing_there(bed: Bed) -> None:
    # /run is each host's own.
    command = f"mkdir /run/mine; cd /run/mine; exec {sys.executable} -m ronde.launcher -p {PORT} -H h1:1,h2:1 sleep 987"
    done = subprocess.run([str(SCRIPT), "exec", "h1", "sh", "-c", command], capture_output=True, text=True, timeout=15)
    subprocess.run([str(SCRIPT), "exec", "h1", "rmdir", "/run/mine"], timeout=10)
    assert done.returncode == 1
    assert done.stderr == "ronderun: host h2: there is no directory /run/mine, the job's working directory\n"
    bed.assert_empty()


def test_a_program_that_is_missing_there(bed: Bed, tmp_path: Path) -> None:
    subprocess.run([str(SCRIPT), "exec", "h1", "cp", "/bin/sleep", "/run/only-here"], check=True, timeout=10)
    done = bed.run("h1", "-H", "h1:1,h2:1", "/run/only-here", "987", seconds=15)
    assert done.code == 127 and "cannot start '/run/only-here'" in done.summary and "host h2" in done.summary
    bed.assert_empty()


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 1), ("sys.exit(5)", 5), ("raise ValueError('boom')", 1)])
def test_a_worker_that_ends_before_init(bed: Bed, end: str, code: int) -> None:
    script = f"import os, sys, numpy as np, ronde\nif os.environ['RONDE_RANK'] == '3': {end}\nronde.init()"
    done = bed.run("h1", *HOSTS, sys.executable, "-c", script, seconds=15)
    report(f"{end} before init", done.seconds, done.summary)
    assert done.code == code
    assert done.err.count("rank 3 did not call init() and has ended:") >= 1
    if "exit(0)" not in end:
        assert "rank 3 on host h2 exited with code" in done.summary
    bed.assert_empty()


def test_a_rank_that_never_calls_init(bed: Bed) -> None:
    script = "import os, time, ronde\nif os.environ['RONDE_RANK'] == '2': time.sleep(987)\nronde.init()"
    done = bed.run("h1", "--start-timeout", "6", *HOSTS, sys.executable, "-c", script, seconds=25)
    report("never init", done.seconds, done.summary)
    assert done.code == 1 and "rank 2 did not call init()" in done.err
    bed.assert_empty()


def test_strangers_are_refused_and_harm_nobody(bed: Bed, tmp_path: Path) -> None:
    """A port scanner on h3 talks nonsense to every port on which a rank of h2 listens."""
    training = Training(bed, tmp_path)
    ports = {
        connection.laddr.port
        for pid in training.pids[2:]
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    scan = (
        "import os, socket, sys\n"
        "for port in map(int, sys.argv[1:]):\n"
        "    for text in (b'', b'GET / HTTP/1.0\\r\\n\\r\\n', os.urandom(5000), b'\\xff' * 64):\n"
        "        with socket.create_connection(('h2', port), 5) as s: s.sendall(text)\n"
    )
    if ports:
        scanned = [str(SCRIPT), "exec", "h3", sys.executable, "-c", scan, *map(str, ports)]
        subprocess.run(scanned, check=True, timeout=30)
    time.sleep(1)
    assert training.job.process.poll() is None
    training.job.process.terminate()
    training.job.end(15)
    bed.assert_empty()
