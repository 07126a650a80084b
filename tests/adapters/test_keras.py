"""ronde.keras on each backend of Keras 3: model.fit on ranks, each with data of its own, against one process."""

import json
import os
import subprocess
import sys
import warnings
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_precision import double_precision

pytest.importorskip("keras")
if not hasattr(pytest.importorskip("keras"), "ops"):
    pytest.skip("Keras 3 is not installed", allow_module_level=True)

Environment = dict[str, str]
BACKENDS = {
    name: pytest.param(
        {"KERAS_BACKEND": name},
        id=name,
        marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
    )
    for name in ("tensorflow", "torch", "jax")
}
on_backends = pytest.mark.parametrize("environment", BACKENDS.values())
on_jax = pytest.mark.parametrize("environment", [BACKENDS["jax"]])

STEPS, BATCH = 20, 4
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"learning_rate": 0.01}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.02}),
    "clipped": ("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.1}),
    "ema": ("SGD", {"learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}),
}


def data(rank: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([7, rank])
    return random.normal(size=(steps * BATCH, 5)), random.normal(size=(steps * BATCH, 2))


def joined(ranks: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """The data of all ranks, so that a batch of one process is that of all ranks together."""
    x, y = zip(*(data(rank, steps) for rank in range(ranks)))
    return tuple(np.stack(each).reshape(ranks, steps, BATCH, -1).swapaxes(0, 1).reshape(ranks * steps * BATCH, -1)
                 for each in (x, y))  # fmt: skip


def make_model(seed: int = 0) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input([5]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2, use_bias=False)])


def make_optimizer(kind: str) -> Any:
    import keras

    name, options = OPTIMIZERS[kind]
    return getattr(keras.optimizers, name)(**options)


def fit(model: Any, optimizer: Any, xy: tuple[np.ndarray, np.ndarray], batch: int = BATCH, **options: Any) -> Any:
    model.compile(optimizer, "mse", **options.pop("compile", {}))
    return model.fit(*xy, batch_size=batch, **{"shuffle": False, "verbose": 0, **options})


def assert_close(got: list[np.ndarray], expected: list[np.ndarray], **tolerance: float) -> None:
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, **(tolerance or {"rtol": 1e-6, "atol": 1e-12}))


def assert_equal_everywhere(model: Any) -> None:
    """Bit by bit, on all ranks."""
    import ronde.keras as hvd

    for other in hvd.allgather_object(model.get_weights()):
        for mine, theirs in zip(model.get_weights(), other):
            np.testing.assert_array_equal(mine, theirs)


def start_callback() -> Any:
    import ronde.keras as hvd

    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


# ---- The optimizer ----


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_backends
@pytest.mark.ranks(2)
def test_fit_equals_one_process(environment: Environment, kind: str) -> None:
    import keras

    import ronde.keras as hvd

    assert keras.backend.backend() == environment["KERAS_BACKEND"]
    with double_precision():
        model = make_model(hvd.rank())
        fit(model, hvd.DistributedOptimizer(make_optimizer(kind)), data(hvd.rank()), callbacks=[start_callback()])
        assert_equal_everywhere(model)
        alone = make_model(0)
        before = alone.get_weights()
        fit(alone, make_optimizer(kind), joined(2), 2 * BATCH)
        assert_close(model.get_weights(), alone.get_weights())
        assert not np.allclose(before[0], model.get_weights()[0], rtol=1e-3)


@pytest.mark.parametrize("ways", [{"run_eagerly": True}, {"steps_per_execution": 4}], ids=str)
@on_backends
@pytest.mark.ranks(2)
def test_other_ways_of_running_steps(environment: Environment, ways: dict[str, Any]) -> None:
    import ronde.keras as hvd

    if environment["KERAS_BACKEND"] == "torch" and "steps_per_execution" in ways:
        pytest.skip("Keras on PyTorch has no steps_per_execution")
    with double_precision():
        model, alone = make_model(), make_model()
        fit(model, hvd.DistributedOptimizer(make_optimizer("adam")), data(hvd.rank(), 8), compile=ways)
        fit(alone, make_optimizer("adam"), joined(2, 8), 2 * BATCH)
        assert_close(model.get_weights(), alone.get_weights())


@on_backends
@pytest.mark.ranks(2)
def test_learning_rate_schedules(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    with double_precision():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8)
        model, alone = make_model(), make_model()
        fit(
            model,
            hvd.DistributedOptimizer(keras.optimizers.SGD(schedule)),
            data(hvd.rank(), 8),
            callbacks=[start_callback()],
        )
        fit(alone, keras.optimizers.SGD(schedule), joined(2, 8), 2 * BATCH)
        assert_close(model.get_weights(), alone.get_weights())


@pytest.mark.parametrize("how", ["sum", "mean", "own"])
@on_backends
@pytest.mark.ranks(2)
def test_gradients_accumulate(environment: Environment, how: str) -> None:
    """Clipping sees the gradients of all ranks and passes. The fifth pass stays where it is."""
    import keras

    import ronde.keras as hvd

    with double_precision():
        rate, clip = (0.1, 0.2) if how == "sum" else (0.2, 0.1)  # Keras gives means over passes
        options: dict[str, Any] = {"backward_passes_per_step": 2, "average_aggregated_gradients": how == "mean"}
        if how == "own":
            own = keras.optimizers.SGD(rate, global_clipnorm=clip, gradient_accumulation_steps=2)
            optimizer = hvd.DistributedOptimizer(own)
        else:
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, global_clipnorm=clip), **options)
        model, alone = make_model(), make_model()
        fit(model, optimizer, data(hvd.rank(), 5))
        fit(
            alone,
            keras.optimizers.SGD(0.2, global_clipnorm=0.1, gradient_accumulation_steps=2),
            joined(2, 5),
            2 * BATCH,
        )
        assert_close(model.get_weights(), alone.get_weights())
        assert int(optimizer.iterations) == int(alone.optimizer.iterations)


