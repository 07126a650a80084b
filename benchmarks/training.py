"""A training step through ronde, through torch's DistributedDataParallel over gloo, and without any communication.

Two models, float32, SGD with momentum, every rank with data of its own:

- resnet50: a model with ResNet-50's 161 parameters that computes next to nothing: a chain, so that the backward pass makes
  the gradients one after the other. What is left of a step is communication and what the wrappers add.
- cnn: the network of examples/torch_mnist.py on its handwritten digits, 32 images a rank and step.

All take turns in the same processes, on replicas of one model, one thread a rank:

- ronde: `hvd.DistributedOptimizer`; `ronde views` with `gradient_as_bucket_view=True`, where this version has it.
- ddp: DistributedDataParallel over gloo at its defaults; `ddp views` with `gradient_as_bucket_view=True`.
- compute: all ranks do the step, nobody communicates.
- alone: rank 0 does, and the others sleep: what one process needs for its step.
- ronde comm, gloo comm: only the communication of a step: all gradients submitted at once and waited for (ronde); the
  buckets of DDP (gloo).

`overlap` is 1 - (step - compute) / comm: the share of the communication that the step hides behind the computing; below
zero, the step costs more than computing first and communicating after. Ratios are medians of ratios within rounds, with
the 95 % interval of a bootstrap over rounds. Afterwards the weights must be the same, bit by bit, on all ranks.

    python benchmarks/training.py [-np 2] [--short] [--json [FILE]] [--plot FILE.png] [--check] [--quick]
"""

import argparse
import random
from statistics import median
from typing import Any, Optional

import peers
import report
import turns
from report import Goal

STEPS = ["ronde", "ronde views", "ddp", "ddp views", "compute", "alone"]
COMMUNICATION = {"ronde": "ronde comm", "ronde views": "ronde comm", "ddp": "gloo comm", "ddp views": "gloo comm"}


def interval(one: list[float], other: list[float], samples: int = 2000) -> tuple[float, float]:
    """95 % interval of the median ratio: a bootstrap over rounds, the same for the same numbers."""
    ratios = [a / b for a, b in zip(one, other)]
    draw = random.Random(1)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[samples * 25 // 1000], medians[samples * 975 // 1000 - 1]


def overlap(case: dict[str, Any], label: str) -> Optional[float]:
    """The hidden share of the communication; see above."""
    parts = (label, "compute", COMMUNICATION[label])
    if any(part not in case for part in parts):
        return None
    step, compute, communication = (case[part]["seconds"] for part in parts)
    if communication < 2 * max(case[part]["spread"] * case[part]["seconds"] for part in parts[:2]):
        return None  # less than what the steps differ by anyway
    return float(1 - (step - compute) / communication)


def measure(np: int, kinds: list[str], seconds: float, rounds: int) -> dict[str, Any]:
    cases, weights = {}, {}
    with turns.Run(seconds, rounds, timeout=120) as run:
        run.add("ronde", lambda: peers.start_ronde("ronde", "training_rank.py", np, run.folder))
        for kind in kinds:
            cases[kind] = run.case({"name": kind, "kind": kind}, lambda _, peer: peer)
            for group in run.groups:
                weights[kind] = run.ask(group, "weights")
    for case in cases.values():
        for label, numbers in case.items():
            if label in COMMUNICATION:
                numbers["overlap"] = overlap(case, label)
    return {"np": np, "cases": cases, "weights": weights, "missing": run.missing, "awake": run.awake}


def goals(results: dict[str, Any]) -> list[Goal]:
    if results["np"] != 2:
        return []
    made = []
    reason = results["missing"].get("ronde", "")
    case = results["cases"].get("cnn")
    if case is not None:
        what, goal = "training step, small CNN", "1 x torch DDP over gloo"
        if "ronde" in case and "ddp" in case:
            one, other = case["ronde"]["rounds"], case["ddp"]["rounds"]
            low, high = interval(one, other)
            made.append(Goal(what, goal, turns.ratio(one, other), 1.0, note=f"95 % interval {low:.3f} to {high:.3f}"))
        else:
            made.append(Goal(what, goal, None, 1.0, reason=reason or "not measured"))
    for kind, ranks in results["weights"].items():
        versions = [len({rank[label] for rank in ranks}) for label in COMMUNICATION if ranks and label in ranks[0]]
        made.append(
            Goal(f"weights after training, {kind}", "the same bits on all ranks", max(versions, default=None), 1, "versions",
                 "" if versions else reason or "not measured")
        )  # fmt: skip
    return made


def print_result(result: dict[str, Any]) -> None:
    for kind, case in result["cases"].items():
        heads = [f"{kind}, {result['np']} ranks", "ms", "spread", "to ddp", "95 % interval", "overlap"]
        rows: list[list[Any]] = []
        for label in [*STEPS, "ronde comm", "gloo comm"]:
            if label not in case:
                continue
            numbers = case[label]
            row = [label, numbers["seconds"] * 1e3, f"{numbers['spread']:.1%}", "-", "-", "-"]
            if label in STEPS and "ddp" in case:
                low, high = interval(numbers["rounds"], case["ddp"]["rounds"])
                row[3] = f"{turns.ratio(numbers['rounds'], case['ddp']['rounds']):.3f}"
                row[4] = f"{low:.3f} to {high:.3f}"
            if label in COMMUNICATION:
                row[5] = "in the noise" if numbers["overlap"] is None else f"{numbers['overlap']:.0%}"
            rows.append(row)
        report.print_table(heads, rows)
        print()
    print("overlap = 1 - (step - compute) / comm: the share of the communication hidden behind computing")
    report.print_missing(result)


def draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots(1, len(result["cases"]), squeeze=False)[0]
    for axis, (kind, case) in zip(axes, result["cases"].items()):
        labels = [label for label in STEPS if label in case]
        values = [case[label]["seconds"] * 1e3 for label in labels]
        colors = ["C0" if label.startswith("ronde") else "C1" if label.startswith("ddp") else "C7" for label in labels]
        bars = axis.barh(labels, values, color=colors)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.margins(x=0.15)
        axis.invert_yaxis()
        axis.set_xlabel("ms per step")
        name = "ResNet-50's gradients" if kind == "resnet50" else "small CNN"
        axis.set_title(f"{name}, {result['np']} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--models", nargs="+", default=["resnet50", "cnn"], choices=["resnet50", "cnn"])
    parser.add_argument("--seconds", type=float, default=4.0, help="measuring time of each model and peer [4]")
    parser.add_argument("--rounds", type=int, default=16, help="turns of each peer [16]")
    parser.add_argument("--short", action="store_true", help="half the time")
    report.add_options(parser)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.seconds, arguments.rounds = 2.0, 10
    if arguments.quick:
        arguments.seconds, arguments.rounds, arguments.models = 0.01, 2, ["cnn"]
    watch = report.Watch()
    results = measure(arguments.np, arguments.models, arguments.seconds, arguments.rounds)
    result = report.document("training", arguments, watch.end(), goals(results), **results)
    report.finish(arguments, result, print_result, draw)


if __name__ == "__main__":
    main()
