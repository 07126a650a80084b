"""After an agent on another host was killed: ends what its ranks had started, and removes its directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Optional

from ronde.launcher import directory
from ronde.launcher.hosts import Host
from ronde.launcher.ssh import Ssh, module_path_line

SECONDS = 6.0


def clean(pids: list[int], path: Optional[str]) -> None:
    """On this host. The ranks died with the agent; what they had started is in their process groups, unless it left
    these."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except OSError:
            pass
    if path is not None:
        directory.remove(path)


def begin(ssh: Ssh, host: Host, pids: list[int], path: Optional[str]) -> subprocess.Popen[bytes]:
    """On another host, if it can be reached: a process that ends within SECONDS, or is to be killed then."""
    command = ssh.command(host, SECONDS, SECONDS, "ronde.launcher.sweep")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    try:
        process.stdin.write(module_path_line() + json.dumps([pids, path]).encode() + b"\n")
        process.stdin.close()
    except OSError:
        pass  # it cannot be reached
    return process


def main(_local: bool) -> None:
    pids, path = json.loads(sys.stdin.readline())
    clean(pids, path)
