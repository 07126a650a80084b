"""Processes of Linux: the tree below one, and what happens to it when one above ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """What processes below leave behind becomes a child of this one, not of init."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """This process gets the signal when the thread that started it ends. One system call: may be used after a fork."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def machine() -> str:
    """Equal for processes that share this machine and its network."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


def descendants(pid: int) -> list[int]:
    """All processes below this one that have not ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):  # it has just ended
            continue
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(entry))
    found = list(children.get(pid, ()))
    for each in found:  # grows while it is walked
        found.extend(children.get(each, ()))
    return found


def how_it_ended(code: int) -> str:
    """``code`` as subprocess has it: negative for signals."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def python_command(module: str) -> list[str]:
    """Runs ``main`` of a module with this process's module path. (``python -m`` would look in the working directory
    first, where a training script's neighbours may be called queue.py or types.py.)"""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {module_path()!r}; from {module} import main; main()"]


def module_path() -> list[str]:
    return [path or os.getcwd() for path in sys.path]
