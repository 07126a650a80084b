"""What recording a timeline costs a training step of PyTorch: the same steps with and without, by turns.

Two ranks train a model of many small layers. A turn is a block of steps; rank 0 records in every second one. The cost is
the median over neighbouring blocks of how much longer a step took, with the interval that holds the true median with 95 %
(the order statistics of a binomial distribution). `floor` is the same number for
blocks that both record nothing: what this machine's noise alone would show. On a busy machine look at the fastest tenth of
the blocks of each side, and at the time of the processor (all threads of rank 0, the writer's too).

    python benchmarks/timeline_cost.py [-np 2] [--all-ranks] [--json] [--check]
"""

import argparse
import json
import math
import os
import sys
import time
from statistics import median
from typing import Any

import ranks

LAYERS, WIDTH, BATCH = 30, 192, 64
REQUIRED = 0.02  # of a step
TIMEOUT = 500.0  # seconds for everything


def work(pairs: int, steps: int) -> None:
    import torch

    import ronde.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.randn(BATCH, WIDTH)
    folder = ranks.worker_folder()

    def block() -> tuple[float, float]:
        """Seconds of a step: wall clock, processor."""
        hvd.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps

    def recorded(number: int) -> tuple[float, float]:
        hvd.start_timeline(f"{folder}/{number}.json")
        try:
            return block()
        finally:
            hvd.stop_timeline()

    block()
    recorded(0)
    without, with_, idle = [], [], []
    for number in range(1, pairs + 1):
        without.append(block())
        with_.append(recorded(number))
        idle.append(block())
    size = sum(path.stat().st_size for path in folder.glob("*.json")) if folder else 0
    hvd.barrier()
    ranks.report(
        hvd.rank(),
        {"without": without, "with": with_, "idle": idle, "bytes_per_step": size / ((pairs + 1) * steps),
         "tensors": len(list(model.parameters()))},
    )  # fmt: skip
    hvd.shutdown()


def median_interval(values: list[float]) -> list[float]:
    """The median between the bounds of its 95 % interval."""
    values = sorted(values)
    ranks_off = 0.98 * len(values) ** 0.5
    low = max(0, math.floor((len(values) - 1) / 2 - ranks_off))
    return [values[low], median(values), values[len(values) - 1 - low]]


def evaluate(result: dict[str, Any]) -> dict[str, Any]:
    def cost(clock: int) -> list[float]:
        # Each block with the one before it and the one after it, so that a drift cancels out.
        blocks = zip(result["without"], result["with"], result["idle"])
        return median_interval([2 * b[clock] / (a[clock] + c[clock]) - 1 for a, b, c in blocks])

    def fastest(*sides: str) -> float:
        times = sorted(wall for side in sides for wall, _ in result[side])
        return times[len(times) // 10]

    return {
        "step_ms": median(wall for wall, _ in result["without"]) * 1e3,
        "tensors": result["tensors"],
        "cost": cost(0),
        "cpu_cost": cost(1),
        "fastest": fastest("with") / fastest("without", "idle") - 1,
        "floor": median_interval([b[0] / a[0] - 1 for a, b in zip(result["without"], result["idle"])]),
        "bytes_per_step": result["bytes_per_step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--pairs", type=int, default=40, help="turns of each side [40]")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block [20]")
    parser.add_argument("--all-ranks", action="store_true", help="every rank records, not rank 0 alone")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when it costs more than 2 %% of a step")
    arguments = parser.parse_args()
    if ranks.worker_folder():
        work(arguments.pairs, arguments.steps)
        return
    if arguments.all_ranks:
        os.environ["RONDE_TIMELINE_ALL_RANKS"] = "1"
    found = evaluate(ranks.start(__file__, arguments.np, sys.argv[1:], TIMEOUT)[0])
    if arguments.json:
        print(json.dumps({"np": arguments.np, "machine": ranks.machine(), **found}, indent=1))
    else:
        info = ranks.machine()
        print(f"{arguments.np} ranks on {info['cores']} cores ({info['cpu']}), load {info['load']}")
        print(
            f"a step: {found['step_ms']:.2f} ms, {found['tensors']} tensors; {found['bytes_per_step']:.0f} bytes of timeline"
        )
        for name, key in (("recording", "cost"), ("floor", "floor"), ("processor", "cpu_cost")):
            low, middle, high = found[key]
            print(f"{name:<10} {middle:+.2%} of a step ({low:+.2%} to {high:+.2%})")
        print(f"fastest    {found['fastest']:+.2%} of a step")
        print(f"required   <= {REQUIRED:.0%}")
    if arguments.check and found["cost"][1] > REQUIRED:
        sys.exit(1)


if __name__ == "__main__":
    main()
