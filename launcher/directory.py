"""The directory of an agent, in which the socket of its store is."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import stat
import tempfile
import time

_PREFIX = "ronde-"
_SOCKET = "store"
_NEW_SECONDS = 60.0  # one that is younger may be about to be used


def make() -> str:
    """A new one of mode 0700, whose path is short enough for a socket in it."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    if len(os.fsencode(directory)) > 90:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    return directory


def store_url(directory: str) -> str:
    return f"unix:{directory}/{_SOCKET}"


def remove(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned() -> None:
    """Removes those of this user whose agents were killed together with their launchers, so that nobody else did."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for directory in glob.glob(f"{glob.escape(parent)}/{_PREFIX}*"):
            path = f"{directory}/{_SOCKET}"
            try:
                about = os.lstat(directory)
                if about.st_uid != os.getuid() or time.time() - about.st_mtime < _NEW_SECONDS:
                    continue
                if stat.S_ISSOCK(os.lstat(path).st_mode) and not _served(path):
                    os.unlink(path)
                    os.rmdir(directory)  # only when nothing else is in it
            except OSError:
                pass  # it is another's, or nothing of ours


def _served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # its queue is full
    return True
