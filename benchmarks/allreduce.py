"""Allreduce on the ranks of one host, in place: ronde against every peer that is installed, by turns in one run.

Peers are torch.distributed's gloo, Open MPI and MPICH (bare MPI_Allreduce through mpi4py), the memory limit (limit.cc:
the traffic without which no allreduce can do, and nothing else) and a NumPy sum (the arithmetic of one rank in one
process, no communication). `shared` is ronde with tensors made by `hvd.empty_shared`.

A time is the mean of the ranks, then the median of a block's calls, then the median of the blocks; ratios are medians of
ratios within rounds. `bus` is 2 (n-1)/n x bytes / time in GB/s, `of limit` the share of the memory limit's speed that
ronde has, `spread` half the distance between the quartiles of ronde's blocks and `best` the fastest of them. Goals are for two ranks on a core each
and, where they say so, for four ranks on two cores.

Where cores share caches, times depend on which of them the scheduler picks for the ranks: neighbours (near) are several
times as fast on small sizes as cores of different clusters or hyperthreads' neighbours (far), and it differs from run to
run. All peers of a round meet the same machine, not necessarily the same cores; trust ratios of several runs.

    python benchmarks/allreduce.py [-np 2 4] [--sizes 4 1048576] [--peers ronde limit] [--short] [--json [FILE]]
        [--plot FILE.png] [--check] [--quick]
"""

import argparse
import os
from typing import Any, Optional

import peers
import report
import turns
from report import Goal, size_name

KI, MI = 1 << 10, 1 << 20
SIZES = [4, KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI, 16 * MI, 64 * MI]  # bytes
SHORT_SIZES = [4, 64 * KI, MI, 16 * MI, 64 * MI]
LIMIT_FROM = MI  # bytes; below, the memory limit's own barriers are most of its time
SPECIAL: dict[str, dict[str, Any]] = {
    "gradients": {"title": "ResNet-50's 161 gradients", "kind": "gradients"},
    "dtypes": {"title": "16 Mi elements", "kind": "dtypes", "elements": 16 * MI},
    "many": {"title": "200 tensors of 4 KiB", "kind": "many", "tensors": 200, "bytes": 4 * KI},
}
GROUPS = ["ronde", "openmpi", "mpich", "limit"]
COLUMNS = ["ronde", "shared", "gloo", "openmpi", "mpich", "limit", "numpy"]
TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "numpy": "NumPy"}


def run(np: int, cases: list[dict[str, Any]], names: list[str], seconds: float, rounds: int) -> dict[str, Any]:
    """All cases on `np` ranks: {"np", "cases": {name: {peer: summary}}, "missing": {peer: reason}, "awake": blocks}."""

    def label(group: str, kind: str) -> str:
        return group if kind == "mpi" else kind

    with turns.Run(seconds, rounds) as turn:
        for name in names:
            turn.add(name, lambda name=name: peers.start(name, np, turn.folder))  # type: ignore[misc]
        results = {case["name"]: turn.case(case, label) for case in cases}
    return {"np": np, "cases": results, "missing": turn.missing, "awake": turn.awake}


class Case:
    """One case's numbers, and the goals that can be made of them."""

    def __init__(self, run: dict[str, Any], name: str):
        self._peers, self._missing, self._name = run["cases"][name], run["missing"], name

    def seconds(self, label: str) -> float:
        return float(self._peers[label]["seconds"])

    def _reason(self, *labels: str) -> str:
        for label in labels:
            if label not in self._peers:
                return str(self._missing.get(label) or self._missing.get("ronde") or f"{label} was not measured")
        return ""

    def ratio(
        self, goal: str, limit: float, one: str, other: str, extra: float = 0.0, what: Optional[str] = None
    ) -> Goal:
        """`one` takes at most `limit` times as long as `other`, plus `extra` seconds."""
        what = what or self._name
        reason = self._reason(one, other)
        if reason:
            return Goal(what, goal, None, limit, reason=reason)
        rounds = [self._peers[label]["rounds"] for label in (one, other)]
        if extra:
            limit += extra / self.seconds(other)
        note = f"{report.number(self.seconds(one) * 1e6)} us / {report.number(self.seconds(other) * 1e6)} us"
        return Goal(what, goal, turns.ratio(*rounds), limit, note=note)

    def absolute(self, goal: str, limit: float, label: str) -> Goal:
        reason = self._reason(label)
        return Goal(self._name, goal, None if reason else self.seconds(label) * 1e6, limit, "us", reason)


