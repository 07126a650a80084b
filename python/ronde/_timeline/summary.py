"""What timelines say: where a step's time goes, which tensors are slow, which rank is late.

A *step* is found by its repetition: it lasts from one negotiation of a tensor to the next one of the same name, for the
tensor that is negotiated most often (of several, the first one). *Communication* is the time in which fused operations
run; the part of it in which no thread of the program waits in ronde is *overlapped*.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Optional

from ronde._timeline.trace import Negotiation, Span, Trace

Intervals = list[tuple[float, float]]  # ascending, apart from each other


@dataclass
class Steps:
    """Microseconds; `first` and `last` bound all of the steps."""

    count: int = 0
    median: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass
class Shares:
    """Microseconds of a rank's steps (of the whole record, where there are no steps). The first four add up to `total`."""

    total: float
    exposed: float  # the program waits and data moves
    not_ready: float  # the program waits for ranks to be ready
    overlapped: float  # data moves and the program does something else
    alone: float  # the program does something else
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def communication(self) -> float:
        return self.exposed + self.overlapped

    @property
    def overlap(self) -> Optional[float]:
        """Share of the communication that is overlapped; None when there was none."""
        return self.overlapped / self.communication if self.communication > 0 else None


@dataclass
class Tensor:
    """A tensor's mean times in microseconds."""

    name: str
    count: int
    negotiate: float
    queue: float
    run: float

    @property
    def total(self) -> float:
        return self.negotiate + self.queue + self.run


@dataclass
class Late:
    """Ranks that were the last to be ready; several if they were heard of together (a host's ranks, by its leader)."""

    ranks: tuple[int, ...]
    operations: int  # for which they were the last
    of: int  # operations in all
    total: float  # microseconds by which they were later than the last but one, summed up
    most: float


@dataclass
class RankSummary:
    trace: Trace
    steps: Steps
    shares: Shares


@dataclass
class Summary:
    ranks: list[RankSummary]
    tensors: list[Tensor]  # of the lowest rank, the slowest first
    late: list[Late]  # the latest first; empty without rank 0's file
    unfinished: list[Negotiation]  # of files whose process did not end its timeline


def summarise(traces: list[Trace]) -> Summary:
    ordered = sorted(traces, key=lambda trace: trace.rank)
    ranks = []
    for trace in ordered:
        steps = find_steps(trace)
        window = (steps.first, steps.last) if steps.count else (trace.first, trace.last)
        ranks.append(RankSummary(trace, steps, _shares(trace, *window)))
    unfinished = [each for trace in ordered if not trace.ended for each in trace.negotiations if each.end is None]
    return Summary(ranks, _tensors(ordered[0]), find_late(ordered), unfinished)


def find_steps(trace: Trace) -> Steps:
    counts = Counter(each.name for each in trace.negotiations)
    if not counts or max(counts.values()) < 3:
        return Steps()
    most = max(counts.values())
    name = next(each.name for each in trace.negotiations if counts[each.name] == most)
    starts = sorted(each.start for each in trace.negotiations if each.name == name)
    lengths = [after - before for before, after in zip(starts, starts[1:])]
    return Steps(len(lengths), median(lengths), starts[0], starts[-1])


def union(spans: Iterable[Span], start: float, end: float) -> Intervals:
    """What the spans cover of the time from start to end."""
    clipped = sorted((max(span.start, start), min(span.end, end)) for span in spans)
    result: Intervals = []
    for begin, stop in clipped:
        if stop <= begin:
            continue
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((begin, stop))
    return result


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def common(left: Intervals, right: Intervals) -> float:
    """Time that both cover."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def find_late(traces: list[Trace]) -> list[Late]:
    """By who was the last to be ready, as rank 0 heard it."""
    late: dict[tuple[int, ...], list[float]] = defaultdict(list)
    operations = 0
    for negotiation in (each for trace in traces if trace.rank == 0 for each in trace.negotiations):
        times = sorted({time for _, time in negotiation.ready})
        if len(negotiation.ready) < 2 or negotiation.end is None:
            continue
        operations += 1
        if len(times) >= 2:
            ranks = tuple(sorted(rank for rank, time in negotiation.ready if time == times[-1]))
            late[ranks].append(times[-1] - times[-2])
    found = [Late(ranks, len(by), operations, sum(by), max(by)) for ranks, by in late.items()]
    return sorted(found, key=lambda each: -each.total)


def _shares(trace: Trace, start: float, end: float) -> Shares:
    runs, waits = union(trace.lists, start, end), union(trace.waits, start, end)
    exposed = common(runs, waits)
    phases: dict[str, float] = defaultdict(float)
    for span in trace.phases:
        if start <= span.start < end:
            phases[span.name] += span.end - span.start
    overlapped = length(runs) - exposed
    not_ready = length(waits) - exposed
    alone = end - start - length(waits) - overlapped
    return Shares(end - start, exposed, not_ready, overlapped, alone, dict(phases))


def _tensors(trace: Trace) -> list[Tensor]:
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in trace.negotiations:
        if each.end is not None:
            times[each.name]["negotiate"].append(each.end - each.start)
    for kind, spans in (("queue", trace.queues), ("run", trace.runs)):
        for span in spans:
            times[span.name][kind].append(span.end - span.start)
    tensors = [
        Tensor(
            name,
            max(map(len, by.values())),
            *(mean(by[kind]) if by[kind] else 0.0 for kind in ("negotiate", "queue", "run")),
        )
        for name, by in times.items()
    ]
    return sorted(tensors, key=lambda tensor: -tensor.total)
