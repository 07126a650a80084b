"""A worker as its agent sees it: its process, its pipes, and what it said last."""

from __future__ import annotations

import re
import subprocess
from collections import deque
from dataclasses import dataclass, field
from typing import IO, Optional

# Lines that say nothing of a failure: of ronde's log (core/base/log.cc) and of TensorFlow's.
_LOG_LINE = re.compile(
    rb"\s*(\[ronde\b[^]]* (trace|debug|info|warning)\] "
    rb"|[IW]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:[\d.]+: [IW] "
    rb"|WARNING: All log messages before absl|To enable the following instructions)"
)
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit|Warning: .*rror)\b|\berror\b", re.IGNORECASE)


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    code: Optional[int] = None  # as Popen has it: negative for signals
    errors: deque[bytes] = field(default_factory=lambda: deque(maxlen=40))  # the last lines of stderr
    tail: bytes = b""
    pipes: dict[int, IO[bytes]] = field(default_factory=dict)  # the open ones of stdout (0) and stderr (1)

    def add_errors(self, data: bytes) -> None:
        lines = (self.tail + data).replace(b"\r", b"\n").split(b"\n")
        self.tail = lines.pop()[-4096:]
        self.errors.extend(line[:4096] for line in lines if line.strip() and not _LOG_LINE.match(line))

    def last_error(self) -> str:
        """The line of its error output that says best why it failed."""
        tail = [] if _LOG_LINE.match(self.tail) else [self.tail]
        lines = [line.decode(errors="replace").strip() for line in (*self.errors, *tail) if line.strip()]
        for number, line in reversed(list(enumerate(lines))):
            if _ERROR_LINE.search(line) and not line.startswith("[ronde"):
                if line.endswith("Graph execution error:"):  # TensorFlow: what happened comes before a node in brackets
                    after = lines[number + 1 :]
                    line += next((f" {text}" for text, node in zip(after, after[1:]) if node.startswith("[[")), "")
                return line[:500]
        return lines[-1][:500] if lines else ""
