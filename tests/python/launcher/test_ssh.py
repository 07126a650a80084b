"""The words for ssh, what its failures mean, and the blobs between agents."""

from __future__ import annotations

import base64
import json
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from ronde import _core
from ronde.launcher import frames
from ronde.launcher.hosts import Host
from ronde.launcher.relay import Relay
from ronde.launcher.ssh import Ssh


def test_the_words_for_ssh_and_a_host_is_never_taken_for_an_option() -> None:
    words = Ssh(2222, "/k", "/p y").command(Host("-oProxyCommand=x", 1, "me"), 300.0, 30.0)
    assert words[:-1] == [
        *("ssh", "-T", "-S", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=10"),
        *("-o", "ServerAliveCountMax=3", "-p", "2222", "-i", "/k", "-l", "me", "--", "-oProxyCommand=x"),
    ]
    assert shlex.split(words[-1])[:3] == ["exec", "/p y", "-c"]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_what_the_other_side_runs_says_the_marker_and_takes_the_module_path(shell: str, tmp_path: Path) -> None:
    (tmp_path / "of_this_test.py").write_text("def main(local): print('here', local)\n")
    command = Ssh().command(Host("h"), 10.0, 10.0, "of_this_test")[-1]
    done = subprocess.run(
        [shell, "-c", command], input=f"/nowhere\0{tmp_path}\n".encode(), capture_output=True, timeout=30
    )
    assert done.stdout == frames.MARKER + b"here False\n", done.stderr


@pytest.mark.parametrize(
    ("code", "said", "ready", "why"),
    [
        (255, "ssh: connect to host h port 1: Connection refused", False, "ssh cannot connect: ssh: connect to host h"),
        (255, "Host key verification failed.", False, "add the host's key to known_hosts"),
        (127, "bash: /x: No such file", False, "the Python interpreter /x cannot be started there (--python"),
        (1, "ModuleNotFoundError: No module named 'ronde'", False, "ronde is not installed for /x there"),
        (3, "one\ntwo", False, "the agent did not start (ssh ended with code 3): one | two"),
        (255, "Connection to h closed by remote host.", True, "the connection to its agent ended: Connection to h closed"),
    ],
)  # fmt: skip
def test_failures_are_explained(code: int, said: str, ready: bool, why: str) -> None:
    assert why in Ssh(python="/x").explain(code, said, ready)


def test_blobs_of_two_hosts_meet(tmp_path: Path) -> None:
    """Ranks 0 and 1 on one host, 2 on the other; `relays` pass on what they hear."""
    folders = [tmp_path / "a", tmp_path / "b"]
    servers, stores, relays = [], [], []
    for folder, local in zip(folders, (2, 1)):
        folder.mkdir()
        servers.append(_core.StoreServer(f"unix:{folder}/store"))
        stores.append(_core.Store(f"unix:{folder}/store"))
        relays.append(Relay(str(folder), stores[-1], local, 3))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        for index in range(3):
            relay = relays[index // 2]
            blob = base64.b64encode(bytes([index])).decode()
            rank.sendto(json.dumps({"key": "init/0", "index": index, "count": 3, "blob": blob}).encode(), relay.path)
            relay.read()
            sent = relay.take()
            assert len(sent) == (0 if index == 0 else 1)  # the first waits for its neighbour
            for frame in sent:
                assert json.loads(json.dumps(frame)) == json.loads(frames.control(frame)[frames.HEADER.size :])
                relays[1 - index // 2].hand_in(frame)
    # Each store knows the other host's blobs; with its own ranks' the exchange is complete.
    assert stores[1].exchange("init/0", 2, 3, b"\2", 5.0) == [b"\0", b"\1", b"\2"]
    with pytest.raises(_core.TimeoutError, match="missing: 1$"):
        stores[0].exchange("init/0", 0, 3, b"\0", 0.1)
    assert stores[0].exchange("init/0", 1, 3, b"\1", 5.0) == [b"\0", b"\1", b"\2"]
    for relay, server in zip(relays, servers):
        relay.close()
        server.stop()
