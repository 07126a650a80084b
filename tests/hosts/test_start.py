"""ronderun on several hosts: who is told what, and what travels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bed import PORT, SCRIPT, Bed, wait_for

SUM = """
import os, numpy as np, ronde as hvd
hvd.init()
mine = np.arange(5.) + 100 * (hvd.rank() + 1)
total = hvd.allreduce(mine, op=hvd.Sum)
n = hvd.size()
assert np.array_equal(total, n * np.arange(5.) + 100 * n * (n + 1) / 2), total
print(os.uname().nodename, os.environ["RONDE_HOSTNAME"], hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
"""


@pytest.mark.parametrize("launcher", ["h1", "h3"])
def test_ranks_of_two_hosts_meet_whether_the_launcher_is_one_of_them_or_not(bed: Bed, launcher: str) -> None:
    done = bed.run(launcher, "-np", "4", "-H", "h1:2,h2:2", sys.executable, "-c", SUM)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        "[0]<stdout>:h1 h1 0 0 2 0 2",
        "[1]<stdout>:h1 h1 1 1 2 0 2",
        "[2]<stdout>:h2 h2 2 0 2 1 2",
        "[3]<stdout>:h2 h2 3 1 2 1 2",
    ]
    bed.assert_empty()


def test_unequal_hosts_and_init_again_and_a_subset(bed: Bed) -> None:
    code = (
        "import numpy as np, ronde as hvd\n"
        "for _ in range(3):\n"
        "    hvd.init(); total = hvd.allreduce(np.ones(3) * 2 ** hvd.rank(), op=hvd.Sum)[0]; hvd.shutdown()\n"
        "import os; rank = int(os.environ['RONDE_RANK'])\n"
        "if rank in (1, 3, 5):\n"
        "    hvd.init(comm=[1, 3, 5]); part = hvd.allreduce(np.ones(3) * 2 ** rank, op=hvd.Sum)[0]; hvd.shutdown()\n"
        "else: part = 0\n"
        "print(int(total), int(part))"
    )
    done = bed.run("h1", "-H", "h1:3,h2:2,h3:1", sys.executable, "-c", code)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"[{r}]<stdout>:63 {42 if r % 2 else 0}" for r in range(6)]


def test_environment_directory_and_pythonpath_travel_but_on_no_command_line(bed: Bed, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "of_this_test.py").write_text("WORD = 'found'\n")
    work = tmp_path / "work dir's"
    work.mkdir()
    code = (
        "import os, time, of_this_test, ronde\n"
        "ronde.init(); print(os.getcwd(), of_this_test.WORD, os.environ['A_SECRET'], flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
    )
    script = work / "train.py"
    script.write_text(code)
    value = "s3cr3t 'quoted\" $HOME \n line"
    running = bed.start(
        "h3", "-H", "h1:1,h2:1", sys.executable, "train.py", cwd=work, PYTHONPATH=str(modules), A_SECRET=value
    )  # fmt: skip

    def workers() -> list[list[str]]:
        return [words for _, words in bed.processes() if words[-1] == "train.py"]

    try:
        assert wait_for(lambda: len(workers()) >= 3, 20)  # the launcher, too
        for process, words in bed.processes():
            line = " ".join(words)
            assert "s3cr3t" not in line and str(modules) not in line
            if words[0] == "ssh":
                assert words[1:4] == ["-T", "-S", "none"] and "BatchMode=yes" in words
            # The job's secret: 64 hexadecimal digits.
            texts = [line, *process.environ().values()]
            assert not any(re.search(r"\b[0-9a-f]{64}\b", text) for text in texts)
    finally:
        (work / "go").touch()
    done = running.end(20)
    assert done.code == 0, done.err
    for rank in (0, 1):
        assert f"[{rank}]<stdout>:{work} found s3cr3t 'quoted\" $HOME \n[{rank}]<stdout>: line\n" in done.out


def test_what_shells_print_at_start_is_no_problem(bed: Bed, tmp_path: Path) -> None:
    noisy = tmp_path / "ssh"
    noisy.write_text(
        "#!/bin/sh\necho 'Welcome to the cluster'; echo quota exceeded >&2; head -c 100000 /dev/zero | tr '\\0' x\n"
        'PATH=${PATH#*:}; exec ssh "$@"\n'
    )
    noisy.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bed.run("h1", "-H", "h1:1,h2:1", sys.executable, "-c", SUM, PATH=path)
    assert done.code == 0 and "Welcome" not in done.out, done.err


def test_the_words_for_ssh(bed: Bed, tmp_path: Path) -> None:
    """What is handed to ssh, word by word."""
    fake = tmp_path / "ssh"
    seen = tmp_path / "seen"
    fake.write_text(
        f"#!{sys.executable}\nimport sys, json\njson.dump(sys.argv[1:], open({str(seen)!r}, 'w'))\nsys.exit(255)\n"
    )
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bed.run(
        "h1", "-i", "/a key", "--start-timeout", "7", "--gloo-timeout-seconds", "12", "-H", "me@h2:1", "--python",
        "/a b/python", "true", PATH=path,
    )  # fmt: skip
    assert done.code == 1 and "host h2" in done.summary
    *words, command = json.loads(seen.read_text())
    assert words == [
        *("-T", "-S", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=7", "-o", "ServerAliveInterval=4"),
        *("-o", "ServerAliveCountMax=3", "-p", str(PORT), "-i", "/a key", "-l", "me", "--", "h2"),
    ]
    assert command.startswith("exec '/a b/python' -c 'import os,sys;")


def test_run_on_several_hosts(bed: Bed, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, ronde as hvd\n"
        "def work(scale, add=0):\n"
        "    hvd.init()\n"
        "    total = hvd.allreduce(np.ones(2) * scale * (hvd.rank() + 1), op=hvd.Sum)[0]\n"
        "    return hvd.rank(), float(total) + add, __import__('os').uname().nodename\n"
        f"print(hvd.run(work, args=(2,), kwargs={{'add': 1}}, hosts='h1:1,h2:2', ssh_port={PORT}))\n"
    )
    done = subprocess.run(
        [str(SCRIPT), "exec", "h3", sys.executable, str(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[(0, 13.0, 'h1'), (1, 13.0, 'h2'), (2, 13.0, 'h2')]\n", done.stderr


def test_output_files_and_config_file(bed: Bed, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("params:\n  fusion-threshold-mb: 32\n")
    show = "import os; print(os.uname().nodename, os.environ['RONDE_FUSION_THRESHOLD'])"
    done = bed.run(
        "h1", "-H", "h1:1,h2:1", "--output-filename", str(tmp_path / "out"), "--config-file", str(config),
        sys.executable, "-c", show,
    )  # fmt: skip
    assert done.code == 0 and done.out == "", done.err
    assert (tmp_path / "out" / "rank.0" / "stdout").read_text() == f"h1 {32 << 20}\n"
    assert (tmp_path / "out" / "rank.1" / "stdout").read_text() == f"h2 {32 << 20}\n"


def test_megabytes_of_output_from_several_hosts(bed: Bed) -> None:
    code = "import os\nfor i in range(40000): print(f'{i:063d}')"
    done = bed.run("h3", "-H", "h1:2,h2:1", sys.executable, "-c", code)
    assert done.code == 0, done.err
    for rank in range(3):
        own = [line for line in done.out.splitlines() if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}]<stdout>:{i:063d}" for i in range(40000)]


@pytest.mark.parametrize("wanted", ["eth0", "10.77.0.0/24", "nothing0,eth0"])
def test_interfaces_by_name_and_network(bed: Bed, wanted: str) -> None:
    done = bed.run("h1", "--network-interfaces", wanted, "-H", "h1:1,h2:1", sys.executable, "-c", SUM)
    assert done.code == 0, done.err


@pytest.mark.parametrize("wanted", ["wlan7", "192.168.0.0/16"])
def test_an_interface_that_a_host_lacks_is_named_with_those_it_has(bed: Bed, wanted: str) -> None:
    done = bed.run("h1", "--network-interfaces", wanted, "-H", "h1:1,h2:1", sys.executable, "-c", SUM, seconds=30)
    assert done.code == 1
    assert f"none of the network interfaces {wanted}" in done.summary and "eth0 10.77.0." in done.summary
