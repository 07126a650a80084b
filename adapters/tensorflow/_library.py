"""Loads the ops, which TensorFlow then knows by name."""

import ctypes
from pathlib import Path
from typing import Any

import tensorflow as tf
from ronde import _core


def _load() -> Any:
    path = str(Path(_core.__file__).with_name("libronde_tensorflow.so"))
    try:
        ops = tf.load_op_library(path)
        library = ctypes.CDLL(path)
    except (OSError, tf.errors.OpError) as error:
        raise ImportError(f"ronde.tensorflow: TensorFlow {tf.__version__} cannot load {path}: {error}") from error
    library.ronde_tensorflow_error.restype = ctypes.c_char_p
    problem = library.ronde_tensorflow_error().decode()
    if problem:
        raise ImportError(
            f"ronde.tensorflow works with TensorFlow 2.13 and later; with this one, {tf.__version__}, it does not: {problem}",
            name="tensorflow",
        )
    return ops


ops = _load()