def goals_of_two(run: dict[str, Any]) -> list[Goal]:
    goals = []
    cases = {name: Case(run, name) for name in run["cases"]}
    for name, case in cases.items():
        if name == "4 B":
            goals += [
                case.absolute("30 us", 30.0, "ronde"),
                case.ratio("1/6 of gloo", 1 / 6, "ronde", "gloo"),
            ]
        elif name == "64 KiB":
            goals += [case.ratio("1/5 of gloo", 1 / 5, "ronde", "gloo")]
        elif name == "1 MiB":
            goals += [
                case.ratio("1/7 of gloo", 1 / 7, "ronde", "gloo"),
                case.ratio("0.9 x Open MPI", 0.9, "ronde", "openmpi"),
            ]
        elif name == "16 MiB":
            goals += [
                case.ratio("2.5 x the memory limit", 2.5, "ronde", "limit"),
                case.ratio("0.6 x Open MPI", 0.6, "ronde", "openmpi"),
            ]
        elif name == "64 MiB":
            goals += [
                case.ratio("1.6 x the memory limit", 1.6, "ronde", "limit"),
                case.ratio("1/3 of Open MPI", 1 / 3, "ronde", "openmpi"),
                case.ratio("1/5 of gloo", 1 / 5, "ronde", "gloo"),
            ]
    for size in (MI, 4 * MI, 16 * MI, 64 * MI):
        name = size_name(size)
        if name in cases:
            extra, text = (30e-6, " plus 30 us") if size == MI else (0.0, "")
            what = f"{name}, empty_shared"
            goals.append(
                cases[name].ratio(f"1.1 x the memory limit{text}", 1.1, "shared", "limit", extra=extra, what=what)
            )
    if "gradients" in cases:
        case, what = cases["gradients"], "161 gradients"
        goals += [
            case.ratio("1.25 x one 102 MB tensor", 1.25, "ronde", "one", what=what),
            case.ratio("1/3 of gloo in DDP's buckets", 1 / 3, "ronde", "gloo", what=what),
        ]
    if "dtypes" in cases:
        goals += [
            cases["dtypes"].ratio("0.65 x float32", 0.65, dtype, "float32", what=f"{dtype}, 16 Mi elements")
            for dtype in ("float16", "bfloat16")
        ]
    return goals


def goals_of_four(run: dict[str, Any]) -> list[Goal]:
    what = "4 ranks on 2 cores, "
    goals = []
    if "4 B" in run["cases"]:
        goals.append(Case(run, "4 B").ratio("1/2 of gloo", 1 / 2, "ronde", "gloo", what=what + "4 B"))
    if "16 MiB" in run["cases"]:
        goals.append(Case(run, "16 MiB").ratio("1.3 x Open MPI", 1.3, "ronde", "openmpi", what=what + "16 MiB"))
    return goals


def goals(runs: list[dict[str, Any]]) -> list[Goal]:
    result = []
    for one in runs:
        if one["np"] == 2:
            result += goals_of_two(one)
        elif one["np"] == 4 and len(os.sched_getaffinity(0)) == 2:
            result += goals_of_four(one)
    return result


def bus_bandwidth(np: int, bytes_: int, seconds: float) -> float:
    return 2 * (np - 1) / np * bytes_ / seconds / 1e9


