"""Hosts and their slots: ``-H a:4,user@b:2`` and host files."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Optional


class HostError(ValueError):
    """A host specification that cannot be right; the message names it (and its file and line)."""


@dataclass(frozen=True)
class Host:
    name: str  # host name or address, without brackets
    slots: int = 1
    user: Optional[str] = None


_SPEC = re.compile(
    r"^(?:(?P<user>[^@\s:]+)@)?(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[^\[\]@:\s]+))(?::(?P<slots>[^:]*))?$"
)


def _slots(text: Optional[str], where: str) -> int:
    if text is None:
        return 1
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise HostError(f"{where}: the number of slots must be a whole number above 0, not '{text}'")
    return int(text)


def _parse_one(text: str, where: str) -> Host:
    match = _SPEC.match(text)
    if match is None:
        raise HostError(f"{where}: '{text}' is no host; write host, host:slots, user@host:slots or [ipv6]:slots")
    return Host(match["v6"] or match["name"], _slots(match["slots"], where), match["user"])


def parse_hosts(text: str) -> list[Host]:
    """The hosts of ``-H``, in order. Raises HostError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise HostError("-H names no host")
    return merge([_parse_one(part, f"-H {text}") for part in parts])


def parse_hostfile(path: str) -> list[Host]:
    """Lines ``host slots=4``, ``host:4`` or ``host``; blank lines and comments (#) are skipped. Raises HostError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(f"the host file {path} cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        host = _parse_one(words[0], where)
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key not in ("slots", "max_slots", "max-slots") or not equals:
                raise HostError(f"{where}: '{word}' is not understood; write slots=N")
            if key == "slots":
                host = Host(host.name, _slots(value, where), host.user)
        hosts.append(host)
    if not hosts:
        raise HostError(f"the host file {path} names no host")
    return merge(hosts)


def is_local(name: str) -> bool:
    """Whether the name or address means this machine. Looks nothing up on the network for the usual spellings."""
    name = name.lower().rstrip(".")
    own = socket.gethostname().lower()
    if name in ("localhost", "localhost.localdomain", own, own.split(".")[0], f"{own}.local"):
        return True
    try:
        if ipaddress.ip_address(name).is_loopback:
            return True
    except ValueError:
        pass  # a name
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    # An address is ours exactly if a socket can be bound to it.
    for address in addresses:
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((str(address), 0))
            return True
        except OSError:
            continue
    return False


def merge(hosts: list[Host]) -> list[Host]:
    """The same machine named twice (also by different names) becomes one host with the slots of both. Raises HostError
    when its names have different users."""
    merged: dict[str, Host] = {}
    for host in hosts:
        key = "localhost" if is_local(host.name) else host.name.lower().rstrip(".")
        before = merged.get(key)
        if before is None:
            merged[key] = host
            continue
        if before.user and host.user and before.user != host.user:
            raise HostError(
                f"'{before.user}@{before.name}' and '{host.user}@{host.name}' are the same machine; give it one user"
            )
        merged[key] = Host(before.name, before.slots + host.slots, before.user or host.user)
    return list(merged.values())
