"""Directories of agents: what was left by killed ones goes, and nothing else."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from ronde.launcher import directory


def with_socket(path: Path, age: float) -> socket.socket:
    path.mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path / "store"))
    os.utime(path, (time.time() - age,) * 2)
    return server


def test_only_abandoned_directories_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with_socket(tmp_path / "ronde-abandoned", age=1000).close()
    with_socket(tmp_path / "ronde-new", age=0).close()
    with_socket(tmp_path / "other-abandoned", age=1000).close()
    server = with_socket(tmp_path / "ronde-served", age=1000)
    server.listen(0)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for client in waiting:  # until its queue is full: an agent that is stopped
        client.setblocking(False)
        client.connect_ex(str(tmp_path / "ronde-served" / "store"))
    (tmp_path / "ronde-data").mkdir()
    (tmp_path / "ronde-data" / "store").write_text("a user's")
    os.utime(tmp_path / "ronde-data", (0, 0))
    directory.remove_abandoned()
    left = {path.name for path in tmp_path.iterdir()}
    for each in (server, *waiting):
        each.close()
    assert left == {"ronde-new", "other-abandoned", "ronde-served", "ronde-data"}
    assert (tmp_path / "ronde-data" / "store").read_text() == "a user's"
