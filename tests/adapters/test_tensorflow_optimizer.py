"""Distributed optimizers and gradient tapes of TensorFlow, against one process on the joined batch."""

from typing import Any, Callable

import numpy as np
import pytest
from keras_precision import double_precision

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1

STEPS = 20
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
    "rmsprop": lambda: v1.train.RMSPropOptimizer(0.01),
}


def data(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([rank, step])
    return random.normal(size=(4, 5)), random.normal(size=(4, 2))


def start() -> list[np.ndarray]:
    random = np.random.default_rng(7)
    return [random.normal(size=(5, 3)), random.normal(size=3), random.normal(size=(3, 2))]


def loss(weights: list[Any], x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.tanh(x @ weights[0] + weights[1]) @ weights[2] - y))


def joined(ranks: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    batches = [data(rank, step) for rank in range(ranks)]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def in_session(make: Callable[[], Any], batches: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """The weights after training in a graph."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y = v1.placeholder(tf.float64, [None, 5]), v1.placeholder(tf.float64, [None, 2])
        weights = [v1.get_variable(f"w{n}", initializer=value) for n, value in enumerate(start())]
        train = make().minimize(loss(weights, x, y))
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for batch in batches:
            session.run(train, {x: batch[0], y: batch[1]})
        return session.run(weights)


def assert_close(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(got, expected):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.ranks(2)
def test_session_training_equals_one_process(kind: str) -> None:
    import ronde.tensorflow as hvd

    make = OPTIMIZERS[kind]
    got = in_session(lambda: hvd.DistributedOptimizer(make()), [data(hvd.rank(), step) for step in range(STEPS)])
    assert_close(got, in_session(make, [joined(2, step) for step in range(STEPS)]))


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"num_groups": 1},
        {"gradient_predivide_factor": 4.0},
        {"device_dense": "/cpu:0", "device_sparse": "/cpu:0", "name": "D", "use_locking": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`num_groups`")
@pytest.mark.ranks(2)
def test_options_change_the_way_not_the_result(options: dict[str, Any]) -> None:
    import ronde.tensorflow as hvd

    make = OPTIMIZERS["adam"]
    batches = [data(hvd.rank(), step) for step in range(5)]
    got = in_session(lambda: hvd.DistributedOptimizer(make(), **options), batches)
    assert_close(got, in_session(make, [joined(2, step) for step in range(5)]))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.ranks(2)
def test_session_accumulates(average: bool) -> None:
    import ronde.tensorflow as hvd

    make = OPTIMIZERS["momentum"]

    def distributed() -> Any:
        return hvd.DistributedOptimizer(make(), backward_passes_per_step=3, average_aggregated_gradients=average)

    got = in_session(distributed, [data(hvd.rank(), step) for step in range(7)])  # the seventh pass stays here
    expected = accumulated(2, 3, 2, 1 / 3 if average else 1.0)
    assert_close(got, expected)


def accumulated(ranks: int, passes: int, steps: int, factor: float) -> list[np.ndarray]:
    """Momentum in NumPy on sums of gradients that a plain tape computes. TensorFlow keeps both rates in float32."""
    rate, momentum = np.float32(0.05).item(), np.float32(0.9).item()
    weights = [tf.Variable(value) for value in start()]
    velocity = [np.zeros(weight.shape) for weight in weights]
    for step in range(steps):
        sums = [np.zeros(weight.shape) for weight in weights]
        for number in range(passes):
            for rank in range(ranks):
                with tf.GradientTape() as tape:
                    value = loss(weights, *data(rank, step * passes + number))
                for total, grad in zip(sums, tape.gradient(value, weights)):
                    total += grad.numpy() / ranks
        for weight, total, v in zip(weights, sums, velocity):
            v *= momentum
            v += total * factor
            weight.assign_sub(rate * v)
    return [weight.numpy() for weight in weights]


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.ranks(2)
def test_v1_optimizer_accumulates_without_sessions(mode: str) -> None:
    import ronde.tensorflow as hvd

    weights = [tf.Variable(value) for value in start()]
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), backward_passes_per_step=3)

    def step(x: Any, y: Any) -> None:
        optimizer.minimize(lambda: loss(weights, x, y), var_list=weights)

    run = tf.function(step) if mode == "function" else step
    for number in range(7):
        run(*[tf.constant(part) for part in data(hvd.rank(), number)])
    assert_close([weight.numpy() for weight in weights], accumulated(2, 3, 2, 1.0))


@pytest.mark.ranks(2)
def test_an_infinity_does_not_leak_into_later_steps() -> None:
    import ronde.tensorflow as hvd

    weight = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
    scale = tf.Variable([np.inf, 1.0])

    @tf.function
    def step() -> None:
        optimizer.minimize(lambda: tf.reduce_sum(scale * weight), var_list=[weight])

    step()
    step()
    assert weight.numpy().tolist() == [-np.inf, -2]
    weight.assign([0.0, 0.0])
    scale.assign([1.0, 1.0])
    step()
    step()
    assert weight.numpy().tolist() == [-2, -2]


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.ranks(2)
def test_tape_training_equals_one_process(mode: str) -> None:
    import ronde.tensorflow as hvd

    def train(batches: list[Any], distributed: bool) -> list[np.ndarray]:
        weights = [tf.Variable(value) for value in start()]
        unused = tf.Variable(1.0)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                value = loss(weights, x, y)
            if distributed:
                tape = hvd.DistributedGradientTape(tape)
            *grads, none = tape.gradient(value, [*weights, unused])
            assert none is None
            for weight, grad in zip(weights, grads):
                weight.assign_sub(0.1 * grad)

        run = tf.function(step) if mode == "function" else step
        for x, y in batches:
            run(tf.constant(x), tf.constant(y))
        return [weight.numpy() for weight in weights]

    got = train([data(hvd.rank(), step) for step in range(STEPS)], True)
    assert_close(got, train([joined(2, step) for step in range(STEPS)], False))


@pytest.mark.ranks(2)
def test_tape_keeps_the_structure_of_its_sources() -> None:
    import ronde.tensorflow as hvd

    rank = hvd.rank()
    a, b = tf.Variable(1.0), tf.Variable([2.0, 3.0])
    with tf.GradientTape(persistent=True) as tape:
        value = a * a * (rank + 1) + tf.reduce_sum(b) * rank
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    assert isinstance(tape, tf.GradientTape)
    assert float(tape.gradient(value, a)) == 2 * 1 + 2 * 2
    grads = tape.gradient(value, {"a": a, "b": [b]})
    assert float(grads["a"]) == 6 and grads["b"][0].numpy().tolist() == [1, 1]
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(tape)
    with pytest.raises(TypeError, match="GradientTape"):
        hvd.DistributedGradientTape("tape")


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.ranks(2)
def test_local_sources(mode: str) -> None:
    import ronde.tensorflow as hvd

    rank = hvd.rank()
    shared, local = tf.Variable(1.0), tf.Variable(1.0)

    def gradients(scale: bool) -> Any:
        with tf.GradientTape() as tape:
            value = (shared + local) * (rank + 1)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(local)
        grads = tape.gradient(value, [shared, local])
        mine, everybodys = tape.get_local_and_global_gradients(grads, [shared, local])
        assert mine[0][1] is local and everybodys[0][1] is shared
        return grads

    call = tf.function(gradients) if mode == "function" else gradients
    assert [float(grad) for grad in call(False)] == [1.5, rank + 1]
    assert [float(grad) for grad in call(True)] == [1.5, (rank + 1) / 2]


@pytest.mark.ranks(2)
def test_partial_tape() -> None:
    import keras

    import ronde.tensorflow as hvd

    rank = hvd.rank()
    shared, local = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    x = tf.constant([[rank + 1.0]])
    shared(x), local(x)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(shared(x) + local(x))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=local, scale_local_gradients=False)
    grads = tape.gradient(value, [*shared.trainable_weights, *local.trainable_weights])
    assert [float(tf.squeeze(grad)) for grad in grads] == [1.5, rank + 1]
    with tf.GradientTape() as tape:
        pass
    with pytest.raises(ValueError, match="local_layers"):
        hvd.PartialDistributedGradientTape(tape, local_layers=3)


@pytest.mark.ranks(2)
def test_local_variables_of_an_optimizer() -> None:
    import ronde.tensorflow as hvd

    rank = hvd.rank()
    shared, local = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), scale_local_gradients=False)
    optimizer.register_local_var(local)
    optimizer.minimize(lambda: (shared + local) * (rank + 1), var_list=[shared, local])
    assert [float(shared), float(local)] == [1 - 1.5, 1 - (rank + 1)]


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("mode", ["session", "function"])
@pytest.mark.ranks(2)
def test_embeddings(as_dense: bool, mode: str) -> None:
    """Sparse gradients: the same weights as one process on the joined batch, rows that nobody used untouched."""
    import ronde.tensorflow as hvd

    def train(rows: list[list[int]], make: Callable[[], Any]) -> np.ndarray:
        table = np.arange(40.0).reshape(20, 2)

        def value(embedding: Any, row: Any) -> Any:
            return tf.reduce_sum(tf.square(tf.nn.embedding_lookup(embedding, row))) / tf.cast(tf.size(row), tf.float64)

        if mode == "session":
            with tf.Graph().as_default(), v1.Session() as session:
                embedding, row = v1.get_variable("e", initializer=table), v1.placeholder(tf.int64, [None])
                step = make().minimize(value(embedding, row))
                session.run(v1.global_variables_initializer())
                for each in rows:
                    session.run(step, {row: each})
                return session.run(embedding)
        embedding = tf.Variable(table)
        optimizer = make()

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def step_of(row: Any) -> None:
            optimizer.minimize(lambda: value(embedding, row), var_list=[embedding])

        for each in rows:
            step_of(tf.constant(each, tf.int64))
        return embedding.numpy()

    rows = [[[1, 4, 4], [7, 1, 9]], [[2, 2, 2], [4, 7, 1]], [list(range(15)) * 2, list(range(15)) * 2]]
    make = OPTIMIZERS["momentum"]
    got = train(
        [each[hvd.rank()] for each in rows],
        lambda: hvd.DistributedOptimizer(make(), sparse_as_dense=as_dense),
    )
    expected = train([each[0] + each[1] for each in rows], make)
    if as_dense:  # momentum goes on in rows without a gradient, as it does in dense training
        np.testing.assert_allclose(got[15:], expected[15:])
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.ranks(2)
def test_compression_of_gradients() -> None:
    import ronde.tensorflow as hvd

    weight = tf.Variable([1.0])
    fine = 1 + 2.0**-12
    for compression, expected in [(hvd.Compression.none, fine), (hvd.Compression.fp16, 1.0)]:
        with tf.GradientTape() as tape:
            value = weight * fine
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        grad = tape.gradient(value, weight)
        assert grad.dtype == tf.float32 and float(grad[0]) == expected


@pytest.mark.ranks(3)
def test_ranks_outside_the_process_set_train_alone() -> None:
    import ronde.tensorflow as hvd

    pair = hvd.add_process_set([0, 1])
    weight = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), process_set=pair)
    optimizer.minimize(lambda: weight * (hvd.rank() + 1.0), var_list=[weight])
    assert float(weight) == (-1.5 if hvd.rank() < 2 else -3)


@pytest.mark.ranks(2)
def test_the_optimizer_stays_what_it_was() -> None:
    import ronde.tensorflow as hvd

    original = v1.train.AdamOptimizer(0.1)
    optimizer = hvd.DistributedOptimizer(original)
    assert optimizer is original and isinstance(optimizer, v1.train.AdamOptimizer)
    assert type(optimizer).__name__ == "AdamOptimizer" and optimizer.get_name() == "Adam"
    with tf.Graph().as_default():
        weight = v1.get_variable("w", initializer=1.0)
        pairs = optimizer.compute_gradients(weight * weight)
        optimizer.apply_gradients([(tf.clip_by_value(grad, -1, 1), variable) for grad, variable in pairs])
        assert {each.op.name for each in v1.global_variables()} >= {"w", "w/Adam", "w/Adam_1"}


@pytest.mark.ranks(2)
def test_wrong_optimizer_arguments() -> None:
    import ronde.tensorflow as hvd

    def sgd() -> Any:
        return v1.train.GradientDescentOptimizer(0.1)

    for arguments, text in [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=Average"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": -1}, "negative"),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(), **arguments)
    with pytest.raises(TypeError, match="str"):
        hvd.DistributedOptimizer("adam")
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))
    accumulating = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="compute_gradients"):
        accumulating.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.ranks(2)
def test_sync_batch_normalization(mode: str, axis: int) -> None:
    """Batches of 3 and 5 equal one process over 8: forward, gradient, moving statistics, next output."""
    import keras

    import ronde.tensorflow as hvd

    random = np.random.default_rng(3)
    whole = (random.normal(size=(8, 4, 4)) * 3 + 1000).astype(np.float32)
    upstream = random.normal(size=(8, 4, 4)).astype(np.float32)
    mine = slice(0, 3) if hvd.rank() == 0 else slice(3, 8)

    def run(layer: Any, x: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, ...]:
        layer.build(x.shape)

        def call(x: Any, up: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                value = tf.reduce_sum(y * up)
            return y, tape.gradient(value, x)

        y, dx = (tf.function(call) if mode == "function" else call)(tf.constant(x), tf.constant(up))
        return y.numpy(), dx.numpy(), layer.moving_mean.numpy(), layer.moving_variance.numpy()

    got = run(hvd.SyncBatchNormalization(axis=axis), whole[mine], upstream[mine])
    expected = run(keras.layers.BatchNormalization(axis=axis), whole, upstream)
    np.testing.assert_allclose(got[0], expected[0][mine], atol=2e-4)
    np.testing.assert_allclose(got[1], expected[1][mine], atol=2e-4)
    np.testing.assert_allclose(got[2], expected[2], rtol=1e-5)
    np.testing.assert_allclose(got[3], expected[3], rtol=1e-4)


@pytest.mark.ranks(2)
def test_sync_batch_normalization_counts_by_mask_and_saves() -> None:
    import keras

    import ronde.tensorflow as hvd

    rank = hvd.rank()
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    x = tf.constant([[[1.0], [9.0]]]) if rank == 0 else tf.constant([[[3.0], [5.0]]])
    mask = tf.constant([[True, rank == 1]])
    layer(x, training=True, mask=mask)
    np.testing.assert_allclose(layer.moving_mean.numpy(), [3.0])
    np.testing.assert_allclose(layer.moving_variance.numpy(), [np.var([1, 3, 5])], rtol=1e-5)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is type(layer) and again.momentum == 0.0
    with pytest.raises(ValueError, match="synchronized"):
        hvd.SyncBatchNormalization(synchronized=True)


def keras_model() -> Any:
    import keras

    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2, use_bias=False)])
    model.set_weights(start())
    return model


def keras_training(mode: str, optimizer: Any, batches: list[Any]) -> list[np.ndarray]:
    import keras

    model = keras_model()
    if mode == "fit":
        model.compile(optimizer, keras.losses.MeanSquaredError())
        for x, y in batches:
            model.fit(x, y, batch_size=len(x), verbose=0)
        return model.get_weights()

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))

    run = tf.function(step) if mode == "function" else step
    for x, y in batches:
        run(tf.constant(x), tf.constant(y))
    return model.get_weights()


@pytest.mark.parametrize("mode", ["eager", "function", "fit"])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.ranks(2)
def test_keras_optimizers_equal_one_process(kind: str, mode: str) -> None:
    import keras

    import ronde.tensorflow as hvd

    with double_precision():
        options = {"learning_rate": 0.05, "clipnorm": 0.5}
        make = getattr(keras.optimizers, kind)
        original = make(**options)
        optimizer = hvd.DistributedOptimizer(original)
        assert optimizer is original and isinstance(optimizer, make) and type(optimizer).__name__ == kind
        got = keras_training(mode, optimizer, [data(hvd.rank(), step) for step in range(STEPS)])
        expected = keras_training(mode, make(**options), [joined(2, step) for step in range(STEPS)])
        for one, other in zip(got, expected):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(optimizer)


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.ranks(2)
def test_keras_optimizers_accumulate(mode: str) -> None:
    import keras

    import ronde.tensorflow as hvd

    with double_precision():
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
        got = keras_training(mode, optimizer, [data(hvd.rank(), step) for step in range(5)])  # the fifth stays here
        assert int(optimizer.iterations) == 2
        model = keras_model()
        for step in range(2):
            with tf.GradientTape() as tape:
                value = 0.0
                for number in (2 * step, 2 * step + 1):
                    x, y = joined(2, number)
                    value += tf.reduce_mean(tf.square(model(x) - y))
            for variable, grad in zip(model.trainable_variables, tape.gradient(value, model.trainable_variables)):
                variable.assign_sub(0.05 * grad)
        for one, other in zip(got, model.get_weights()):
            np.testing.assert_allclose(one, other, rtol=1e-6)
