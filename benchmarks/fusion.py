"""What fusion gains: many tensors at once under several fusion thresholds, by turns in one run.

Each threshold has its own ranks. `tensors x bytes` are submitted in one go and then waited for; the last case is
ResNet-50's gradients in backward order. Threshold 0 runs every tensor by itself. `gloo` calls torch.distributed's
allreduce for one tensor after the other (for the gradients: for DDP's buckets), `together` has them all in flight.
Milliseconds; the mean of the ranks, the median of calls, the median of blocks.

    python benchmarks/fusion.py [-np 2] [--short] [--json [FILE]] [--plot FILE.png] [--check] [--quick]
"""

import argparse
from typing import Any

import peers
import report
import turns

KI, MI = 1 << 10, 1 << 20
THRESHOLDS = [0, 64 * KI, MI, 8 * MI, 32 * MI, 128 * MI]
SHORT_THRESHOLDS = [0, MI, 128 * MI]
MANY = [(1000, 256), (200, 4 * KI), (200, 64 * KI), (32, MI)]  # tensors, bytes of each
SHORT_MANY = [(1000, 256), (200, 4 * KI)]
GLOO = ["gloo", "together"]


def measure(np: int, thresholds: list[int], cases: list[dict[str, Any]], seconds: float, rounds: int) -> dict[str, Any]:
    def label(group: str, kind: str) -> str:
        return group if kind == "ronde" else kind

    results = {}
    with turns.Run(seconds, rounds) as run:
        for threshold in thresholds:
            environment = {"RONDE_FUSION_THRESHOLD": str(threshold)}
            run.add(
                str(threshold),
                lambda e=environment, t=threshold: peers.start_ronde(str(t), "ronde_rank.py", np, run.folder, e),  # type: ignore[misc]
            )
        first = str(thresholds[0])
        for case in cases:
            # Gloo has no threshold: one group's ranks run it for all.
            per_group = {first: {**case, "only": ["ronde", *GLOO]}}
            results[case["name"]] = run.case({**case, "only": ["ronde"]}, label, per_group)
    return {"cases": results, "missing": run.missing, "awake": run.awake}


def print_result(result: dict[str, Any]) -> None:
    columns = [str(threshold) for threshold in result["thresholds"]]
    heads = [f"{result['np']} ranks, ms at threshold", *(report.size_name(int(t)) for t in columns), *GLOO]
    rows = [
        [name, *(case[c]["seconds"] * 1e3 if c in case else None for c in [*columns, *GLOO])]
        for name, case in result["cases"].items()
    ]
    report.print_table(heads, rows)
    report.print_missing(result)


def draw(figure: Any, result: dict[str, Any]) -> None:
    axis = figure.subplots()
    thresholds = result["thresholds"]
    for name, case in result["cases"].items():
        present = [(k, t) for k, t in enumerate(thresholds) if str(t) in case]
        if str(thresholds[0]) in case:
            base = case[str(thresholds[0])]["seconds"]
            axis.plot([k for k, _ in present], [base / case[str(t)]["seconds"] for _, t in present], "o-", label=name)
    axis.set_xticks(range(len(thresholds)), [report.size_name(t) for t in thresholds])
    axis.set_xlabel("fusion threshold")
    axis.set_ylabel("times as fast as without fusion")
    axis.set_title(f"tensors submitted together, {result['np']} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each case and threshold [1]")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each threshold [6]")
    parser.add_argument("--short", action="store_true", help="fewer thresholds and cases")
    report.add_options(parser)
    arguments = parser.parse_args()
    thresholds, many = (SHORT_THRESHOLDS, SHORT_MANY) if arguments.short else (THRESHOLDS, MANY)
    if arguments.quick:
        thresholds, many, arguments.seconds, arguments.rounds = [0, 128 * MI], [(50, 256)], 0.01, 2
    cases: list[dict[str, Any]] = [
        {"name": f"{tensors} x {report.size_name(size)}", "kind": "many", "tensors": tensors, "bytes": size}
        for tensors, size in many
    ]
    if not arguments.quick:
        cases.append({"name": "ResNet-50's 161 gradients", "kind": "gradients"})
    watch = report.Watch()
    results = measure(arguments.np, thresholds, cases, arguments.seconds, arguments.rounds)
    result = report.document("fusion", arguments, watch.end(), [], np=arguments.np, thresholds=thresholds, **results)
    report.finish(arguments, result, print_result, draw)


if __name__ == "__main__":
    main()
