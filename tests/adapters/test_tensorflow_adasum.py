"""Adasum in TensorFlow: optimizers of tf.compat.v1.train against a simulation of all ranks in NumPy; and the tape."""

import copy
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import ronde.tensorflow as hvd  # noqa: E402

v1 = tf.compat.v1
LR, MOMENTUM = 0.0625, 0.875  # TensorFlow rounds them to float32
SHAPES = [(3, 2), (5000,)]


def start() -> list[np.ndarray]:
    return [np.random.default_rng(t).standard_normal(shape) for t, shape in enumerate(SHAPES)]


def gradient(rank: int, step: int, tensor: int) -> np.ndarray:
    return np.random.default_rng([rank, step, tensor]).standard_normal(SHAPES[tensor])


def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, a_square, b_square = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
    return (1 - dot / (2 * a_square)) * a + (1 - dot / (2 * b_square)) * b


def simulate(steps: int, passes: int) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Momentum on two ranks, whose changes are combined after every `passes` steps: the variables at the last time, and
    those that each rank has."""
    common = start()
    ranks, momentum = [copy.deepcopy(common) for _ in range(2)], [[0.0 * each for each in common] for _ in range(2)]
    for step in range(steps):
        for rank in range(2):
            for t in range(len(SHAPES)):
                momentum[rank][t] = MOMENTUM * momentum[rank][t] + gradient(rank, step, t)
                ranks[rank][t] = ranks[rank][t] - LR * momentum[rank][t]
        if step % passes == passes - 1:
            common = [each + combine(ranks[0][t] - each, ranks[1][t] - each) for t, each in enumerate(common)]
            ranks = [copy.deepcopy(common) for _ in range(2)]
    return common, ranks


def make(passes: int = 1, **options: Any) -> Any:
    optimizer = v1.train.MomentumOptimizer(LR, MOMENTUM)
    return hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, backward_passes_per_step=passes, **options)


def train(mode: str, steps: int, passes: int, use_resource: bool = True) -> list[np.ndarray]:
    rank = hvd.rank()
    if mode != "session":
        variables = [tf.Variable(value) for value in start()]
        optimizer = make(passes)

        def step(*grads: Any) -> None:
            optimizer.apply_gradients(zip(grads, variables))

        run = tf.function(step) if mode == "function" else step
        for number in range(steps):
            run(*(tf.constant(gradient(rank, number, t)) for t in range(len(SHAPES))))
        return [variable.numpy() for variable in variables]
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [
            v1.get_variable(f"w{t}", initializer=value, use_resource=use_resource) for t, value in enumerate(start())
        ]
        places = [v1.placeholder(tf.float64, shape) for shape in SHAPES]
        loss = tf.add_n([tf.reduce_sum(place * variable) for place, variable in zip(places, variables)])
        counter = v1.train.get_or_create_global_step()
        train_step = make(passes).minimize(loss, global_step=counter)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for number in range(steps):
            session.run(train_step, {place: gradient(rank, number, t) for t, place in enumerate(places)})
        assert session.run(counter) == steps
        return session.run(variables)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.ranks(2)
def test_optimizer_equals_the_simulation(mode: str, passes: int) -> None:
    steps = 6
    got = train(mode, steps, passes)
    for each, wanted in zip(got, simulate(steps, passes)[0]):
        np.testing.assert_allclose(each, wanted, rtol=0, atol=1e-10)
    mine = [each.tobytes() for each in got]
    assert all(other == mine for other in hvd.allgather_object(mine))


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.ranks(2)
def test_variables_of_the_old_kind(passes: int) -> None:
    for each, wanted in zip(train("session", 3, passes, use_resource=False), simulate(3, passes)[0]):
        np.testing.assert_allclose(each, wanted, rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_steps_that_wait_are_the_ranks_own() -> None:
    for each, wanted in zip(train("function", 5, 3), simulate(5, 3)[1][hvd.rank()]):
        np.testing.assert_allclose(each, wanted, rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_sparse_gradients_and_local_variables() -> None:
    table, local = tf.Variable(tf.ones((6, 2))), tf.Variable([1.0])
    rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([hvd.rank()]), tf.constant([6, 2]))
    own = tf.constant([hvd.rank() + 1.0])
    with pytest.raises(ValueError, match="is sparse.*sparse_as_dense=True"):
        make().apply_gradients([(rows, table)])
    sgd = v1.train.GradientDescentOptimizer(1.0)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Adasum, sparse_as_dense=True)
    assert optimizer is sgd
    optimizer.register_local_var(local)
    optimizer.apply_gradients([(rows, table), (own, local)])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [0, 0]] + [[1, 1]] * 4)  # orthogonal: added
    np.testing.assert_array_equal(local.numpy(), [-hvd.rank()])


@pytest.mark.ranks(2)
def test_tape_combines_gradients() -> None:
    rank = hvd.rank()

    def gradients() -> Any:
        variables = [tf.Variable(value) for value in start()]
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum) as tape:
            loss = tf.add_n([tf.reduce_sum(v * gradient(rank, 0, t)) for t, v in enumerate(variables)])
        return tape.gradient(loss, variables)

    for grads in (gradients(), _in_function(gradients)):
        for t, grad in enumerate(grads):
            wanted = combine(gradient(0, 0, t), gradient(1, 0, t))
            np.testing.assert_allclose(grad.numpy(), wanted, rtol=0, atol=1e-10)


def _in_function(gradients: Any) -> Any:
    made: list[Any] = []

    @tf.function
    def run() -> Any:
        with tf.init_scope():
            if not made:
                made.extend(tf.Variable(value) for value in start())
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum) as tape:
            loss = tf.add_n([tf.reduce_sum(v * gradient(hvd.rank(), 0, t)) for t, v in enumerate(made)])
        return tape.gradient(loss, made)

    return run()


@pytest.mark.ranks(2)
def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="gradient_predivide_factor needs op=Average"):
        make(gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups: with op=Adasum"):
        make(groups=2)
    with pytest.raises(ValueError, match="average_aggregated_gradients"):
        make(2, average_aggregated_gradients=True)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(make())
    with pytest.raises(ValueError, match="optimizers of Keras have no Adasum form"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