@on_backends
@pytest.mark.ranks(2)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(hvd.rank())
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
        x, y = data(hvd.rank(), 1)
        fit(model, optimizer, (x, y), callbacks=[start_callback()])
        assert type(model.optimizer).__name__ == "LossScaleOptimizer"
        assert_equal_everywhere(model)
        before, scale = model.get_weights(), float(model.optimizer.dynamic_scale)
        bad = np.where(hvd.rank() == 1, np.inf, x)
        model.fit(bad, y, batch_size=BATCH, verbose=0)
        assert_close(model.get_weights(), before, rtol=0)
        assert float(model.optimizer.dynamic_scale) == scale / 2
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert not np.array_equal(model.get_weights()[0], before[0])
        assert_equal_everywhere(model)
    finally:
        keras.config.set_dtype_policy("float32")


@on_backends
@pytest.mark.ranks(2)
def test_loss_scaling_accumulates(environment: Environment) -> None:
    """An explicit LossScaleOptimizer around one that accumulates."""
    import keras

    import ronde.keras as hvd

    def scaled() -> Any:
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    model, alone = make_model(), make_model()
    fit(model, hvd.DistributedOptimizer(scaled()), data(hvd.rank(), 4))
    fit(alone, scaled(), joined(2, 4), 2 * BATCH)
    assert_close(model.get_weights(), alone.get_weights(), rtol=1e-5, atol=1e-7)
    assert_equal_everywhere(model)


@on_backends
@pytest.mark.ranks(2)
def test_embeddings(environment: Environment) -> None:
    """Rows that several ranks, one or none use, some twice."""
    import keras

    import ronde.keras as hvd

    def make() -> Any:
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input([2], dtype="int32"), keras.layers.Embedding(9, 2), keras.layers.Flatten()])

    rows = np.array([[[0, 1], [1, 1]], [[2, 0], [5, 1]]])
    goals = np.arange(16.0).reshape(2, 2, 4)
    with double_precision():
        for options in ({}, {"sparse_as_dense": True}):
            model, alone = make(), make()
            mine = (rows[hvd.rank()], goals[hvd.rank()])
            fit(model, hvd.DistributedOptimizer(make_optimizer("momentum"), **options), mine, epochs=3)
            fit(alone, make_optimizer("momentum"), (rows.reshape(4, 2), goals.reshape(4, 4)), epochs=3)
            assert_close(model.get_weights(), alone.get_weights())


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@on_backends
@pytest.mark.ranks(2)
def test_compression(environment: Environment, compression: str) -> None:
    import ronde.keras as hvd

    model, exact, alone = make_model(), make_model(), make_model()
    how = getattr(hvd.Compression, compression)
    fit(model, hvd.DistributedOptimizer(make_optimizer("sgd"), compression=how), data(hvd.rank(), 3))
    fit(exact, hvd.DistributedOptimizer(make_optimizer("sgd")), data(hvd.rank(), 3))
    fit(alone, make_optimizer("sgd"), joined(2, 3), 2 * BATCH)
    assert_close(model.get_weights(), alone.get_weights(), atol=0.01 if compression == "bf16" else 0.002)
    assert not np.array_equal(model.get_weights()[0], exact.get_weights()[0])  # it was rounded on the way
    assert_equal_everywhere(model)