def print_run(run: dict[str, Any], sizes: list[int]) -> None:
    np = run["np"]
    present = [label for label in COLUMNS if any(label in row for row in run["cases"].values())]
    heads = [f"{np} ranks, float32", *(f"{TITLES.get(label, label)} us" for label in present), "bus GB/s", "of limit",
             "spread", "best us"]  # fmt: skip
    rows = []
    for size in sizes:
        row = run["cases"].get(size_name(size), {})
        ours = row.get("ronde")
        cells: list[Any] = [size_name(size), *(row[p]["seconds"] * 1e6 if p in row else None for p in present)]
        cells.append(bus_bandwidth(np, size, ours["seconds"]) if ours else None)
        both = ours and "limit" in row and size >= LIMIT_FROM
        cells.append(f"{turns.ratio(row['limit']['rounds'], ours['rounds']):.0%}" if both else "-")
        cells.append(f"{ours['spread']:.0%}" if ours else "-")
        cells.append(min(ours["rounds"]) * 1e6 if ours else None)
        rows.append(cells)
    report.print_table(heads, rows)
    for name, case in SPECIAL.items():
        if name in run["cases"]:
            numbers = ", ".join(f"{label} {v['seconds'] * 1e6:.0f} us" for label, v in run["cases"][name].items())
            print(f"{case['title']}: {numbers}")
    report.print_missing(run)


def draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots(1, len(result["runs"]), sharey=True, squeeze=False)[0]
    for axis, one in zip(axes, result["runs"]):
        for label in COLUMNS:
            points = [
                (size, bus_bandwidth(one["np"], size, one["cases"][size_name(size)][label]["seconds"]))
                for size in result["sizes"]
                if label in one["cases"].get(size_name(size), {})
            ]
            if label == "limit":
                points = [point for point in points if point[0] >= LIMIT_FROM]
            if points and label != "numpy":
                title = "ronde, empty_shared" if label == "shared" else TITLES.get(label, label)
                title = "memory limit" if label == "limit" else title
                style = {"limit": "k--", "ronde": "o-", "shared": "o:"}.get(label, ".-")
                axis.loglog(*zip(*points), style, label=title, base=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(result["sizes"][::2], [size_name(size) for size in result["sizes"][::2]], fontsize=8)
        axis.set_title(f"allreduce of float32, {one['np']} ranks")
    axes[0].set_ylabel("bus bandwidth, GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, nargs="+", default=[2, 4], help="ranks [2 4]")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of the tensors")
    parser.add_argument("--peers", nargs="+", default=GROUPS, choices=GROUPS, help="ronde brings gloo and NumPy")
    parser.add_argument(
        "--cases", nargs="*", default=list(SPECIAL), choices=list(SPECIAL), help="beside the sizes, 2 ranks"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each case and peer [1]")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each peer [8]")
    parser.add_argument("--short", action="store_true", help="only what has a goal")
    report.add_options(parser)
    arguments = parser.parse_args()
    sizes = arguments.sizes or (SHORT_SIZES if arguments.short else SIZES)
    if arguments.quick:
        sizes = arguments.sizes or [4, 64 * KI]
        arguments.seconds, arguments.rounds, arguments.cases = 0.01, 2, ["many"]
    special = [{"name": name, **SPECIAL[name]} for name in arguments.cases]
    watch = report.Watch()
    runs = []
    for np in arguments.np:
        wanted = [4, 16 * MI] if arguments.short and np == 4 else sizes
        cases = [{"name": size_name(size), "kind": "tensor", "bytes": size} for size in wanted]
        runs.append(run(np, cases + (special if np == 2 else []), arguments.peers, arguments.seconds, arguments.rounds))
    versions = {name: peers.mpi_version(name) for name in peers.MPI_COMMAND}
    result = report.document("allreduce", arguments, watch.end(), goals(runs), sizes=sizes, runs=runs, mpi=versions)

    def print_result(result: dict[str, Any]) -> None:
        for one in result["runs"]:
            print_run(one, [size for size in sizes if size_name(size) in one["cases"]])

    report.finish(arguments, result, print_result, draw)


if __name__ == "__main__":
    main()
