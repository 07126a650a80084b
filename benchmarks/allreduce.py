"""Allreduce of float32 tensors, in place, on the ranks of one host: ronde against torch.distributed's gloo.

Both run in the same processes by turns, a block of calls each, so that a busy machine disturbs both alike. Times are
medians of rank 0 in microseconds. `ratio` is ronde's time by gloo's; `required` is what the project promises for two
ranks. The last rows are 200 tensors of 4 KiB: submitted together and then waited for, against 200 calls of gloo.

    python benchmarks/allreduce.py [-np 2] [--json] [--check]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import ranks

SIZES = [4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]  # bytes
MANY, MANY_BYTES = 200, 4 << 10
REQUIRED = {"4 B": 1 / 4, "64 MiB": 1 / 2, "200 x 4 KiB": 1 / 3}
TIMEOUT = 600.0  # seconds for everything


def size_name(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def measure(calls: dict[str, Callable[[], None]], budget: float, blocks: int) -> dict[str, float]:
    """Median seconds of each call; `blocks` blocks of each, by turns, about `budget` seconds for each in all.

    Every rank makes the same number of calls: that number is rank 0's, found by a trial."""
    import torch
    import torch.distributed as gloo

    counts = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        start = time.perf_counter()
        for _ in range(3):
            call()
        count = torch.tensor([max(3, int(budget / blocks / ((time.perf_counter() - start) / 3)))])
        gloo.broadcast(count, src=0)
        counts[name] = min(int(count), 2000)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            gloo.barrier()
            call()  # warms what the other's block cooled down
            for _ in range(counts[name]):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def check(value: Any, expected: float, who: str) -> None:
    if not bool((value == expected).all()):
        sys.exit(f"{who} gave a wrong sum: {value.unique()[:5].tolist()} instead of {expected}")


def work(budget: float, blocks: int) -> None:
    import torch
    import torch.distributed as gloo

    import ronde.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = gloo.FileStore(str(ranks.worker_folder() / "gloo"), size)  # type: ignore[operator]
    gloo.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    total = float(sum(range(1, size + 1)))
    rows = []

    def add(name: str, numbers: dict[str, float]) -> None:
        ratio = numbers["ronde"] / numbers["gloo"]
        rows.append({"size": name, **{who: s * 1e6 for who, s in numbers.items()}, "ratio": ratio,
                     "required": REQUIRED.get(name) if size == 2 else None})  # fmt: skip

    for bytes_ in SIZES:
        tensor = torch.full((bytes_ // 4,), float(rank + 1))
        name = f"allreduce.{bytes_}"
        hvd.allreduce_(tensor, op=hvd.Sum, name=name)
        check(tensor, total, "ronde")
        tensor.fill_(rank + 1)
        gloo.all_reduce(tensor)
        check(tensor, total, "gloo")
        tensor.zero_()  # stays finite however often it is summed
        calls: dict[str, Callable[[], None]] = {
            "ronde": lambda t=tensor, n=name: hvd.allreduce_(t, op=hvd.Sum, name=n),  # type: ignore[misc]
            "gloo": lambda t=tensor: gloo.all_reduce(t),  # type: ignore[misc]
        }
        add(size_name(bytes_), measure(calls, budget, blocks))

    tensors = [torch.full((MANY_BYTES // 4,), float(rank + 1)) for _ in range(MANY)]
    names = [f"many.{i}" for i in range(MANY)]

    def many_ronde() -> None:
        handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=n) for t, n in zip(tensors, names)]
        for handle in handles:
            hvd.synchronize(handle)

    def many_gloo() -> None:
        for tensor in tensors:
            gloo.all_reduce(tensor)

    def many_gloo_together() -> None:
        for pending in [gloo.all_reduce(tensor, async_op=True) for tensor in tensors]:
            pending.wait()

    many_ronde()
    check(torch.stack(tensors), total, "ronde")
    for tensor in tensors:
        tensor.zero_()
    together = measure({"ronde": many_ronde, "gloo": many_gloo, "gloo_together": many_gloo_together}, budget, blocks)
    add(f"{MANY} x {size_name(MANY_BYTES)}", {"ronde": together["ronde"], "gloo": together["gloo"]})
    add("... gloo's together", {"ronde": together["ronde"], "gloo": together["gloo_together"]})
    ranks.report(rank, rows)
    gloo.destroy_process_group()
    hvd.shutdown()


def print_table(rows: list[dict[str, Any]], np: int) -> None:
    import ronde

    info = ranks.machine()
    print(f"ronde {ronde.__version__}, {np} ranks on {info['cores']} cores ({info['cpu']}), load {info['load']}")
    print(f"{'float32, in place':>20} {'ronde us':>12} {'gloo us':>12} {'ratio':>8} {'required':>9}")
    for row in rows:
        required = "" if row["required"] is None else f"<= {row['required']:.2f}"
        missed = "  MISSED" if missed_target(row) else ""
        print(
            f"{row['size']:>20} {row['ronde']:>12.1f} {row['gloo']:>12.1f} {row['ratio']:>8.3f} {required:>9}{missed}"
        )


def missed_target(row: dict[str, Any]) -> bool:
    return row["required"] is not None and row["ratio"] > row["required"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each size and side [1]")
    parser.add_argument("--blocks", type=int, default=5, help="turns of each side [5]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a required ratio is missed")
    arguments = parser.parse_args()
    if ranks.worker_folder():
        work(arguments.seconds, arguments.blocks)
        return
    rows = ranks.start(__file__, arguments.np, sys.argv[1:], TIMEOUT)[0]
    if arguments.json:
        print(json.dumps({"np": arguments.np, "machine": ranks.machine(), "rows": rows}, indent=1))
    else:
        print_table(rows, arguments.np)
    if arguments.check and any(missed_target(row) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