@pytest.mark.parametrize("options", [{"op": "Sum"}, {"gradient_predivide_factor": 4.0}, {"groups": 2}], ids=str)
@on_backends
@pytest.mark.ranks(2)
def test_options(environment: Environment, options: dict[str, Any]) -> None:
    import keras

    import ronde.keras as hvd

    with double_precision():
        rate = 0.1 if "op" in options else 0.2
        options = {key: getattr(hvd, value) if key == "op" else value for key, value in options.items()}
        model, alone = make_model(), make_model()
        fit(model, hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options), data(hvd.rank(), 5))
        fit(alone, keras.optimizers.SGD(0.2), joined(2, 5), 2 * BATCH)
        assert_close(model.get_weights(), alone.get_weights())


@on_backends
@pytest.mark.ranks(2)
def test_local_layers(environment: Environment) -> None:
    """A local layer's gradients stay on its rank; nobody calls that drift."""
    import keras

    import ronde.keras as hvd

    for scaled in (True, False):
        model, plain = make_model(), make_model()
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=model.layers[-1], scale_local_gradients=scaled
        )
        fit(model, optimizer, data(hvd.rank(), 1), callbacks=[start_callback()])
        fit(plain, keras.optimizers.SGD(0.05 if scaled else 0.1), data(hvd.rank(), 1))
        shared = hvd.allgather_object(model.get_weights()[0])
        np.testing.assert_array_equal(*shared)
        assert_close(model.get_weights()[2:], plain.get_weights()[2:], rtol=1e-5)
    with pytest.raises(ValueError, match="local_layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=3)
    with pytest.raises(ValueError, match="layer 'late' is not built"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=keras.layers.Dense(1, name="late"))


@pytest.mark.ranks(3)
def test_process_sets() -> None:
    import ronde.keras as hvd

    pair = hvd.add_process_set([0, 2])
    with double_precision():
        model, alone = make_model(hvd.rank()), make_model()
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0, process_set=pair),
            hvd.callbacks.MetricAverageCallback(process_set=pair),
        ]
        number = {0: 0, 2: 1}.get(hvd.rank(), 5)
        fit(
            model,
            hvd.DistributedOptimizer(make_optimizer("adam"), process_set=pair),
            data(number, 4),
            callbacks=callbacks,
        )
        if hvd.rank() == 1:
            alone = make_model(1)
            fit(alone, make_optimizer("adam"), data(5, 4))
        else:
            fit(alone, make_optimizer("adam"), joined(2, 4), 2 * BATCH)
        assert_close(model.get_weights(), alone.get_weights())


@on_backends
@pytest.mark.ranks(2)
def test_loops_of_the_users_own(environment: Environment) -> None:
    """Gradients handed to apply(), or to stateless_apply() inside of jit; clipped means of all ranks come out."""
    import keras

    import ronde.keras as hvd

    with double_precision():
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=1.4))
        variables = [keras.Variable(np.zeros(2)), keras.Variable(np.zeros(()))]
        optimizer.build(variables)
        grads = [
            keras.ops.convert_to_tensor(np.array([1.0, 2.0]) * hvd.rank()),
            keras.ops.convert_to_tensor(3.0 - hvd.rank()),
        ]
        if environment["KERAS_BACKEND"] == "jax":
            import jax

            step = jax.jit(optimizer.stateless_apply)
            states = [variable.value for variable in optimizer.variables]
            values, _ = step(states, grads, [variable.value for variable in variables])
        else:
            optimizer.apply(grads, variables)
            values = [variable.value for variable in variables]
        got = [keras.ops.convert_to_numpy(each) for each in values]
        assert_close(got, [-np.array([0.5, 1.0]), np.array(-1.4)])


