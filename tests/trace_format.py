"""Checks events against Chrome's Trace Event Format: fields and their types, nesting, matching begins and ends."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_TIMED = "Xbnei"
_METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
}


def load(path: Path) -> list[Event]:
    """The events of a file that must be JSON, with nothing before or behind it."""
    events = json.loads(path.read_bytes().decode("utf-8"))
    assert isinstance(events, list)
    return events


def check(events: list[Event], ended: bool = True) -> None:
    """Raises AssertionError with the event that is wrong. `ended`: the timeline was closed, so all begins have ends."""
    for event in events:
        _check_fields(event)
    lanes: dict[Any, list[Event]] = defaultdict(list)
    pairs: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "bne":
            pairs[event["pid"], event["cat"], event["id"]].append(event)
    for lane in lanes.values():
        _check_nesting(lane)
    for pair in pairs.values():
        _check_pairs(pair, ended)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(lanes) <= named, "a lane without a name"


def nanoseconds(micros: float) -> int:
    return round(micros * 1000)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_fields(event: Event) -> None:
    assert isinstance(event, dict), event
    assert isinstance(event["name"], str) and event["name"], event
    assert event["ph"] in _TIMED + "M", event
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
    assert isinstance(event.get("args", {}), dict), event
    if event["ph"] == "M":
        field, kind = _METADATA.get(event["name"], (None, None))
        assert event["name"].startswith("ronde") or isinstance(event["args"][field], kind), event
        return
    assert _is_number(event["ts"]) and event["ts"] >= 0, event
    assert isinstance(event["cat"], str) and event["cat"], event
    if event["ph"] == "X":
        assert _is_number(event["dur"]) and event["dur"] >= 0, event
    elif event["ph"] == "i":
        assert event["s"] in ("g", "p", "t"), event
    else:
        assert isinstance(event["id"], str) and int(event["id"], 16) >= 0, event


def _check_nesting(lane: list[Event]) -> None:
    """Complete events of a lane lie in each other or apart."""
    open_: list[tuple[int, Event]] = []
    for event in sorted(lane, key=lambda e: (nanoseconds(e["ts"]), -nanoseconds(e["dur"]))):
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event["dur"])
        while open_ and open_[-1][0] <= start:
            open_.pop()
        assert not open_ or end <= open_[-1][0], (open_[-1][1], event)
        open_.append((end, event))


def _check_pairs(pair: list[Event], ended: bool) -> None:
    """Begins and ends of an id alternate as brackets do, marks lie between them."""
    open_: list[str] = []
    for event in sorted(pair, key=lambda e: nanoseconds(e["ts"])):
        if event["ph"] == "b":
            open_.append(event["name"])
        elif event["ph"] == "n":
            assert open_, event
        else:
            assert open_ and open_.pop() == event["name"], event
    assert not open_ or not ended, pair[-1]
