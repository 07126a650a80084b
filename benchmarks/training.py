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
import hashlib
import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Optional

import peers
import report
import resnet50
import turns
from report import Goal

BATCH = 32
STEPS = ["ronde", "ronde views", "ddp", "ddp views", "compute", "alone"]
COMMUNICATION = {"ronde": "ronde comm", "ronde views": "ronde comm", "ddp": "gloo comm", "ddp views": "gloo comm"}


def rank_main() -> None:
    """A rank's life: makes the models a case names and does steps as the driver says."""
    import ronde_rank
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import ronde.torch as hvd

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    ronde_rank.start()
    callables: dict[str, Callable[[], Any]] = {}
    models: dict[str, nn.Module] = {}

    class Chain(nn.Module):
        """Every parameter's gradient takes one pass over it and is made after those of later parameters."""

        def __init__(self) -> None:
            super().__init__()
            shapes = resnet50.forward_shapes()
            self.weights = nn.ParameterList([nn.Parameter(torch.full(shape, 0.01)) for shape in shapes])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for weight in self.weights:
                total = total + weight.sum() * x
            return total

    def chain_step(model: nn.Module, optimizer: Any) -> Callable[[], None]:
        x = torch.ones(()) + hvd.rank()

        def step() -> None:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

        return step

    def digits() -> tuple[torch.Tensor, torch.Tensor]:
        from torch_mnist import load_digits

        x, y, _, _ = load_digits()
        return x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

    def cnn_step(model: nn.Module, optimizer: Any) -> Callable[[], None]:
        x, y = digits()
        batches = len(x) // BATCH
        done = 0

        def step() -> None:
            nonlocal done
            batch = slice(done % batches * BATCH, done % batches * BATCH + BATCH)
            done += 1
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

        return step

    def make_model(kind: str) -> nn.Module:
        torch.manual_seed(1)
        if kind == "resnet50":
            return Chain()
        from torch_mnist import Net

        return Net()

    def prepare(case: dict[str, Any]) -> dict[str, Any]:
        callables.clear()
        models.clear()
        missing = {}
        make_step = chain_step if case["kind"] == "resnet50" else cnn_step
        views_exist = "gradient_as_bucket_view" in inspect.signature(hvd.DistributedOptimizer).parameters
        for label in STEPS:
            model = make_model(case["kind"])
            if label.startswith("ddp"):
                model = DistributedDataParallel(model, gradient_as_bucket_view=label.endswith("views"))
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            if label == "ronde views" and not views_exist:
                missing[label] = "DistributedOptimizer has no gradient_as_bucket_view"
                continue
            if label.startswith("ronde"):
                extra = {"gradient_as_bucket_view": True} if label.endswith("views") else {}
                optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **extra)
            models[label] = model
            step = make_step(model, optimizer)
            step()  # checks below that ranks stay equal: DDP and ronde, and nobody else
            callables[label] = step
        check_equal()
        shapes = [tuple(p.shape) for p in models["compute"].parameters()][::-1]
        gradients = [torch.zeros(shape) for shape in shapes]
        callables["ronde comm"] = ronde_rank.in_flight(gradients, f"comm.{case['kind']}")
        callables["gloo comm"] = ronde_rank.gloo_in_flight([torch.zeros(n) for n in resnet50.buckets(shapes)])
        for name in ("ronde comm", "gloo comm"):
            callables[name]()
        return {"peers": list(callables), "missing": missing}

    def check_equal() -> None:
        """After one step from equal weights, ronde and DDP agree but for rounding, and differ from training alone."""
        flat = {n: torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for n, m in models.items()}
        for label, weights in flat.items():
            if label.startswith(("ronde", "ddp")):
                torch.testing.assert_close(weights, flat["ddp"], rtol=1e-4, atol=1e-6, msg=f"{label} differs from ddp")
        if hvd.size() > 1 and torch.equal(flat["ronde"], flat["compute"]):
            raise ValueError("ronde's step did what a step without communication does")

    def block(peer: str, calls: int) -> list[float]:
        if peer == "alone" and hvd.rank() != 0:
            return []
        barrier = (lambda: None) if peer == "alone" else ronde_rank.gloo.barrier
        return turns.time_block(callables[peer], barrier, calls)

    def weights() -> dict[str, str]:
        """A hash of each distributed model's weights."""
        return {
            label: hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
            for label, model in models.items()
            if label in COMMUNICATION
        }

    turns.serve(hvd.rank(), {"prepare": prepare, "block": block, "weights": weights})
    ronde_rank.stop()


# --- in the driver


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
        run.add("ronde", lambda: peers.start_ronde("ronde", "training.py", np, run.folder))
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
    made = []
    if results["np"] != 2:
        return []
    reason = results["missing"].get("ronde", "")
    for kind, what in (("cnn", "training step, small CNN"),):
        case = results["cases"].get(kind)
        if case is None:
            continue
        goal = "1 x torch DDP over gloo"
        if reason or "ronde" not in case or "ddp" not in case:
            made.append(Goal(what, goal, None, 1.0, reason=reason or "not measured"))
            continue
        one, other = case["ronde"]["rounds"], case["ddp"]["rounds"]
        low, high = interval(one, other)
        made.append(Goal(what, goal, turns.ratio(one, other), 1.0, note=f"95 % interval {low:.3f} to {high:.3f}"))
    for kind, ranks in results["weights"].items():
        hashes = {rank["ronde"] for rank in ranks}
        made.append(
            Goal(f"weights after training, {kind}", "the same bits on all ranks", len(hashes) or None, 1, "versions",
                 "" if hashes else reason or "not measured")
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
    rank_main() if turns.is_rank() else main()
