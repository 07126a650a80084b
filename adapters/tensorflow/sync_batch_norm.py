"""Batch normalization over the batches of all ranks.

One collective: every rank's mean, variance and number of values, combined as in T. F. Chan, G. H. Golub, R. J. LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances" (1979), which does not cancel as a mean of
squares does. The gradient goes back the same way.
"""

from typing import Any

import keras

import tensorflow as tf
from ronde._core import ArgumentError
from ronde.process_sets import ProcessSet, global_process_set
from ronde.tensorflow.mpi_ops import allgather


@keras.saving.register_keras_serializable(package="ronde")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """keras.layers.BatchNormalization with the statistics of all ranks' batches, which may differ in size.

    Args:
        process_set: the ranks whose batches count together.
        Others as keras.layers.BatchNormalization's.
    """

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        if kwargs.pop("synchronized", False):
            raise ArgumentError("SyncBatchNormalization synchronizes through ronde: leave out `synchronized`")
        if keras.config.backend() != "tensorflow":
            raise ArgumentError(f"SyncBatchNormalization needs Keras on TensorFlow, not on {keras.config.backend()}")
        super().__init__(*args, **kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Mean and variance of each channel. Inputs: (batch, ..., channels, ...); mask: their shape but the last."""
        channels = inputs.shape[self.axis]
        axes = [axis for axis in range(len(inputs.shape)) if axis != self.axis % len(inputs.shape)]
        weights = (
            tf.ones_like(inputs) if mask is None else tf.cast(mask, inputs.dtype)[..., None] * tf.ones_like(inputs)
        )
        count = tf.reduce_sum(weights) / channels
        mean = tf.math.divide_no_nan(tf.reduce_sum(inputs * weights, axes, keepdims=True), count)
        squares = tf.reduce_sum(tf.math.squared_difference(inputs, mean) * weights, axes)
        row = tf.concat([tf.reshape(mean, [channels]), tf.math.divide_no_nan(squares, count), count[None]], 0)
        rows = allgather(row[None], process_set=self._process_set)
        means, variances, counts = tf.split(rows, [channels, channels, 1], 1)
        total = tf.reduce_sum(counts)
        mean = tf.math.divide_no_nan(tf.reduce_sum(means * counts, 0), total)
        deviations = (variances + tf.math.squared_difference(means, mean)) * counts
        return mean, tf.math.divide_no_nan(tf.reduce_sum(deviations, 0), total)