@on_backends
@pytest.mark.ranks(2)
def test_it_is_still_the_optimizer_it_was(environment: Environment) -> None:
    import copy
    import pickle

    import keras

    import ronde.keras as hvd

    original = keras.optimizers.Adam(0.01, name="mine")
    optimizer = hvd.DistributedOptimizer(original)
    assert optimizer is original and isinstance(optimizer, keras.optimizers.Adam)
    assert type(optimizer).__name__ == "Adam" and optimizer.name == "mine"
    for plain in (
        type(optimizer).from_config(optimizer.get_config()),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert float(plain.learning_rate) == pytest.approx(0.01) and plain.name == "mine"
    model = make_model()
    fit(model, optimizer, data(hvd.rank(), 1))
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    assert_close(twin.get_weights(), model.get_weights())
    again = pickle.loads(pickle.dumps(model))
    assert_close(again.get_weights(), model.get_weights())
    assert type(copy.deepcopy(make_optimizer("adam"))).__name__ == "Adam"


@on_backends
@pytest.mark.ranks(2)
def test_wrong_calls(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    with pytest.raises(TypeError, match="needs an optimizer of Keras, not a builtins.str"):
        hvd.DistributedOptimizer("adam")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))
    with pytest.raises(ValueError, match="backward_passes_per_step is 2 .* gradient_accumulation_steps is 3"):
        accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        hvd.DistributedOptimizer(accumulating, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="MultiOptimizer cannot accumulate"):
        several = keras.optimizers.MultiOptimizer({"": keras.optimizers.SGD(0.1)})
        hvd.DistributedOptimizer(several, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="drift"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, drift="panic")
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateWarmupCallback(0.0)
    with pytest.raises(ValueError, match="needs the model"):
        hvd.broadcast_global_variables(0)


@pytest.mark.parametrize("environment", [BACKENDS["tensorflow"]])
@pytest.mark.ranks(2)
def test_xla_is_switched_off_with_one_warning(environment: Environment) -> None:
    import ronde.keras as hvd

    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, hvd.DistributedOptimizer(make_optimizer("sgd")), data(hvd.rank(), 2), compile={"jit_compile": True})
        model.fit(*data(hvd.rank(), 2), verbose=0)
    assert [str(each.message) for each in caught if "jit_compile" in str(each.message)] == [
        "jit_compile is switched off for this model: XLA cannot contain ronde's operations"
    ]
    assert_equal_everywhere(model)


@pytest.mark.parametrize("environment", [BACKENDS["torch"]])
@pytest.mark.ranks(2, deadline=110)
def test_torch_compile(environment: Environment) -> None:
    import ronde.keras as hvd

    model, alone = make_model(), make_model()
    fit(model, hvd.DistributedOptimizer(make_optimizer("adam")), data(hvd.rank(), 4), compile={"jit_compile": True})
    fit(alone, make_optimizer("adam"), joined(2, 4), 2 * BATCH, compile={"jit_compile": False})
    assert_close(model.get_weights(), alone.get_weights(), rtol=1e-4, atol=1e-6)
    assert_equal_everywhere(model)


@on_backends
@pytest.mark.ranks(2)
def test_an_optimizer_that_becomes_distributed_between_two_fits(environment: Environment) -> None:
    """What was compiled before does not go on; nor when a variable becomes local."""
    import ronde.keras as hvd

    with double_precision():
        model, alone = make_model(), make_model()
        fit(model, make_optimizer("sgd"), joined(2, 2), 2 * BATCH)
        hvd.DistributedOptimizer(model.optimizer)
        model.fit(*data(hvd.rank(), 2), batch_size=BATCH, shuffle=False, verbose=0)
        fit(alone, make_optimizer("sgd"), joined(2, 2), 2 * BATCH, epochs=2)
        assert_close(model.get_weights(), alone.get_weights())
        model.optimizer.register_local_var(model.trainable_variables[-1])
        model.fit(*data(hvd.rank(), 1), batch_size=BATCH, verbose=0)
        everywhere = hvd.allgather_object(model.get_weights())
        np.testing.assert_array_equal(everywhere[0][0], everywhere[1][0])
        assert not np.array_equal(everywhere[0][-1], everywhere[1][-1])


@on_jax
@pytest.mark.ranks(2)
def test_many_optimizers_in_one_compiled_step(environment: Environment) -> None:
    """XLA would run independent ones side by side, on few threads, in an order of its own: the costly ones later."""
    import jax
    import keras

    import ronde.keras as hvd

    count = 8
    variables = [keras.Variable(np.zeros(64, np.float32)) for _ in range(count)]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(count)]
    for optimizer, variable in zip(optimizers, variables):
        optimizer.build([variable])

    @jax.jit
    def step(scale: Any) -> Any:
        results = []
        for number, (optimizer, variable) in enumerate(zip(optimizers, variables)):
            cost = 40 * ((number if hvd.rank() else count - number) % count)
            slow = jax.lax.fori_loop(0, cost, lambda _, a: jax.numpy.tanh(a @ a), jax.numpy.ones((64, 64)) * scale)
            grad = jax.numpy.full(64, scale * (number + 1)) + 0 * slow[0]
            states = [each.value for each in optimizer.variables]
            results.append(optimizer.stateless_apply(states, [grad], [variable.value])[0][0])
        return results

    for _ in range(20):
        for number, value in enumerate(step(hvd.rank() + 1.0)):
            np.testing.assert_array_equal(value, np.full(64, -1.5 * (number + 1)))


