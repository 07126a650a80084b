"""What submitting a gradient from torch's hook costs, in microseconds per parameter: the time of a backward pass with a
DistributedOptimizer less that of the same pass without, and what step() takes to collect the reduced gradients.

The optimizer does nothing, and the parameters are many and small, so that hooks are most of what there is. Both models
take turns; the numbers are medians of rank 0, in processor time of the calling thread, which a busy machine leaves alone. `submit` is allreduce_async_ called by hand, in a loop.

    python benchmarks/torch_hook.py [-np 1] [--parameters 200] [--steps 300]
"""

import argparse
import sys
import time
from statistics import median
from typing import Any

import ranks

TIMEOUT = 300.0  # seconds for everything


def work(parameters: int, steps: int) -> None:
    import torch

    import ronde.torch as hvd

    class Idle(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            pass

    def model() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.full((32, 32), float(number))) for number in range(parameters)]

    torch.set_num_threads(1)
    hvd.init()
    plain, hooked = model(), model()
    named = [(f"layers.{number}.weight", param) for number, param in enumerate(hooked)]
    optimizer = hvd.DistributedOptimizer(Idle(hooked, {}), named_parameters=named)
    ones = [torch.ones(32, 32) for _ in range(parameters)]
    sent = [torch.zeros(32, 32) for _ in range(parameters)]
    names = [f"sent.{number}" for number in range(parameters)]
    times: dict[str, list[float]] = {"plain": [], "hooked": [], "wait": [], "submit": []}

    def timed(what: str, call: Any) -> Any:
        start = time.thread_time()
        result = call()
        times[what].append((time.thread_time() - start) * 1e6 / parameters)
        return result

    for _ in range(steps):
        hvd.barrier()
        for param in (*plain, *hooked):
            param.grad = None
        timed("plain", lambda: torch.autograd.backward(plain, ones))
        timed("hooked", lambda: torch.autograd.backward(hooked, ones))
        timed("wait", optimizer.step)
        hvd.barrier()
        handles = timed("submit", lambda: [hvd.allreduce_async_(t, op=hvd.Sum, name=n) for t, n in zip(sent, names)])
        for handle in handles:
            handle.wait()
    kept = {what: median(values[steps // 5 :]) for what, values in times.items()}
    hook = median(a - b for a, b in zip(times["hooked"][steps // 5 :], times["plain"][steps // 5 :]))
    ranks.report(hvd.rank(), {"hook": hook, "wait": kept["wait"], "submit": kept["submit"], "plain": kept["plain"]})
    hvd.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=1, help="ranks [1]")
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    if ranks.worker_folder():
        work(arguments.parameters, arguments.steps)
        return
    for what, time_ in ranks.start(__file__, arguments.np, sys.argv[1:], TIMEOUT)[0].items():
        print(f"{what:>8} {time_:8.2f} us per parameter")


if __name__ == "__main__":
    main()
