"""A rank's timeline as Python objects. Times are microseconds of the host's monotonic clock."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Optional


class TraceError(Exception):
    """A file is no timeline of ronde's; the text names it."""


@dataclass
class Span:
    """Something that took from `start` to `end`."""

    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Negotiation:
    """From the first rank that was heard to be ready for an operation to its commit."""

    name: str
    start: float
    end: Optional[float] = None  # None: the file ends before
    ready: list[tuple[int, float]] = field(default_factory=list)  # (rank, when)


@dataclass
class Trace:
    path: str
    rank: int
    size: int
    host: str
    ended: bool = False  # else the process was killed, or still runs
    cut: bool = False  # the file had reached its largest size
    dropped: int = 0  # events
    lists: list[Span] = field(default_factory=list)  # fused operations, one after the other
    phases: list[Span] = field(default_factory=list)  # parts of lists
    waits: list[Span] = field(default_factory=list)  # of the program's threads, in ronde
    queues: list[Span] = field(default_factory=list)  # of tensors
    runs: list[Span] = field(default_factory=list)
    negotiations: list[Negotiation] = field(default_factory=list)

    @property
    def first(self) -> float:
        return min((span.start for span in self._all()), default=0.0)

    @property
    def last(self) -> float:
        return max((span.end or span.start for span in self._all()), default=0.0)

    def _all(self) -> list[Any]:
        return [*self.lists, *self.waits, *self.negotiations]


def read(path: str) -> Trace:
    """Raises TraceError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            events = json.load(file)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}") from None
    if isinstance(events, dict):
        events = events.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path} holds no list of events")
    try:
        return _trace(path, events)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: an event is not as ronde writes it: {error!r}") from None


def _trace(path: str, events: list[dict[str, Any]]) -> Trace:
    about = next((event["args"] for event in events if event.get("name") == "ronde" and event.get("ph") == "M"), None)
    if about is None:
        raise TraceError(f"{path} is no timeline of ronde's")
    trace = Trace(path, about["rank"], about["size"], about["host"])
    complete = {"list": trace.lists, "phase": trace.phases, "wait": trace.waits}
    pairs = {"queue": trace.queues, "run": trace.runs}
    begun: dict[tuple[str, str], Any] = {}
    for event in events:
        kind, category = event.get("ph"), event.get("cat", "")
        if kind == "X" and category in complete:
            start = float(event["ts"])
            complete[category].append(Span(event["name"], start, start + event["dur"], event.get("args", {})))
        elif kind == "M" and event["name"] == "ronde_end":
            trace.ended, trace.cut, trace.dropped = True, event["args"]["cut"], event["args"]["dropped"]
        elif category == "negotiate":
            _negotiate(trace, event, begun)
        elif kind == "b" and category in pairs:
            begun[category, event["id"]] = event
        elif kind == "e" and category in pairs:
            begin = begun.pop((category, event["id"]), None)
            if begin is not None:
                span = Span(begin["name"], float(begin["ts"]), float(event["ts"]), begin.get("args", {}))
                pairs[category].append(span)
    return trace


def _negotiate(trace: Trace, event: dict[str, Any], begun: dict[tuple[str, str], Any]) -> None:
    key = "negotiate", event["id"]
    if event["ph"] == "b":
        begun[key] = Negotiation(event["name"], float(event["ts"]))
        trace.negotiations.append(begun[key])
    elif key in begun and event["ph"] == "n":
        begun[key].ready.append((event["args"]["rank"], float(event["ts"])))
    elif key in begun and event["ph"] == "e":
        ended = begun.pop(key)
        if "batch" in event.get("args", {}):  # else it was open when the file ended
            ended.end = float(event["ts"])