@on_jax
@pytest.mark.ranks(2)
def test_jax_without_foreign_functions(environment: Environment) -> None:
    """A release of JAX before jax.ffi: a callback does the work."""
    import ronde.keras as hvd
    from ronde.keras import _jax

    has_target, _jax._has_target = _jax._has_target, lambda: False
    try:
        with double_precision():
            model, alone = make_model(), make_model()
            fit(model, hvd.DistributedOptimizer(make_optimizer("adam")), data(hvd.rank(), 5))
            fit(alone, make_optimizer("adam"), joined(2, 5), 2 * BATCH)
            assert_close(model.get_weights(), alone.get_weights())
    finally:
        _jax._has_target = has_target


@on_backends
@pytest.mark.ranks(2)
def test_different_models_are_an_error_in_training(environment: Environment) -> None:
    """Without the callback, too; and the next model trains."""
    import keras

    import ronde.keras as hvd

    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(2 + hvd.rank()), keras.layers.Dense(2)])
    with pytest.raises(Exception, match=r"(?s)gradient.*disagree about shape.* on rank 0; .* on rank 1"):
        fit(model, hvd.DistributedOptimizer(make_optimizer("sgd")), data(hvd.rank(), 1))
    hvd.barrier()
    model = make_model()
    fit(model, hvd.DistributedOptimizer(make_optimizer("sgd")), data(hvd.rank(), 1))
    assert_equal_everywhere(model)


# ---- Values ----


