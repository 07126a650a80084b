"""What TensorFlow's side costs: ronde.tensorflow against ronde on NumPy and ronde.torch, in the same processes by turns.

- overhead: one allreduce of 4 KiB inside tf.function (a chain of them, so each waits for the one before) against the
  same on a NumPy array; microseconds, median of rank 0.
- gradients: a step with 160 gradients of 25 M floats in all through DistributedGradientTape in tf.function, against the
  same through ronde.torch's DistributedOptimizer; both with the backward pass of a sum.
- growth: resident memory that 1,000 eager steps of 10 gradients add, MB.

    python benchmarks/tensorflow_ops.py [-np 2] [--json] [--check]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ranks

CHAIN, GRADIENTS, FLOATS, EAGER_STEPS = 50, 160, 25_000_000, 1000
# Name: unit, and the limit of the last number.
LIMITS = {"overhead": ("us", 40.0), "gradients": ("x", 1.3), "growth": ("MB", 10.0)}
TIMEOUT = 600.0


def by_turns(calls: dict[str, Callable[[], Any]], count: int, blocks: int) -> dict[str, float]:
    """Median seconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            call()  # warms what the other's block cooled down
            for _ in range(count):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def overhead() -> tuple[float, float, float]:
    import numpy as np
    import tensorflow as tf

    import ronde
    import ronde.tensorflow as hvd

    @tf.function
    def chain(x: Any) -> Any:
        for number in range(CHAIN):
            x = hvd.allreduce(x, name=f"chain.{number}")
        return x

    tensor, array = tf.ones([1024]), np.ones(1024, np.float32)

    def numpy_chain() -> None:
        for number in range(CHAIN):
            ronde.allreduce(array, name=f"numpy.{number}")

    chain(tensor)
    times = by_turns({"tensorflow": lambda: chain(tensor), "numpy": numpy_chain}, 30, 5)
    tensorflow, numpy = times["tensorflow"] / CHAIN * 1e6, times["numpy"] / CHAIN * 1e6
    return tensorflow, numpy, tensorflow - numpy


def gradients() -> tuple[float, float, float]:
    import tensorflow as tf
    import torch

    import ronde.tensorflow as hvd
    import ronde.torch as torch_hvd

    length = FLOATS // GRADIENTS
    variables = [tf.Variable(tf.ones([length])) for _ in range(GRADIENTS)]

    @tf.function
    def tensorflow_step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each) for each in variables])
        tape = hvd.DistributedGradientTape(tape)
        return [grad[0] for grad in tape.gradient(loss, variables)]

    params = [torch.nn.Parameter(torch.ones(length)) for _ in range(GRADIENTS)]
    optimizer = torch_hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))

    def torch_step() -> None:
        optimizer.zero_grad()
        torch.stack([param.sum() for param in params]).sum().backward()
        optimizer.synchronize()

    for _ in range(2):
        tensorflow_step()
        torch_step()
    times = by_turns({"tensorflow": tensorflow_step, "torch": torch_step}, 8, 4)
    return times["tensorflow"] * 1e6, times["torch"] * 1e6, times["tensorflow"] / times["torch"]


def growth() -> tuple[float, float, float]:
    import psutil
    import tensorflow as tf

    import ronde.tensorflow as hvd

    variables = [tf.Variable(tf.ones([100, 10])) for _ in range(10)]

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
        tape = hvd.DistributedGradientTape(tape)
        for each, grad in zip(variables, tape.gradient(loss, variables)):
            each.assign_sub(0.001 * grad)

    for _ in range(50):
        step()
    before = psutil.Process().memory_info().rss / 1e6
    for _ in range(EAGER_STEPS):
        step()
    after = psutil.Process().memory_info().rss / 1e6
    return after, before, after - before


def work() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf
    import torch

    import ronde

    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    ronde.init()
    ranks.report(ronde.rank(), {"overhead": overhead(), "gradients": gradients(), "growth": growth()})
    ronde.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    if ranks.worker_folder():
        work()
        return
    results = ranks.start(__file__, arguments.np, [], TIMEOUT)[0]
    missed = [name for name, (_, limit) in LIMITS.items() if results[name][2] > limit]
    if arguments.json:
        print(json.dumps({"np": arguments.np, "machine": ranks.machine(), "results": results}, indent=1))
    else:
        print(f"{'':>12} {'tensorflow':>12} {'peer':>12} {'result':>10}")
        for name, (unit, limit) in LIMITS.items():
            one, other, result = results[name]
            print(
                f"{name:>12} {one:>12.1f} {other:>12.1f} {result:>7.2f} {unit:<3}(<= {limit:g})"
                + "  MISSED" * (name in missed)
            )
    if arguments.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
