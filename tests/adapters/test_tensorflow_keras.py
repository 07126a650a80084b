"""ronde.tensorflow.keras: tf.keras, which is Keras 3, and Keras 2 with TF_USE_LEGACY_KERAS=1."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_keras
from test_keras import BATCH, Environment, assert_close, data, joined

pytest.importorskip("tensorflow")

KERAS_2 = pytest.param(
    {"TF_USE_LEGACY_KERAS": "1"},
    id="keras2",
    marks=pytest.mark.skipif(find_spec("tf_keras") is None, reason="tf_keras is not installed"),
)
on_both = pytest.mark.parametrize("environment", [test_keras.BACKENDS["tensorflow"], KERAS_2])
on_keras_2 = pytest.mark.parametrize("environment", [KERAS_2])
LEGACY = {"legacy_momentum": ("SGD", {"learning_rate": 0.05, "momentum": 0.9}), "legacy_adam": ("Adam", {})}


def make_model(seed: int = 0) -> Any:
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input([5]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2, use_bias=False)])


def make_optimizer(kind: str) -> Any:
    import tensorflow as tf

    optimizers = tf.keras.optimizers.legacy if kind in LEGACY else tf.keras.optimizers
    name, options = {**test_keras.OPTIMIZERS, **LEGACY}[kind]
    return getattr(optimizers, name)(**options)


def fit(model: Any, optimizer: Any, xy: tuple[np.ndarray, np.ndarray], batch: int = BATCH, **options: Any) -> Any:
    model.compile(optimizer, "mse")
    return model.fit(*xy, batch_size=batch, **{"shuffle": False, "verbose": 0, **options})


def assert_equal_everywhere(model: Any) -> None:
    import ronde.tensorflow.keras as hvd

    first, second = hvd.allgather_object(model.get_weights())
    assert_close(first, second, rtol=0)


@on_both
@pytest.mark.ranks(2)
def test_which_keras_it_is(environment: Environment) -> None:
    import tensorflow as tf

    import ronde.tensorflow.keras as hvd
    from ronde.tensorflow.keras import callbacks

    assert hasattr(tf.keras, "ops") == ("KERAS_BACKEND" in environment)
    assert issubclass(callbacks.MetricAverageCallback, tf.keras.callbacks.Callback)
    assert hvd.callbacks is callbacks
    np.testing.assert_array_equal(hvd.allreduce(tf.constant([1.0, 2.0]) * hvd.rank(), op=hvd.Sum), [1, 2])
    np.testing.assert_array_equal(hvd.allreduce(3.0, compression=hvd.Compression.fp16), 3)
    np.testing.assert_array_equal(hvd.allgather(tf.Variable([hvd.rank()])), [0, 1])


@pytest.mark.parametrize("environment", [test_keras.BACKENDS["torch"]])
@pytest.mark.ranks(1)
def test_another_backend_is_refused(environment: Environment) -> None:
    with pytest.raises(ImportError, match="KERAS_BACKEND is torch: import ronde.keras"):
        import ronde.tensorflow.keras  # noqa: F401


@on_keras_2
@pytest.mark.ranks(1)
def test_keras_3_refuses_optimizers_of_keras_2(environment: Environment) -> None:
    import ronde.keras as hvd

    with pytest.raises(TypeError, match="one of Keras 2: import ronde.tensorflow.keras"):
        hvd.DistributedOptimizer(make_optimizer("adam"))


@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw", "clipped", *LEGACY])
@on_keras_2
@pytest.mark.ranks(2)
def test_fit_equals_one_process(environment: Environment, kind: str) -> None:
    import ronde.tensorflow.keras as hvd

    model, alone = make_model(hvd.rank()), make_model(0)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    optimizer = make_optimizer(kind)
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    fit(model, optimizer, data(hvd.rank()), callbacks=[start])
    assert_equal_everywhere(model)
    fit(alone, make_optimizer(kind), joined(2), 2 * BATCH)
    assert_close(model.get_weights(), alone.get_weights(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["momentum", "legacy_momentum"])
@on_keras_2
@pytest.mark.ranks(2)
def test_gradients_accumulate(environment: Environment, kind: str) -> None:
    """Over two passes, in one batch: four times the batch. The fifth stays where it is."""
    import ronde.tensorflow.keras as hvd

    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(kind), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    fit(model, optimizer, data(hvd.rank(), 5))
    x, y = joined(2, 5)
    fit(alone, make_optimizer(kind), (x[: 16 * 2], y[: 16 * 2]), 4 * BATCH)
    assert int(optimizer.iterations) == 2
    assert_close(model.get_weights(), alone.get_weights(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "legacy_adam"])
@on_keras_2
@pytest.mark.ranks(2)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(environment: Environment, kind: str) -> None:
    import tensorflow as tf

    import ronde.tensorflow.keras as hvd

    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model(hvd.rank())
        x, y = data(hvd.rank(), 1)
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        fit(model, hvd.DistributedOptimizer(make_optimizer(kind)), (x, y), callbacks=[start])
        assert "LossScaleOptimizer" in type(model.optimizer).__name__
        before, scale = model.get_weights(), float(model.optimizer.loss_scale)
        model.fit(np.where(hvd.rank() == 1, np.inf, x), y, batch_size=BATCH, verbose=0)
        assert_close(model.get_weights(), before, rtol=0)
        assert float(model.optimizer.loss_scale) == scale / 2
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert not np.array_equal(model.get_weights()[0], before[0])
        assert_equal_everywhere(model)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("kind", ["adam", "legacy_adam"])
@on_keras_2
@pytest.mark.ranks(2)
def test_save_load_and_train_on(environment: Environment, kind: str, tmp_path: Path) -> None:
    import tensorflow as tf

    import ronde.tensorflow.keras as hvd

    file = tmp_path / ("model.h5" if kind in LEGACY else "model.keras")
    model = make_model(hvd.rank())
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, hvd.DistributedOptimizer(make_optimizer(kind)), data(hvd.rank()), callbacks=[start])
    if hvd.rank() == 0:
        model.save(file)
    hvd.barrier()
    loaded = hvd.load_model(file)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    for each in (model, loaded):
        each.fit(*data(hvd.rank() + 2, 4), batch_size=BATCH, shuffle=False, verbose=0)
        assert_equal_everywhere(each)
    assert_close(loaded.get_weights(), model.get_weights(), rtol=1e-6)
    plain = tf.keras.models.load_model(file)
    plain.fit(*data(hvd.rank() + 2, 4), batch_size=BATCH, shuffle=False, verbose=0)
    assert not np.array_equal(*hvd.allgather_object(plain.get_weights()[0]))


@on_keras_2
@pytest.mark.ranks(2)
def test_xla_is_switched_off(environment: Environment) -> None:
    import ronde.tensorflow.keras as hvd

    model = make_model()
    model.compile(hvd.DistributedOptimizer(make_optimizer("adam")), "mse", jit_compile=True)
    with pytest.warns(UserWarning, match="jit_compile is switched off"):
        model.fit(*data(hvd.rank(), 2), batch_size=BATCH, verbose=0)
    assert_equal_everywhere(model)


@pytest.mark.parametrize("kind", ["adam", "legacy_adam"])
@on_keras_2
@pytest.mark.ranks(2)
def test_restored_on_one_rank(environment: Environment, kind: str) -> None:
    import ronde.tensorflow.keras as hvd

    model = make_model(hvd.rank())
    model.compile(hvd.DistributedOptimizer(make_optimizer(kind)), "mse")
    if hvd.rank() == 1:
        reference = make_model(1)
        fit(reference, make_optimizer(kind), data(9, 4))
        model.set_weights(reference.get_weights())
        if kind == "adam":
            model.optimizer.build(model.trainable_variables)
        else:
            model.optimizer._create_all_weights(model.trainable_variables)
        for mine, theirs in zip(model.optimizer.variables, reference.optimizer.variables) if kind == "adam" else ():
            mine.assign(theirs)
        if kind != "adam":
            model.optimizer.set_weights(reference.optimizer.get_weights())
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    model.fit(*data(hvd.rank(), 4), batch_size=BATCH, verbose=0, callbacks=[start])
    assert int(model.optimizer.iterations) == 8
    assert_equal_everywhere(model)


@on_keras_2
@pytest.mark.ranks(2)
def test_callbacks(environment: Environment) -> None:
    import tensorflow as tf

    import ronde.tensorflow.keras as hvd

    def callbacks() -> list[Any]:
        return [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
        ]

    model = tf.keras.Sequential([tf.keras.layers.Dense(3, "tanh"), tf.keras.layers.Dense(2)])  # built late
    optimizer = hvd.DistributedOptimizer(make_optimizer("momentum"))
    history = fit(model, optimizer, data(hvd.rank(), 4), epochs=3, callbacks=callbacks())
    assert_equal_everywhere(model)
    first, second = hvd.allgather_object(history.history)
    assert first == second
    np.testing.assert_allclose(first["lr"], [0.075, 0.1, 0.1], rtol=1e-6)
    with pytest.raises(RuntimeError, match="different weights"):
        fit(make_model(), make_optimizer("momentum"), data(hvd.rank(), 1), callbacks=callbacks())
