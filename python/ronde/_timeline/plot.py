"""A picture of a few steps: what every rank did when."""

from __future__ import annotations

from ronde._timeline.summary import RankSummary, Summary
from ronde._timeline.trace import TraceError

_COLORS = {
    "wait": "#bdbdbd",
    "negotiate": "#9ecae1",
    "pack": "#74c476",
    "network": "#fd8d3c",
    "reduce": "#9e9ac8",
    "unpack": "#31a354",
}


def plot(summary: Summary, path: str, steps: int) -> None:
    """Draws at most `steps` steps from the middle of the record. Raises TraceError."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise TraceError(f"--plot needs matplotlib: pip install matplotlib ({error})") from None
    start, end = _window(summary.ranks[0], steps)
    rows = [(rank, kind) for rank in summary.ranks for kind in ("waiting", "negotiation", "execution")]
    figure = Figure(figsize=(14, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (rank, kind) in enumerate(rows):
        trace = rank.trace
        if kind == "waiting":
            spans = [(span.start, span.end, "wait") for span in trace.waits]
        elif kind == "negotiation":
            spans = [(each.start, end if each.end is None else each.end, "negotiate") for each in trace.negotiations]
        else:
            spans = [(span.start, span.end, span.name) for span in trace.phases]
        for name in {name for _, _, name in spans}:
            bars = [
                ((max(begin, start) - start) / 1000, (min(stop, end) - max(begin, start)) / 1000)
                for begin, stop, of in spans
                if of == name and begin < end and stop > start
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLORS.get(name, "#000000"), alpha=0.8)
    axes.set_yticks(range(len(rows)), [f"rank {rank.trace.rank} {kind}" for rank, kind in rows])
    axes.set_xlim(0, (end - start) / 1000)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.set_title("Where the time goes; waiting is in the program's threads")
    handles = [Patch(color=color, label=name) for name, color in _COLORS.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: an extension that stands for no format
        raise TraceError(f"{path} cannot be written: {error}") from None


def _window(rank: RankSummary, steps: int) -> tuple[float, float]:
    if not rank.steps.count:
        first = rank.trace.first
        return first, max(rank.trace.last, first + 1)
    middle = (rank.steps.first + rank.steps.last) / 2
    half = min(steps * rank.steps.median, rank.steps.last - rank.steps.first) / 2
    return middle - half, middle + half
