"""Whether communication overlaps the backward pass in MXNet, and what that saves.

Trains a deep network with DistributedTrainer, as it is and with a trainer that waits: for the backward pass, and for
each gradient before it sends the next. By turns, in the same processes.

- overlap: milliseconds of a step as it is and of one that waits, median of rank 0, and the ratio.
- in flight: the collectives of a step that had started before the last gradient of backward was there, those that had
  even ended by then, and the most that were under way at once.

    python benchmarks/mxnet_overlap.py [-np 2] [--json] [--check]
"""

import argparse
import json
import sys
import threading
import time
from statistics import median
from typing import Any

import ranks

LAYERS, WIDTH, BATCH, STEPS, BLOCKS = 24, 512, 256, 8, 4
TIMEOUT = 300.0


def work() -> None:
    import mxnet as mx
    from mxnet import autograd, gluon, nd

    import ronde.mxnet as hvd
    from ronde import _core

    class Waiting(hvd.DistributedTrainer):
        def _allreduce_grads(self) -> None:
            mx.nd.waitall()
            for key in self._trained():
                self._store.pushpull(key, self._params[key].list_grad())
                mx.nd.waitall()

    hvd.init()
    net = gluon.nn.HybridSequential()
    net.add(*[gluon.nn.Dense(WIDTH, activation="relu", in_units=WIDTH) for _ in range(LAYERS)])
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    settings = {"learning_rate": 1e-3}
    trainers = {
        "as it is": hvd.DistributedTrainer(net.collect_params(), "sgd", settings),
        "waiting": Waiting(net.collect_params(), "sgd", settings),
    }
    x = nd.random.normal(shape=(BATCH, WIDTH))
    last_gradient = net[0].weight.grad()

    def step(trainer: Any, watch: bool = False) -> Any:
        before = _core.deferred_counts()
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        backward_ended = last_gradient[:1].copy()
        trainer.step(1)
        seen = watch_until(backward_ended, before) if watch else None
        mx.nd.waitall()
        return seen

    def watch_until(array: Any, before: tuple[int, int]) -> tuple[int, int, int]:
        """Collectives started, ended, and the most at once, until the array is there."""
        waiting = threading.Thread(target=array.wait_to_read)
        waiting.start()
        started, ended, most = 0, 0, 0
        while waiting.is_alive():
            now = _core.deferred_counts()
            started, ended = now[0] - before[0], now[1] - before[1]
            most = max(most, started - ended)
            time.sleep(2e-4)
        return started, ended, most

    for trainer in trainers.values():
        step(trainer)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(BLOCKS):
        for name, trainer in trainers.items():
            for _ in range(STEPS):
                start = time.perf_counter()
                step(trainer)
                times[name].append(time.perf_counter() - start)
    seen = [step(trainers["as it is"], watch=True) for _ in range(STEPS)]
    started, ended, most = (int(median(values)) for values in zip(*seen))
    one, other = (median(values) * 1e3 for values in times.values())
    ranks.report(hvd.rank(), {"overlap": (one, other, one / other), "in flight": (started, ended, most)})
    hvd.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when nothing overlaps")
    arguments = parser.parse_args()
    if ranks.worker_folder():
        work()
        return
    results = ranks.start(__file__, arguments.np, [], TIMEOUT)[0]
    one, other, ratio = results["overlap"]
    started, ended, most = results["in flight"]
    if arguments.json:
        print(json.dumps({"np": arguments.np, "machine": ranks.machine(), "results": results}, indent=1))
    else:
        print(
            f"a step takes {one:.1f} ms, and {other:.1f} ms when it waits for backward and each gradient ({ratio:.2f} x)"
        )
        print(
            f"of {2 * LAYERS} gradients {started} had started and {ended} had ended before the backward pass had; "
            f"at most {most} were in flight at once"
        )
    if arguments.check and most < 2:
        sys.exit(1)


if __name__ == "__main__":
    main()