@on_backends
@pytest.mark.ranks(2)
def test_values(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    rank = hvd.rank()
    tensor = keras.ops.convert_to_tensor(np.arange(4, dtype=np.float32) * (rank + 1))
    for value in (tensor, keras.ops.convert_to_numpy(tensor), keras.Variable(tensor)):
        np.testing.assert_array_equal(hvd.allreduce(value), np.arange(4) * 1.5)
        np.testing.assert_array_equal(
            hvd.allreduce(value, op=hvd.Sum, compression=hvd.Compression.fp16), np.arange(4) * 3
        )
        np.testing.assert_array_equal(hvd.allgather(value), [0, 1, 2, 3, 0, 2, 4, 6])
        np.testing.assert_array_equal(hvd.broadcast(value, 1), np.arange(4) * 2)
        np.testing.assert_array_equal(hvd.reducescatter(value), (np.arange(4) * 1.5)[2 * rank : 2 * rank + 2])
    assert hvd.allreduce(float(rank), name="a number") == 0.5
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.join() in (0, 1)


@on_backends
@pytest.mark.ranks(2)
def test_broadcast_of_a_model(environment: Environment) -> None:
    import ronde.keras as hvd

    model = make_model(hvd.rank())
    model.compile(make_optimizer("adam"), "mse")
    if hvd.rank() == 1:
        fit(model, make_optimizer("adam"), data(hvd.rank(), 2))
    hvd.broadcast_global_variables(1, model)
    assert int(model.optimizer.iterations) == 2
    assert_equal_everywhere(model)
    states = hvd.allgather_object([np.asarray(hvd.allreduce(each)) for each in model.optimizer.variables])
    assert_close(*states, rtol=0)


# ---- Files ----


@on_backends
@pytest.mark.ranks(2)
def test_save_load_and_train_on(environment: Environment, tmp_path: Path) -> None:
    import keras

    import ronde.keras as hvd

    file = tmp_path / "model.keras"
    model = make_model(hvd.rank())
    fit(model, hvd.DistributedOptimizer(make_optimizer("adam")), data(hvd.rank()), callbacks=[start_callback()])
    if hvd.rank() == 0:
        model.save(file)
        assert "ronde" not in zipfile.ZipFile(file).read("config.json").decode()
    hvd.barrier()
    loaded = hvd.load_model(file, compression=hvd.Compression.none)
    assert int(loaded.optimizer.iterations) == STEPS
    for each in (model, loaded):
        each.fit(*data(hvd.rank() + 2, 4), batch_size=BATCH, shuffle=False, verbose=0)
        assert_equal_everywhere(each)
    assert_close(loaded.get_weights(), model.get_weights(), rtol=0)

    plain = keras.models.load_model(file)  # each rank for itself
    assert type(plain.optimizer) is type(keras.optimizers.Adam())  # a class of the backend's
    plain.fit(*data(hvd.rank() + 2, 4), batch_size=BATCH, shuffle=False, verbose=0)
    assert not np.array_equal(*hvd.allgather_object(plain.get_weights()[0]))


@pytest.mark.parametrize("environment", [BACKENDS["torch"]])
@pytest.mark.ranks(2)
def test_files_need_no_ronde(environment: Environment, tmp_path: Path) -> None:
    import ronde.keras as hvd

    model = make_model()
    fit(model, hvd.DistributedOptimizer(make_optimizer("adam")), data(hvd.rank(), 2))
    if hvd.rank() == 0:
        model.save(tmp_path / "model.keras")
        program = (
            "import sys; sys.modules['ronde'] = None\n"
            "import keras, json; model = keras.models.load_model(sys.argv[1])\n"
            "print(json.dumps([type(model.optimizer).__name__, int(model.optimizer.iterations),"
            " [each.tolist() for each in model.get_weights()]]))"
        )
        argv = [sys.executable, "-c", program, str(tmp_path / "model.keras")]
        output = subprocess.run(
            argv, check=True, capture_output=True, timeout=60, text=True, env=dict(os.environ)
        ).stdout
        name, steps, weights = json.loads(output)
        assert (name, steps) == ("Adam", 2)
        assert_close([np.array(each) for each in weights], model.get_weights(), rtol=0)


@on_backends
@pytest.mark.ranks(2)
def test_loading_classes_of_the_users_own(environment: Environment, tmp_path: Path) -> None:
    import keras

    import ronde.keras as hvd

    class Halved(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient / 2, variable, learning_rate)

    model, alone = make_model(), make_model()
    fit(model, hvd.DistributedOptimizer(Halved(0.2)), data(hvd.rank(), 3))
    file = tmp_path / f"model{hvd.rank()}.keras"
    model.save(file)
    loaded = hvd.load_model(file, custom_optimizers=[Halved])
    loaded.fit(*data(hvd.rank(), 3), batch_size=BATCH, shuffle=False, verbose=0)
    for _ in range(2):
        fit(alone, keras.optimizers.SGD(0.1), joined(2, 3), 2 * BATCH)
    assert_close(loaded.get_weights(), alone.get_weights(), rtol=1e-4, atol=1e-6)
    assert_equal_everywhere(loaded)
    assert getattr(hvd.load_model(file, custom_optimizers=[Halved], compile=False), "optimizer", None) is None
    unwrapped = make_model()
    unwrapped.save(file)
    assert getattr(hvd.load_model(file), "optimizer", None) is None  # never compiled


# ---- Callbacks ----


@on_backends
@pytest.mark.ranks(2)
def test_models_that_are_built_late_start_alike(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
    history = fit(
        model,
        hvd.DistributedOptimizer(make_optimizer("adam")),
        data(hvd.rank(), 6),
        epochs=2,
        callbacks=[start_callback()],
    )
    assert len(history.history["loss"]) == 2
    assert_equal_everywhere(model)


@on_backends
@pytest.mark.ranks(2)
def test_restored_on_one_rank(environment: Environment) -> None:
    """Rank 1 has trained before; the others take its weights and its optimizer's state."""
    import ronde.keras as hvd

    with double_precision():
        model = make_model(hvd.rank())
        model.compile(hvd.DistributedOptimizer(make_optimizer("adam")), "mse")
        reference = make_model(1)
        fit(reference, make_optimizer("adam"), data(9, 4))
        if hvd.rank() == 1:
            model.set_weights(reference.get_weights())
            model.optimizer.build(model.trainable_variables)
            for mine, theirs in zip(model.optimizer.variables, reference.optimizer.variables):
                mine.assign(theirs)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
        model.fit(*data(hvd.rank(), 4), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[callback])
        assert callback.broadcast_done and int(model.optimizer.iterations) == 8
        reference.fit(*joined(2, 4), batch_size=2 * BATCH, shuffle=False, verbose=0)
        assert_close(model.get_weights(), reference.get_weights())


@on_backends
@pytest.mark.ranks(2)
def test_drift_is_found(environment: Environment) -> None:
    import ronde.keras as hvd

    def train(drift: str, optimizer: Any) -> Any:
        model = make_model()
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, drift=drift)
        fit(model, optimizer, data(hvd.rank(), 2), epochs=2, callbacks=[callback])
        return model

    with pytest.raises(RuntimeError, match="after epoch 1 .* first in '.*kernel'.* is not distributed: wrap it"):
        train("raise", make_optimizer("sgd"))
    with pytest.warns(UserWarning, match="different weights"):
        train("warn", make_optimizer("sgd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train("ignore", make_optimizer("sgd"))
        assert_equal_everywhere(train("raise", hvd.DistributedOptimizer(make_optimizer("sgd"))))


@on_backends
@pytest.mark.ranks(2)
def test_different_models_are_an_error_at_the_start(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(2 + hvd.rank(), name="odd"), keras.layers.Dense(2)])
    with pytest.raises(
        hvd.ArgumentError, match=r"variable 0 is '.*odd/kernel', \[5, 2\].* on rank 0 and .*\[5, 3\].*rank 1"
    ):
        fit(model, hvd.DistributedOptimizer(make_optimizer("sgd")), data(hvd.rank(), 1), callbacks=[start_callback()])
    fit(
        make_model(), hvd.DistributedOptimizer(make_optimizer("sgd")), data(hvd.rank(), 1), callbacks=[start_callback()]
    )


@on_backends
@pytest.mark.ranks(2)
def test_different_numbers_of_batches_are_an_error_at_the_start(environment: Environment) -> None:
    import ronde.keras as hvd

    with pytest.raises(hvd.ArgumentError, match="batches per epoch: 3 on rank 0, 5 on rank 1"):
        optimizer = hvd.DistributedOptimizer(make_optimizer("sgd"))
        fit(make_model(), optimizer, data(hvd.rank(), 3 + 2 * hvd.rank()), callbacks=[start_callback()])
    optimizer = hvd.DistributedOptimizer(make_optimizer("sgd"))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, drift="ignore")
    fit(make_model(), optimizer, data(hvd.rank(), 3 + 2 * hvd.rank()), callbacks=[callback])
    assert hvd.join() == 1


@on_backends
@pytest.mark.ranks(2)
def test_metrics_are_averaged(environment: Environment) -> None:
    """Names that one rank does not have, a value that is no number; those that come later and History see the means."""
    import keras

    import ronde.keras as hvd

    rank = hvd.rank()
    seen = []

    class Early(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs.clear()
            logs.update([{"loss": 1.0, "text": "a"}, {"lr": 0.1, "loss": 3.0, "text": "b"}][rank])

    class Late(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(dict(logs))

    callbacks = [Early(), hvd.callbacks.MetricAverageCallback(), Late()]
    history = fit(make_model(), hvd.DistributedOptimizer(make_optimizer("sgd")), data(rank, 1), callbacks=callbacks)
    assert seen == [{"loss": 2.0, "lr": 0.1, "text": "ab"[rank]}]
    assert history.history["loss"] == [2.0] and history.history["lr"] == [0.1]


@on_backends
@pytest.mark.ranks(2)
def test_warm_up(environment: Environment) -> None:
    """0.1 after two epochs of four batches, from 0.05; velocities as if the rate had always been the new one."""
    import keras

    import ronde.keras as hvd

    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(float(hvd.allreduce(self.model.optimizer.learning_rate)))

    with double_precision():
        model, alone = make_model(), make_model()
        warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=hvd.rank() == 0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        history = fit(model, optimizer, data(hvd.rank(), 4), epochs=3, callbacks=[warm_up, Watch()])
        expected = [0.05 * (1 + step / 8) for step in range(1, 9)] + [0.1] * 4
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
        np.testing.assert_allclose(history.history["lr"], [expected[3], expected[7], 0.1], rtol=1e-6)
        # The same in NumPy's words: u = 0.9 u + grad, w = w - rate u.
        x, y = joined(2, 4)
        sums = [np.zeros_like(each) for each in alone.get_weights()]
        for step, rate in enumerate(expected):
            place = step % 4 * 2 * BATCH
            grads = gradients(alone.get_weights(), x[place : place + 2 * BATCH], y[place : place + 2 * BATCH])
            sums = [0.9 * each + grad for each, grad in zip(sums, grads)]
            alone.set_weights([weight - np.float32(rate) * each for weight, each in zip(alone.get_weights(), sums)])
        assert_close(model.get_weights(), alone.get_weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("environment", [BACKENDS["tensorflow"], BACKENDS["jax"]])
@pytest.mark.ranks(2)
def test_warm_up_ends_where_several_steps_are_one_call(environment: Environment) -> None:
    import ronde.keras as hvd

    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    optimizer = hvd.DistributedOptimizer(make_optimizer("momentum"))
    together = {"steps_per_execution": 4}
    history = fit(make_model(), optimizer, data(hvd.rank(), 4), epochs=2, compile=together, callbacks=[warm_up])
    assert history.history["lr"][-1] == pytest.approx(0.1)


def gradients(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of make_model()'s mean squared error, by hand."""
    kernel, bias, last = weights
    hidden = np.tanh(x @ kernel + bias)
    outer = 2 * (hidden @ last - y) / y.size
    inner = outer @ last.T * (1 - hidden**2)
    return [x.T @ inner, inner.sum(0), hidden.T @ outer]


@on_backends
@pytest.mark.ranks(2)
def test_learning_rate_schedule_callback(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    callbacks = [
        hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0, end_epoch=1),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3),
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.01, start_epoch=3),
    ]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.7, momentum=0.9))
    history = fit(make_model(), optimizer, data(hvd.rank(), 2), epochs=5, callbacks=callbacks)
    np.testing.assert_allclose(history.history["lr"], [0.1, 0.05, 0.025, 0.001, 0.001], rtol=1e-6)
    halving = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, staircase=False)
    for steps in (2, 4):  # the same callback in trainings of other lengths
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.7))
        history = fit(make_model(), optimizer, data(hvd.rank(), steps), callbacks=[halving])
        assert history.history["lr"][0] == pytest.approx(0.1 * 0.5 ** ((steps - 1) / steps))
    muon = hvd.DistributedOptimizer(keras.optimizers.Muon(0.5))
    model = make_model()
    fit(model, muon, data(hvd.rank(), 1))
    before = [np.array(keras.ops.convert_to_numpy(each)) for each in muon.variables[2:]]
    callbacks[0].set_model(model)
    callbacks[0]._set(0)  # its momentum does not contain the learning rate
    assert_close([keras.ops.convert_to_numpy(each) for each in muon.variables[2:]], before, rtol=0)
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.8))
    with pytest.raises(ValueError, match="LearningRateSchedule"):
        fit(make_model(), hvd.DistributedOptimizer(scheduled), data(hvd.rank(), 1), callbacks=callbacks)


