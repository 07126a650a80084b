"""Which ranks run on which host, and what each is told about itself."""

from __future__ import annotations

import socket
from typing import Any

from ronde.launcher.errors import LaunchError
from ronde.launcher.hosts import Host, is_local

MAX_PROCESSES = 1 << 20


def place(num_proc: int, hosts: list[Host]) -> list[tuple[Host, int]]:
    """(host, ranks on it), filling hosts in order. Raises LaunchError when there are too few slots, or
    absurdly many processes."""
    if num_proc > MAX_PROCESSES:
        raise LaunchError(f"{num_proc} processes: a job has at most {MAX_PROCESSES}")
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        names = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(f"-np {num_proc} asks for more processes than there are slots ({slots} on {names})")
    placed = []
    left = num_proc
    for host in hosts:
        count = min(left, host.slots)
        if count:
            placed.append((host, count))
        left -= count
    return placed


def identities(placed: list[tuple[Host, int]]) -> list[list[dict[str, Any]]]:
    """By host: what each of its workers is told about itself."""
    size = sum(count for _, count in placed)
    all_hosts = []
    rank = 0
    for index, (host, count) in enumerate(placed):
        name = socket.gethostname() if is_local(host.name) else host.name
        ranks = []
        for local in range(count):
            with_this_local = [i for i, (_, n) in enumerate(placed) if n > local]
            ranks.append(
                {
                    "rank": rank,
                    "size": size,
                    "local_rank": local,
                    "local_size": count,
                    "cross_rank": with_this_local.index(index),
                    "cross_size": len(with_this_local),
                    "hostname": name,
                }
            )
            rank += 1
        all_hosts.append(ranks)
    return all_hosts
