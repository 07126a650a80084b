"""Several hosts on this machine (hosts.sh), and ronderun on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

import psutil
import pytest

SCRIPT = Path(__file__).parent / "hosts.sh"
PORT = 12345
NAME = os.environ.get("HOSTS_NAME") or "rondebed"
STATE = Path(os.environ.get("HOSTS_STATE") or Path(os.environ.get("TMPDIR") or "/tmp") / NAME)
TEMPORARY = STATE / "tmp"  # TMPDIR on all hosts
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> str:
    if os.geteuid() != 0:
        return "only root can make hosts from network namespaces"
    for program, package in (("ip", "iproute2"), ("sshd", "openssh-server"), ("ssh", "openssh-client")):
        if shutil.which(program, path=_SEARCH) is None:
            return f"{program} is missing (Debian's {package})"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"namespaces cannot be made here: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def summary(self) -> str:
        """The one line in which the launcher says why the job failed."""
        lines = [line for line in self.err.splitlines() if line.startswith("ronderun: ")]
        assert len(lines) == 1, self.err
        return lines[0]


@dataclass
class Launcher:
    """A ronderun that runs."""

    process: subprocess.Popen[str]
    since: float = field(default_factory=time.monotonic)

    def end(self, seconds: float) -> Ended:
        """Waits for its end; fails when that takes longer. Seconds count from here."""
        start = time.monotonic()
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate(timeout=5)
            pytest.fail(f"ronderun did not end within {seconds} s; it said:\n{out}\n{err}")
        return Ended(self.process.returncode, out, err, time.monotonic() - start)


class Bed:
    def __init__(self, count: int) -> None:
        self.names = [f"h{number + 1}" for number in range(count)]
        self._launchers: list[Launcher] = []

    @staticmethod
    def call(*words: str, check: bool = True) -> None:
        done = subprocess.run([str(SCRIPT), *words], capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, done.stderr

    def start(self, host: str, *arguments: str, cwd: Optional[Path] = None, **env: str) -> Launcher:
        """ronderun on a host."""
        process = subprocess.Popen(
            [str(SCRIPT), "exec", host, sys.executable, "-m", "ronde.launcher", "-p", str(PORT), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **env},
        )
        self._launchers.append(Launcher(process))
        return self._launchers[-1]

    def run(self, host: str, *arguments: str, seconds: float = 60, cwd: Optional[Path] = None, **env: str) -> Ended:
        return self.start(host, *arguments, cwd=cwd, **env).end(seconds)

    def processes(self) -> list[tuple[psutil.Process, list[str]]]:
        """All on the hosts but their sshds (which keep a connection whose other end is gone), with their command lines."""
        found = []
        for name in self.names:
            listed = subprocess.run(
                ["ip", "netns", "pids", f"{NAME}-{name}"], capture_output=True, text=True, timeout=10
            )
            for pid in listed.stdout.split():
                try:
                    process = psutil.Process(int(pid))
                    words = process.cmdline()
                    if process.status() != psutil.STATUS_ZOMBIE and words and not words[0].startswith("sshd:"):
                        found.append((process, words))
                except psutil.NoSuchProcess:
                    pass
        return found

    def assert_empty(self, seconds: float = 5, files: bool = True) -> None:
        """Nothing is left on any host; `files`: nor in their temporary directory."""
        limit = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not left, [words for _, words in left]
        assert not files or not list(TEMPORARY.iterdir())

    def repair(self) -> None:
        for launcher in self._launchers:
            if launcher.process.poll() is None:
                launcher.process.kill()
                launcher.process.communicate(timeout=10)
        self._launchers.clear()
        for name in self.names:
            self.call("heal", name, check=False)
            self.call("start", name, check=False)
        for process, _ in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for left in TEMPORARY.iterdir():
            shutil.rmtree(left, ignore_errors=True)


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
