"""Host lists and host files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ronde.launcher.errors import LaunchError
from ronde.launcher.hosts import Host, HostError, parse_hostfile, parse_hosts
from ronde.launcher.job import Job, JobSpec
from ronde.launcher.placement import identities, place


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node_1:2", [Host("node_1", 2)]),
        ("a.b.c.d:1", [Host("a.b.c.d", 1)]),
        ("10.255.0.1:4", [Host("10.255.0.1", 4)]),
        ("[fe80::1]:2", [Host("fe80::1", 2)]),
        ("[fe80::1]", [Host("fe80::1", 1)]),
        ("host", [Host("host", 1)]),
        ("user@host:2", [Host("host", 2, "user")]),
        ("a:1, b:2", [Host("a", 1), Host("b", 2)]),
        ("a:1,b:1,a:2", [Host("a", 3), Host("b", 1)]),
        ("localhost:1,127.0.0.1:2", [Host("localhost", 3)]),
        ("[::1]:1,LocalHost:2", [Host("::1", 3)]),
        ("A.invalid:1,a.invalid.:2", [Host("A.invalid", 3)]),
        ("a.invalid:1,me@a.invalid:2", [Host("a.invalid", 3, "me")]),
    ],
)
def test_host_lists(text: str, expected: list[Host]) -> None:
    assert parse_hosts(text) == expected


def test_the_same_machine_by_its_own_name_is_one_host() -> None:
    assert parse_hosts(f"localhost:1,{socket.gethostname()}:2") == [Host("localhost", 3)]


@pytest.mark.parametrize("text", ["", ",", "a:", "a:x", "a:0", "a:-1", "a b:1", "a:1:2", "[::1:2", "@a:1", "fe80::1"])
def test_bad_host_lists(text: str) -> None:
    with pytest.raises(HostError):
        parse_hosts(text)


def test_two_users_on_one_machine_are_refused() -> None:
    with pytest.raises(HostError, match="'me@a.invalid' and 'you@a.invalid' are the same machine"):
        parse_hosts("me@a.invalid:1,you@a.invalid:1")


def test_another_user_on_this_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match="'somebody-else@localhost' is this host"):
        Job(JobSpec(["true"], 1, parse_hosts("somebody-else@localhost:1"), {}))


def test_host_files(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(
        b"\xef\xbb\xbf# all machines\r\n\r\nh1 slots=4\r\nh2:3  # the fast one\r\nh3\r\nh4 slots=2 max_slots=8\r\n"
    )
    assert parse_hostfile(str(path)) == [Host("h1", 4), Host("h2", 3), Host("h3", 1), Host("h4", 2)]


@pytest.mark.parametrize(("line", "number"), [("h1 slots=x", 2), ("h1 slot=2", 2), ("h1:y", 2)])
def test_errors_name_file_and_line(tmp_path: Path, line: str, number: int) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"good\n{line}\n")
    with pytest.raises(HostError, match=f"{path}:{number}"):
        parse_hostfile(str(path))


def test_a_missing_host_file_is_named() -> None:
    with pytest.raises(HostError, match="/no/such/file"):
        parse_hostfile("/no/such/file")


def test_ranks_fill_hosts_in_order() -> None:
    placed = place(5, [Host("x.invalid", 3), Host("y.invalid", 4)])
    assert [(host.name, count) for host, count in placed] == [("x.invalid", 3), ("y.invalid", 2)]
    first, second = identities(placed)
    assert [i["rank"] for i in first + second] == [0, 1, 2, 3, 4]
    assert (second[1]["local_rank"], second[1]["local_size"], second[1]["cross_rank"], second[1]["cross_size"]) == (
        1,
        2,
        1,
        2,
    )
    assert (first[2]["cross_rank"], first[2]["cross_size"]) == (0, 1)
    with pytest.raises(LaunchError, match="-np 8"):
        place(8, [Host("x.invalid", 3), Host("y.invalid", 4)])