@on_backends
@pytest.mark.ranks(2)
def test_ranks_decide_alike(environment: Environment, tmp_path: Path) -> None:
    """Validation data of unequal size, early stopping by the means, the best model on rank 0; and on from epoch 3."""
    import keras

    import ronde.keras as hvd

    rank = hvd.rank()
    x, y = data(5, 3)
    validation = (x[: 3 + 4 * rank], y[: 3 + 4 * rank] + 2 * rank)
    file = tmp_path / f"best{rank}.keras"

    def callbacks() -> list[Any]:
        return [
            start_callback(),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05),
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
            hvd.callbacks.BestModelCheckpoint(monitor="val_loss", filepath=str(file)),
        ]

    model = make_model(rank)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    history = fit(model, optimizer, data(rank, 3), epochs=30, validation_data=validation, callbacks=callbacks())
    assert_equal_everywhere(model)
    first, second = hvd.allgather_object(history.history)
    assert first == second and 1 < len(first["loss"]) < 30
    assert file.exists() == (rank == 0)
    if rank == 0:
        best = keras.models.load_model(file)
        assert int(best.optimizer.iterations) == 3 * (1 + int(np.argmin(first["val_loss"])))
    again = model.fit(
        *data(rank, 3),
        batch_size=BATCH,
        verbose=0,
        epochs=5,
        initial_epoch=3,
        validation_data=validation,
        callbacks=callbacks(),
    )
    assert again.epoch[0] == 3
    assert_equal_everywhere(model)
    with pytest.raises(ValueError, match="does not know where to write"):
        fit(make_model(), make_optimizer("sgd"), data(rank, 1), callbacks=[hvd.callbacks.BestModelCheckpoint()])


# ---- Failures ----


@on_jax
@pytest.mark.ranks(2, dies=(1,))
def test_a_rank_that_dies_in_fit(environment: Environment) -> None:
    import keras

    import ronde.keras as hvd

    class Die(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and hvd.rank() == 1:
                os._exit(3)

    with pytest.raises(Exception, match=r"rank 1.*exit code 3"):
        fit(make_model(), hvd.DistributedOptimizer(make_optimizer("sgd")), data(hvd.rank()), callbacks=[Die()])
