"""What a distributed optimizer costs on one rank: an epoch of Keras' model.fit with it and without, by turns, on each
backend that is installed. Milliseconds per batch of 32 images, median over epochs.

    python benchmarks/keras_fit.py [--json] [--check]
"""

import argparse
import json
import os
import sys
import time
from importlib.util import find_spec
from statistics import median
from typing import Any

import ranks

BACKENDS = ("tensorflow", "torch", "jax")
BATCH, BATCHES, EPOCHS = 32, 40, 9
LIMIT = 1.05
TIMEOUT = 300.0


def work() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import numpy as np

    import ronde.keras as hvd

    hvd.init()
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * BATCHES, 28, 28, 1)).astype(np.float32)
    y = random.integers(0, 10, size=BATCH * BATCHES)

    def model(optimizer: Any) -> Any:
        made = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(16, 5, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(32, 5, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    models = {
        "plain": model(keras.optimizers.Adam()),
        "distributed": model(hvd.DistributedOptimizer(keras.optimizers.Adam())),
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    for epoch in range(EPOCHS + 1):  # the first compiles
        for name, each in models.items():
            start = time.perf_counter()
            each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            if epoch:
                times[name].append((time.perf_counter() - start) / BATCHES * 1e3)
    ranks.report(hvd.rank(), {name: median(values) for name, values in times.items()})
    hvd.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    if ranks.worker_folder():
        work()
        return
    results = {}
    for backend in BACKENDS:
        if find_spec(backend) is not None:
            os.environ["KERAS_BACKEND"] = backend
            results[backend] = ranks.start(__file__, 1, [], TIMEOUT)[0]
    ratios = {backend: times["distributed"] / times["plain"] for backend, times in results.items()}
    if arguments.json:
        print(json.dumps({"machine": ranks.machine(), "results": results, "ratios": ratios}, indent=1))
    else:
        print(f"{'':>12} {'distributed':>12} {'plain':>12} {'ratio':>10}")
        for backend, times in results.items():
            missed = "  MISSED" * (ratios[backend] > LIMIT)
            print(
                f"{backend:>12} {times['distributed']:>9.2f} ms {times['plain']:>9.2f} ms {ratios[backend]:>10.3f} "
                f"(<= {LIMIT:g}){missed}"
            )
    if arguments.check and max(ratios.values()) > LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
