"""The memory limit of an allreduce (limit.cc) as a group that measures by turns with others."""

import selectors
import subprocess
import time
from pathlib import Path
from typing import Any

import turns

SOURCE = Path(__file__).resolve().parent / "limit.cc"
PROGRAM = SOURCE.parent.parent / "build" / "bench" / "limit"


def compile_limit() -> Path:
    """The program, made for this very machine when it is missing or older than its source."""
    if not PROGRAM.exists() or PROGRAM.stat().st_mtime < SOURCE.stat().st_mtime:
        PROGRAM.parent.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-O3", "-march=native", "-std=c++20", "-pthread", "-o", str(PROGRAM), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise turns.Failure(f"limit.cc cannot be compiled: {error}") from None
        if done.returncode != 0:
            raise turns.Failure(f"limit.cc cannot be compiled: {done.stderr.strip()[:200]}")
    return PROGRAM


class Limit:
    """One process of `np` threads, with a Group's face."""

    def __init__(self, np: int):
        self.name, self.failure = "limit", ""
        self._process = subprocess.Popen(
            [str(compile_limit()), str(np)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.pids = [self._process.pid]
        self._bytes = 0

    def ask(self, do: str, timeout: float, **arguments: Any) -> list[Any]:
        if self.failure:
            raise turns.Failure(self.failure)
        if do == "prepare":
            case = arguments["case"]
            self._bytes = case["bytes"] if case["kind"] == "tensor" else 0
            return [{"peers": ["limit"] if self._bytes else [], "missing": {}}]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{self._bytes} {arguments['calls']}\n".encode())
            self._process.stdin.flush()
            return [[float(time) * 1e-6 for time in self._line(timeout).split()]]
        except (OSError, ValueError, turns.Failure) as error:
            self.failure = f"limit failed: {error}"
            self.close()
            raise turns.Failure(self.failure) from None

    def _line(self, timeout: float) -> str:
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise turns.Failure("gave no answer in time")
                piece = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not piece:
                    raise turns.Failure("died " + line.decode(errors="replace"))
                line += piece
        return line.decode()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except OSError:
                pass
        try:
            self._process.wait(0.0 if self.failure else 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
