"""What all benchmarks print: tables, the machine they ran on, goals met and missed, JSON, plots.

    python benchmarks/report.py RESULT.json...

prints the goals of several results as one table, and ends with 1 after `--check` when one is missed.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import ranks

BUSY = 0.1  # share of the processors that others may use before a table carries a warning
MARK = {"ok": "ok", "missed": "FELL SHORT", "missing": "not available"}


@dataclass
class Goal:
    """One promise. `measured` and `limit` are in `unit`; less is better. `reason` says why nothing was measured."""

    what: str
    goal: str
    measured: Optional[float]
    limit: Optional[float]
    unit: str = "x"
    reason: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.measured is None or self.limit is None:
            return "missing"
        return "ok" if self.measured <= self.limit else "missed"


class Watch:
    """Looks at the machine from its making to `end`: what else ran, what the hypervisor took away."""

    def __init__(self) -> None:
        self._info = ranks.machine()
        self._start = (time.monotonic(), *self._processors(), self._own())

    @staticmethod
    def _processors() -> tuple[float, float]:
        """Seconds in which the processors were busy, and seconds stolen by the hypervisor, since the machine's start."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = [int(f) / tick for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _, _, irq, soft_irq, steal = fields[:8]
        return user + nice + system + irq + soft_irq, steal

    @staticmethod
    def _own() -> float:
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in uses)

    def end(self) -> dict[str, Any]:
        """The machine's description; processes started since must have been waited for."""
        now = (time.monotonic(), *self._processors(), self._own())
        wall, busy, stolen, own = (after - before for after, before in zip(now, self._start))
        cores = os.cpu_count() or 1
        after = ranks.machine()
        return {
            **self._info,
            "load_after": after["load"],
            "others": max(0.0, busy - own) / (wall * cores),
            "stolen": stolen / (wall * cores),
            "seconds": round(wall, 1),
        }


def machine_lines(info: dict[str, Any]) -> list[str]:
    lines = [
        f"{info['cpu']}, {info['cores']} cores (affinity {info['affinity']}), load {info['load']} before and "
        f"{info['load_after']} after; {info['seconds']:.0f} s, of which others used {info['others']:.0%} of the "
        f"processors and the hypervisor took {info['stolen']:.0%}"
    ]
    if info["others"] > BUSY or info["stolen"] > BUSY:
        lines.append("WARNING: the machine was busy with other things; these numbers are not what it can do.")
    return lines


def size_name(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def number(value: Optional[float]) -> str:
    """Three significant digits, no exponent; "-" for nothing."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> None:
    """Columns as wide as they need; the first `left` of them start at the left, numbers end at the right."""
    texts = [list(heads)] + [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    for row in texts:
        cells = [c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


def print_missing(run: dict[str, Any]) -> None:
    """Why a run's peers have no numbers, and whether its turns were disturbed."""
    for name, reason in run["missing"].items():
        print(f"{name}: {reason}")
    if run["awake"]:
        print(f"{run['awake']} blocks began while another group was not asleep")
    print()


def print_goals(goals: Sequence[Goal]) -> None:
    if not goals:
        return
    rows = [
        (g.what, g.goal, "-" if g.measured is None else f"{number(g.measured)} {g.unit}",
         "-" if g.limit is None else f"{number(g.limit)} {g.unit}",
         MARK[g.verdict] + (f": {g.reason}" if g.reason else "") + (f" ({g.note})" if g.note else ""))
        for g in goals
    ]  # fmt: skip
    print()
    print_table(["goal", "at most", "measured", "limit", "verdict"], rows, left=5)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON in FILE, or instead of the table")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a goal is missed")
    parser.add_argument("--quick", action="store_true", help="a few seconds: to see that it works, not to measure")


def document(
    subject: str, arguments: argparse.Namespace, info: dict[str, Any], goals: Sequence[Goal], **results: Any
) -> dict[str, Any]:
    import ronde

    described = [{**asdict(goal), "verdict": goal.verdict} for goal in goals]
    return {
        "benchmark": subject,
        "quick": arguments.quick,
        "ronde": ronde.__version__,
        "machine": info,
        "goals": described,
        **results,
    }


def finish(arguments: argparse.Namespace, result: dict[str, Any], print_result: Any, draw: Any) -> None:
    """Prints, writes and draws a document as the options say, and ends the program."""
    if arguments.json == "-":
        print(json.dumps(result, indent=1))
    else:
        print_result(result)
        for line in machine_lines(result["machine"]):
            print(line)
        if result["quick"]:
            print("--quick: far too few calls to measure anything.")
        print_goals(goals_of(result))
        if arguments.json:
            Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        save_plot(arguments.plot, result, draw)
    if arguments.check and any(goal["verdict"] == "missed" for goal in result["goals"]):
        sys.exit(1)


def save_plot(file: str, result: dict[str, Any], draw: Any) -> None:
    """`draw(figure, result)` on a figure that gets a grid, a legend, and a foot that says where the numbers come from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=90, layout="constrained")
    draw(figure, result)
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend(fontsize=8)
    info = result["machine"]
    figure.supxlabel(f"ronde {result['ronde']}, one host, {info['cores']} cores of {info['cpu']}", fontsize=8)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Software": None})


def goals_of(result: dict[str, Any]) -> list[Goal]:
    return [Goal(**{key: value for key, value in goal.items() if key != "verdict"}) for goal in result["goals"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a goal is missed")
    arguments = parser.parse_args()
    goals = [goal for file in arguments.files for goal in goals_of(json.loads(Path(file).read_text()))]
    print_goals(goals)
    if arguments.check and any(goal.verdict == "missed" for goal in goals):
        sys.exit(1)


if __name__ == "__main__":
    main()
