"""What it costs until all ranks agree that a tensor is ready: microseconds for each request.

`tensors` of one float each are submitted in one go and waited for, so that next to nothing but the negotiation remains
(and what Python takes to submit). `first` gives every tensor a name that was never seen, as in the first step of a
training; whole definitions travel. In a `steady` state the names are known and their numbers travel. Time of the whole
divided by the number of tensors; the mean of the ranks, the median of calls, the median of blocks. Each number of ranks
is a group of its own, all by turns.

    python benchmarks/negotiation.py [-np 2 4 8] [--short] [--json [FILE]] [--plot FILE.png] [--check] [--quick]
"""

import argparse
from collections.abc import Callable
from typing import Any

import peers
import report
import turns

TENSORS = [1, 10, 100, 1000]
NEW_NAMES = 1000  # at most in a block; well below what ronde remembers
KINDS = ["first", "steady"]


def rank_main() -> None:
    import numpy as np

    import ronde

    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    callables: dict[str, Callable[[], Any]] = {}
    new_names = 0

    def run(names: list[str], tensors: list[Any]) -> list[Any]:
        handles = [ronde.allreduce_async_(t, op=ronde.Sum, name=n) for t, n in zip(tensors, names)]
        return [ronde.synchronize(handle) for handle in handles]

    def prepare(case: dict[str, Any]) -> dict[str, Any]:
        count = case["tensors"]
        tensors = [np.full(1, 1000 * rank + k, np.float32) for k in range(count)]
        names = [f"steady.{k}" for k in range(count)]
        for k, total in enumerate(run(names, tensors)):
            expected = 1000 * (size * (size - 1) // 2) + size * k
            if total[0] != expected:
                raise ValueError(f"the sum of tensor {k} is {total[0]}, not {expected}")
        for tensor in tensors:
            tensor[:] = 0  # stays finite however often it is summed

        def first() -> None:
            nonlocal new_names
            new_names += count
            run([f"first.{new_names + k}" for k in range(count)], tensors)

        callables.clear()
        callables.update({"first": first, "steady": lambda: run(names, tensors)})
        return {"peers": KINDS, "missing": {}, "most": {"first": max(turns.FEWEST, NEW_NAMES // count)}}

    def block(peer: str, calls: int) -> list[float]:
        return turns.time_block(callables[peer], ronde.barrier, calls)

    turns.serve(rank, {"prepare": prepare, "block": block})
    ronde.shutdown()


def label(np: Any, kind: str) -> str:
    return f"{kind}, {np} ranks"


def measure(nps: list[int], counts: list[int], seconds: float, rounds: int) -> dict[str, Any]:
    with turns.Run(seconds, rounds) as run:
        for np in nps:
            run.add(str(np), lambda np=np: peers.start_ronde(str(np), "negotiation.py", np, run.folder))  # type: ignore[misc]
        cases = {str(n): run.case({"name": str(n), "kind": "negotiation", "tensors": n}, label) for n in counts}
    for name, case in cases.items():
        for numbers in case.values():
            numbers["us_per_request"] = numbers["seconds"] / int(name) * 1e6
    return {"cases": cases, "missing": run.missing, "awake": run.awake}


def print_result(result: dict[str, Any]) -> None:
    columns = [label(np, kind) for np in result["np"] for kind in KINDS]
    rows = [
        [f"{name} tensors", *(case[c]["us_per_request"] if c in case else None for c in columns)]
        for name, case in result["cases"].items()
    ]
    report.print_table(["us per request", *columns], rows)
    report.print_missing(result)


def draw(figure: Any, result: dict[str, Any]) -> None:
    axis = figure.subplots()
    for number, np in enumerate(result["np"]):
        for kind, style in zip(KINDS, ("o:", "o-")):
            name = label(np, kind)
            points = [(int(n), c[name]["us_per_request"]) for n, c in result["cases"].items() if name in c]
            if points:
                axis.loglog(*zip(*points), style, color=f"C{number}", label=name)
    axis.set_xlabel("tensors submitted together")
    axis.set_ylabel("us per request")
    axis.set_title("allreduce of one float each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, nargs="+", help="ranks [2 4 8]")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each number of each kind [1]")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each [6]")
    parser.add_argument("--short", action="store_true", help="2 and 4 ranks, half the time")
    report.add_options(parser)
    arguments = parser.parse_args()
    nps, counts = arguments.np or ([2, 4] if arguments.short else [2, 4, 8]), TENSORS
    if arguments.short:
        arguments.seconds = 0.5
    if arguments.quick:
        nps, counts, arguments.seconds, arguments.rounds = arguments.np or [2], [1, 100], 0.01, 2
    watch = report.Watch()
    results = measure(nps, counts, arguments.seconds, arguments.rounds)
    result = report.document("negotiation", arguments, watch.end(), [], np=nps, **results)
    report.finish(arguments, result, print_result, draw)


if __name__ == "__main__":
    rank_main() if turns.is_rank() else main()
