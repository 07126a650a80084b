"""A summary as text."""

from __future__ import annotations

from collections.abc import Iterator

from ronde._timeline.summary import Late, RankSummary, Summary

_PHASES = ("pack", "network", "reduce", "unpack")


def render(summary: Summary, tensors: int) -> str:
    return "\n".join(line for part in _parts(summary, tensors) for line in part)


def _parts(summary: Summary, tensors: int) -> Iterator[list[str]]:
    for rank in summary.ranks:
        yield _rank(rank)
    yield _late(summary)
    yield _tensors(summary, tensors)
    if summary.unfinished:
        yield _unfinished(summary)


def milliseconds(micros: float) -> str:
    return f"{micros / 1000:.3f} ms" if micros < 10_000 else f"{micros / 1000:.1f} ms"


def _names(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _rank(rank: RankSummary) -> list[str]:
    trace, shares = rank.trace, rank.shares
    steps = max(rank.steps.count, 1)
    lines = [f"rank {trace.rank} of {trace.size} (host {trace.host}), {trace.path}"]
    if not trace.ended:
        lines.append("  the record does not end: the process was killed, or still runs")
    if trace.cut:
        lines.append("  the file reached its largest size (RONDE_TIMELINE_MAX_BYTES): what came later is missing")
    if trace.dropped:
        lines.append(f"  {trace.dropped} events were lost, as they came faster than they could be written")
    if rank.steps.count:
        lines.append(f"  {rank.steps.count} steps, {milliseconds(rank.steps.median)} each (median); a mean step:")
    else:
        lines.append(f"  no tensor comes up three times, so no steps; all {milliseconds(shares.total)}:")
    rows = [
        ("waiting for ranks to be ready", shares.not_ready),
        ("waiting while data moves", shares.exposed),
        ("data moves behind computation", shares.overlapped),
        ("the program alone", shares.alone),
    ]
    for name, time in rows:
        share = time / shares.total if shares.total > 0 else 0.0
        lines.append(f"    {name:<32} {milliseconds(time / steps):>12}  {share:6.1%}")
    overlap = "no communication" if shares.overlap is None else f"{shares.overlap:.1%} of it overlapped"
    parts = ", ".join(f"{name} {milliseconds(shares.phases.get(name, 0.0) / steps)}" for name in _PHASES)
    lines.append(f"  communication {milliseconds(shares.communication / steps)} a step, {overlap}: {parts}")
    return lines


def _late(summary: Summary) -> list[str]:
    if not summary.late:
        have_root = any(rank.trace.rank == 0 and rank.trace.size > 1 for rank in summary.ranks)
        return ["latest rank: none" if have_root else "latest rank: only rank 0's file of several ranks tells"]
    first = summary.late[0]
    return [f"latest rank: {_late_line(first)}", *(f"  then {_late_line(each)}" for each in summary.late[1:4])]


def _late_line(late: Late) -> str:
    return (
        f"{_names(late.ranks)}, the last to be ready for {late.operations} of {late.of} operations, "
        f"by {milliseconds(late.total / late.operations)} on average, {milliseconds(late.most)} at most"
    )


def _tensors(summary: Summary, count: int) -> list[str]:
    shown = summary.tensors[:count]
    if not shown:
        return []
    lines = [f"slowest tensors (of {len(summary.tensors)}; means, rank {summary.ranks[0].trace.rank})"]
    lines.append(f"  {'negotiate':>12} {'queue':>12} {'run':>12} {'times':>7}  name")
    for tensor in shown:
        times = (milliseconds(time) for time in (tensor.negotiate, tensor.queue, tensor.run))
        lines.append("  " + " ".join(f"{time:>12}" for time in times) + f" {tensor.count:>7}  {printable(tensor.name)}")
    return lines


def _unfinished(summary: Summary) -> list[str]:
    lines = ["operations that some ranks had not submitted when the record ends:"]
    for each in summary.unfinished[:10]:
        ranks = ", ".join(str(rank) for rank, _ in sorted(each.ready))
        lines.append(f"  {printable(each.name)}: ready on rank {ranks}")
    if len(summary.unfinished) > 10:
        lines.append(f"  and {len(summary.unfinished) - 10} more")
    return lines


def printable(name: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
