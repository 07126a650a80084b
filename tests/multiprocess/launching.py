"""Helpers: ronderun as a user runs it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

RONDERUN = [sys.executable, "-m", "ronde.launcher"]


def run(*arguments: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RONDERUN, *arguments], capture_output=True, text=True, timeout=timeout, **options)


def run_command(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for(condition: Any, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pids_in(folder: Path, count: int) -> list[int]:
    """What the processes of a job wrote to the files 0, 1, ... (each with a space at the end)."""
    files = [folder / str(n) for n in range(count)]
    assert wait_for(lambda: all(file.exists() and file.read_text().endswith(" ") for file in files), 20)
    return [int(pid) for file in files for pid in file.read_text().split()]
