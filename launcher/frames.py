"""What launcher and agent say to each other over the agent's stdin and stdout.

A frame is a type byte, a 32-bit length and so many bytes. ``j``: a JSON object (control). ``o``: output of a worker: rank (4
bytes), stream (1 byte), data; sent against credit, so that megabytes of output never delay control.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("!cI")
OUTPUT = struct.Struct("!IB")
LIMIT = 1 << 30
CREDIT = 1 << 20  # bytes of output that may be under way
# Of the function and of each result of ronde.run, which travel in base64.
PAYLOAD_LIMIT = LIMIT // 4 * 3 - 4096
# How long a reader of the output (a pager, a stopped terminal) may stand still at the end of a job that went well.
READER_SECONDS = 600.0
# Signs of life that agent and launcher, on different hosts, give each other in the time after which one counts as lost.
SIGNS = 6
# The agent prints this first; what shell start-up files print before it is skipped.
MARKER = b"\n==ronde-agent-1==\n"


def control(message: dict[str, Any]) -> bytes:
    payload = json.dumps(message).encode()
    return HEADER.pack(b"j", len(payload)) + payload


def output(rank: int, stream: int, data: bytes) -> bytes:
    return HEADER.pack(b"o", OUTPUT.size + len(data)) + OUTPUT.pack(rank, stream) + data


class Parser:
    """Bytes in, frames out: ``("j", dict)`` or ``("o", (rank, stream, data))``. Raises ValueError on anything else."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[str, Any]]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            kind, size = HEADER.unpack_from(self._buffer)
            if size > LIMIT or kind not in (b"j", b"o"):
                raise ValueError("malformed frame")
            if len(self._buffer) < HEADER.size + size:
                return
            payload = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            if kind == b"j":
                yield "j", json.loads(payload)
            elif len(payload) < OUTPUT.size:
                raise ValueError("malformed frame")
            else:
                rank, stream = OUTPUT.unpack_from(payload)
                yield "o", (rank, stream, payload[OUTPUT.size :])
