"""TensorFlow's collectives beyond the conformance suite: graphs, gradients, names, IndexedSlices, errors."""

import threading
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1

MODES = ["eager", "function", "session"]


def compute(mode: str, build: Callable[..., Any], *inputs: np.ndarray) -> Any:
    """The values of build(*inputs): eagerly, in a tf.function, or in a session of TF 1."""
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            given = [tf.compat.v1.placeholder(value.dtype, value.shape) for value in inputs]
            return session.run(build(*given), dict(zip(given, inputs)))
    call = tf.function(build) if mode == "function" else build
    result = call(*[tf.constant(value) for value in inputs])
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), result)


def gradient(result: Any, source: Any, upstream: Any) -> Any:
    return tf.gradients(result, source, grad_ys=upstream)[0]


def with_gradient(mode: str, function: Callable[[Any], Any], x: np.ndarray, weigh: Callable[[Any], Any]) -> Any:
    """d/dx sum(weigh(f(x)) * f(x)), weights constant."""

    def build(x: Any) -> Any:
        if mode == "session":
            y = function(x)
            return gradient(y, x, tf.stop_gradient(weigh(y)))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(y * tf.stop_gradient(weigh(y)))
        return tape.gradient(loss, x)

    return compute(mode, build, x)


def matrix(rank: int, rows: int) -> np.ndarray:
    return np.arange(rows * 3, dtype=np.float64).reshape(rows, 3) + 100 * rank + 1


def weights(rank: int) -> Callable[[Any], Any]:
    """Different on every rank and in every place."""
    return lambda y: tf.cast(tf.reshape(tf.range(tf.size(y)), tf.shape(y)), y.dtype) * (rank + 1) + rank


def weights_of(rank: int, shape: Any) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) * (rank + 1) + rank


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(3)
def test_gradients(mode: str) -> None:
    import ronde.tensorflow as hvd

    rank, size = hvd.rank(), hvd.size()
    mine = matrix(rank, 4)

    got = with_gradient(mode, lambda x: hvd.allreduce(x, op=hvd.Average, name="mean"), mine, weights(rank))
    np.testing.assert_allclose(got, np.mean([weights_of(r, (4, 3)) for r in range(size)], 0))

    got = with_gradient(
        mode, lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.1, postscale_factor=3.0), mine, weights(rank)
    )
    np.testing.assert_allclose(got, 0.1 * 3 * np.sum([weights_of(r, (4, 3)) for r in range(size)], 0), rtol=1e-14)

    rows = [2, 0, 3]
    got = with_gradient(mode, lambda x: hvd.allgather(x), matrix(rank, rows[rank]), weights(rank))
    total = np.sum([weights_of(r, (5, 3)) for r in range(size)], 0)
    np.testing.assert_allclose(got, total[sum(rows[:rank]) : sum(rows[: rank + 1])])

    got = with_gradient(mode, lambda x: hvd.broadcast(x, 1), mine, weights(rank))
    expected = np.sum([weights_of(r, (4, 3)) for r in range(size)], 0)
    np.testing.assert_allclose(got, expected if rank == 1 else 0 * expected)

    splits = [[1, 0, 2], [2, 2, 0], [0, 1, 1]]
    received = [sum(splits[r][to] for r in range(size)) for to in range(size)]
    given = matrix(rank, sum(splits[rank]))
    got = with_gradient(mode, lambda x: hvd.alltoall(x, splits[rank])[0], given, weights(rank))
    pieces = []
    for to in range(size):
        start = sum(splits[r][to] for r in range(rank))
        pieces.append(weights_of(to, (received[to], 3))[start : start + splits[rank][to]])
    np.testing.assert_allclose(got, np.concatenate(pieces))

    got = with_gradient(mode, lambda x: hvd.reducescatter(x, op=hvd.Average), mine, weights(rank))
    parts = [weights_of(r, (2 if r == 0 else 1, 3)) for r in range(size)]
    np.testing.assert_allclose(got, np.concatenate(parts) / size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(2)
def test_groups_have_gradients_and_whole_numbers_have_none(mode: str) -> None:
    import ronde.tensorflow as hvd

    rank = hvd.rank()

    def build(x: Any, n: Any) -> Any:
        with tf.GradientTape() if mode != "session" else tf.name_scope("x") as tape:
            if mode != "session":
                tape.watch(x)
            a, b, c = hvd.grouped_allreduce([x, n, x * 2], op=hvd.Sum)
            loss = tf.reduce_sum(a * (rank + 1.0)) + tf.reduce_sum(c) * 10
        dx = tf.gradients(loss, x)[0] if mode == "session" else tape.gradient(loss, x)
        return dx, b

    dx, b = compute(mode, build, np.full(3, rank + 1.0), np.array([rank, 5], np.int32))
    np.testing.assert_allclose(dx, np.full(3, 1.0 + 2.0 + 2 * (2 * 10)))
    assert b.tolist() == [1, 10]


@pytest.mark.ranks(2)
def test_only_linear_reductions_have_gradients() -> None:
    import ronde.tensorflow as hvd

    with pytest.raises(ValueError, match="op=Average and op=Sum"):
        with_gradient("eager", lambda x: hvd.allreduce(x, op=hvd.Max), matrix(hvd.rank(), 2), weights(0))


@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.ranks(2)
def test_names_do_not_depend_on_what_else_a_rank_has_built(mode: str) -> None:
    """K6: tensors have other names on rank 1, and other functions were traced there."""
    import ronde.tensorflow as hvd

    rank = hvd.rank()

    def build(x: Any) -> Any:
        if rank == 1:
            for _ in range(3):
                x = tf.identity(x, name="throw_away")
            if mode == "function":
                x = tf.function(lambda y: y * 1.0)(x)
        first, second = hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x * 10, op=hvd.Sum)
        branch = tf.cond(tf.reduce_sum(x) > 0, lambda: hvd.allreduce(x, op=hvd.Max), lambda: x)
        return first, second, branch

    first, second, branch = compute(mode, build, np.array([rank + 1.0]))
    assert (first, second, branch) == (3, 30, 2)


@pytest.mark.ranks(2)
def test_a_retraced_function_keeps_its_names() -> None:
    import ronde.tensorflow as hvd

    @tf.function
    def reduced(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    if hvd.rank() == 0:  # one trace more than on rank 1
        with pytest.raises(tf.errors.InvalidArgumentError, match="MismatchError.*shape"):
            reduced(tf.ones([7]))
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="MismatchError.*shape"):
            reduced(tf.ones([3]))
    assert reduced(tf.ones([3])).numpy().tolist() == [2, 2, 2]


@pytest.mark.ranks(2)
def test_unknown_shapes() -> None:
    """K7, first half."""
    import ronde.tensorflow as hvd

    rank = hvd.rank()

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def known_columns(x: Any) -> Any:
        gathered = hvd.allgather(x)
        assert gathered.shape.as_list() == [None, 3]
        scattered = hvd.reducescatter(gathered, op=hvd.Sum)
        assert scattered.shape.as_list() == [None, 3]
        exchanged, counts = hvd.alltoall(x, splits=[1, rank])
        assert exchanged.shape.as_list() == [None, 3] and counts.shape.as_list() == [None]
        assert hvd.allreduce(scattered[:1]).shape.as_list() == hvd.broadcast(scattered[:1], 0).shape.as_list()
        return gathered, scattered, exchanged

    gathered, scattered, exchanged = known_columns(tf.ones([rank + 1, 3]))
    assert gathered.shape == (3, 3) and scattered.shape == (2 - rank, 3) and exchanged.shape == (2 - rank, 3)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def unknown(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)

    total, rows = unknown(tf.ones([2, 2]))
    assert total.numpy().tolist() == [[2, 2], [2, 2]] and rows.shape == (4, 2)


@pytest.mark.ranks(2)
def test_an_operation_runs_though_nobody_uses_its_result() -> None:
    """K7, second half: rank 0 drops the result, rank 1 needs it."""
    import ronde.tensorflow as hvd

    rank = hvd.rank()

    @tf.function
    def step(x: Any) -> Any:
        total = hvd.allreduce(x, op=hvd.Sum, name="used by rank 1")
        return total if rank == 1 else x

    for number in range(3):
        assert float(step(tf.constant(number + 1.0))) == (number + 1) * (1 if rank == 0 else 2)

    @tf.function
    def constant() -> Any:
        return hvd.allreduce(tf.constant(2.0) * (rank + 1), op=hvd.Sum, name="of constants")

    assert [float(constant()) for _ in range(3)] == [6, 6, 6]  # neither folded nor remembered: rank 1 waits each time


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(2)
def test_indexed_slices(mode: str) -> None:
    """K9, by both ways; rows that come twice count twice."""
    import ronde.tensorflow as hvd

    rank = hvd.rank()

    def build(values: Any, rows: Any, many: Any, many_rows: Any) -> Any:
        few = tf.IndexedSlices(values, rows, tf.constant([3, 1], tf.int64))
        total = hvd.allreduce(few, name="few")
        dense = tf.IndexedSlices(many, many_rows, tf.constant([3, 1], tf.int64))
        dense_total = hvd.allreduce(dense, op=hvd.Sum, name="many")
        shapeless = hvd.allreduce(tf.IndexedSlices(values, rows), op=hvd.Sum, name="shapeless")
        return (
            tf.convert_to_tensor(total),
            (dense_total.values, dense_total.indices),
            (shapeless.values, shapeless.indices),
        )

    rows = np.array([[0, 1], [0, 2]][rank])
    many_rows = np.array([[0, 0, 2, 2], [2, 0, 0, 2]][rank], np.int32)
    many = np.arange(4.0).reshape(4, 1) + 10 * rank
    total, (values, indices), (free, free_rows) = compute(mode, build, np.ones((2, 1)), rows, many, many_rows)
    assert total.ravel().tolist() == [1, 0.5, 0.5]
    assert indices.tolist() == [0, 2] and indices.dtype == np.int32
    assert values.ravel().tolist() == [0 + 1 + 11 + 12, 2 + 3 + 10 + 13]
    assert free.ravel().tolist() == [2, 1, 1] and free_rows.tolist() == [0, 1, 2]


@pytest.mark.ranks(2)
def test_indexed_slices_travel_compressed_and_add_in_float32() -> None:
    import ronde.tensorflow as hvd

    rank = hvd.rank()
    for dtype in ("float32", "bfloat16", "int32"):
        values = tf.cast(tf.constant([[1.0], [2.0], [4.0]]) * (rank + 1), dtype)
        slices = tf.IndexedSlices(values, tf.constant([2, 7, 2]), tf.constant([100, 1]))
        result = hvd.allreduce(slices, op=hvd.Sum, compression=hvd.Compression.bf16)
        assert result.values.dtype == dtype
        assert result.indices.numpy().tolist() == [2, 7]
        assert tf.cast(result.values, "float32").numpy().ravel().tolist() == [15, 6]
    with pytest.raises(ValueError, match="IndexedSlices takes op=Average"):
        hvd.allreduce(slices, op=hvd.Max)
    with pytest.raises(TypeError, match="IndexedSlices"):
        hvd.broadcast(slices, 0)
    ones = tf.IndexedSlices(tf.ones([600, 1], tf.bfloat16), tf.zeros([600], tf.int64), tf.constant([3, 1], tf.int64))
    assert float(hvd.allreduce(ones, op=hvd.Sum).values[0, 0]) == 1200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(2)
def test_what_a_rank_knows_about_itself(mode: str) -> None:
    import ronde.tensorflow as hvd

    one = hvd.add_process_set([1])

    def build() -> Any:
        return (
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.size_op(one.process_set_id),
            hvd.process_set_included_op(one.process_set_id),
        )

    got = [int(value) for value in compute(mode, build)]
    assert got == [hvd.rank(), 2, hvd.rank(), 2, 1, hvd.rank()]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="process set 77"):
        compute(mode, lambda: hvd.size_op(77))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(3)
def test_process_sets(mode: str) -> None:
    import ronde.tensorflow as hvd

    ends = hvd.add_process_set([0, 2])

    def build(x: Any) -> Any:
        return hvd.allreduce(x, process_set=ends), hvd.allgather(x, process_set=ends)

    mine = np.array([hvd.rank() + 1.0])
    if hvd.rank() != 1:
        mean, gathered = compute(mode, build, mine)
        assert mean.tolist() == [2] and gathered.tolist() == [1, 3]
    else:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="rank 1"):
            compute(mode, build, mine)
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(2)
def test_errors_carry_the_message(mode: str) -> None:
    import ronde.tensorflow as hvd

    expected: Any = hvd.MismatchError if mode == "eager" else tf.errors.InvalidArgumentError
    with pytest.raises(expected, match=r"'different'.*shape: \[1\] on rank 0; \[2\] on rank 1") as raised:
        compute(mode, lambda x: hvd.allreduce(x, name="different"), np.ones(hvd.rank() + 1))
    error = hvd.util.translated(raised.value)
    assert type(error) is hvd.MismatchError and str(error).endswith("[1] on rank 0; [2] on rank 1")
    assert compute(mode, lambda x: hvd.allreduce(x, op=hvd.Sum), np.ones(1)).tolist() == [2]


@pytest.mark.ranks(2)
def test_strings_are_refused() -> None:
    import ronde.tensorflow as hvd

    with pytest.raises(TypeError, match="string.*float32"):
        hvd.allreduce(tf.constant("text"))
    with pytest.raises(TypeError, match="string"):
        tf.function(lambda: hvd.broadcast(tf.constant("text"), 0))()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.ranks(2)
def test_join_and_barrier(mode: str) -> None:
    import ronde.tensorflow as hvd

    steps = 3 if hvd.rank() == 0 else 5
    values = [compute(mode, lambda x: hvd.allreduce(x, op=hvd.Sum, name="x"), np.ones(2))[0] for _ in range(steps)]
    assert values == [2.0] * 3 + [1.0] * (steps - 3)
    last = compute(mode, hvd.join)
    assert last == 1 and last.dtype == np.int32

    started = time.monotonic()
    if hvd.rank() == 0:
        time.sleep(0.3)
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(hvd.barrier())
    else:
        compute(mode, lambda: (hvd.barrier(), tf.constant(0))[1])
    assert time.monotonic() - started > 0.25


@pytest.mark.ranks(2)
def test_broadcast_into_variables() -> None:
    import ronde.tensorflow as hvd

    rank = hvd.rank()

    def fresh() -> list[Any]:
        return [tf.Variable(tf.fill([2], 1.0 + rank)), tf.Variable(10 + rank), tf.Variable(rank == 1)]

    variables = fresh()
    assert hvd.broadcast_(variables, 1) is variables
    assert [each.numpy().tolist() for each in variables] == [[2, 2], 11, True]

    variables = fresh()
    tf.function(lambda: hvd.broadcast_variables(variables, 0))()
    assert [each.numpy().tolist() for each in variables] == [[1, 1], 10, False]

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for resource in (True, False):
            tf.compat.v1.get_variable(f"v{resource}", initializer=1.0 + rank, use_resource=resource)
        broadcast = hvd.broadcast_global_variables(1)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(broadcast)
        assert session.run(tf.compat.v1.global_variables()) == [2, 2]
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


@pytest.mark.ranks(2)
def test_objects() -> None:
    import ronde.tensorflow as hvd

    rank = hvd.rank()
    with tf.Graph().as_default():
        assert hvd.broadcast_object({"epoch": rank, "text": "ä"}, 1) == {"epoch": 1, "text": "ä"}
        assert hvd.broadcast_object_fn(1)([rank]) == [1]
        assert hvd.allgather_object("x" * (rank + 1)) == ["x", "xx"]


@pytest.mark.ranks(2)
def test_factors_keep_all_their_bits_and_small_numbers_are_not_flushed() -> None:
    """TensorFlow's own threads flush denormals to zero; its attributes have 32 bits."""
    import ronde.tensorflow as hvd

    third = hvd.allreduce(tf.constant(3.0, tf.float64), op=hvd.Sum, prescale_factor=1 / 3, postscale_factor=0.1)
    assert third.numpy() == (3.0 * (1 / 3) * 2) * 0.1
    tiny = np.float32(1e-42)

    @tf.function
    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    assert total(tf.constant([tiny] * 1000)).numpy().tolist() == [2 * tiny] * 1000


@pytest.mark.ranks(2)
def test_several_python_threads() -> None:
    import ronde.tensorflow as hvd

    results: dict[int, Any] = {}

    def work(number: int) -> None:
        @tf.function
        def reduced(x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum, name=f"thread {number}")

        results[number] = [float(reduced(tf.constant(float(number + step)))) for step in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads if hvd.rank() else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(50)
    assert results == {number: [2.0 * (number + step) for step in range(20)] for number in range(4)}


@pytest.mark.ranks(1, init=False)
def test_before_init() -> None:
    import ronde.tensorflow as hvd

    with pytest.raises(ValueError, match="init"):
        hvd.allreduce(tf.ones(2))
    with pytest.raises(ValueError, match="init"):
        hvd.rank_op()
    with pytest.raises(ValueError, match="init"):
        hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer())


@pytest.mark.ranks(2, deadline=110)
def test_a_thousand_eager_steps_do_not_grow() -> None:
    """K8."""
    import psutil

    import ronde.tensorflow as hvd

    variables = [tf.Variable(tf.ones([100, 10])) for _ in range(10)]

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
        tape = hvd.DistributedGradientTape(tape)
        for each, grad in zip(variables, tape.gradient(loss, variables)):
            each.assign_sub(0.001 * grad)

    for _ in range(50):
        step()
    before = psutil.Process().memory_info().rss
    for _ in range(1000):
        step()
    assert psutil.Process().memory_info().rss - before < 10e6


def test_module_paths() -> None:
    import ronde
    import ronde.tensorflow as hvd
    from ronde.tensorflow import compression, functions, mpi_ops, util

    assert mpi_ops.allreduce is hvd.allreduce and hvd.mpi_ops is mpi_ops and util.split_list([1, 2], 2) == [[1], [2]]
    assert compression.Compression is hvd.Compression
    assert functions.broadcast_variables is hvd.broadcast_variables
    assert hvd.init is ronde.init and hvd.Sum == ronde.Sum and mpi_ops.rank is ronde.rank
    for name in hvd.__all__:
        assert hasattr(hvd, name), name


# ---- Order and names inside graphs ----


@pytest.mark.ranks(2)
def test_barrier_in_a_function_divides_it(tmp_path: Path) -> None:
    import ronde.tensorflow as hvd

    file = tmp_path / "written"

    def write() -> np.int32:
        if hvd.rank() == 0:
            time.sleep(0.5)
            file.touch()
        return np.int32(0)

    @tf.function
    def step() -> Any:
        tf.numpy_function(write, [], tf.int32)
        hvd.barrier()
        return tf.numpy_function(lambda: np.int32(file.exists()), [], tf.int32)

    assert int(step()) == 1


@pytest.mark.ranks(2)
def test_join_in_a_function_comes_after_what_is_above_it() -> None:
    import ronde.tensorflow as hvd

    count = 3 + 3 * hvd.rank()

    @tf.function
    def epoch() -> Any:
        total = tf.constant(0.0)
        for number in tf.data.Dataset.range(count):
            total += hvd.allreduce(tf.cast(number, tf.float32) + 1.0, op=hvd.Sum)
        return total, hvd.join()

    total, last = epoch()
    assert (float(total), int(last)) == (12.0 if hvd.rank() == 0 else 27.0, 1)


@pytest.mark.parametrize("control_flow", [1, 2])
@pytest.mark.ranks(2)
def test_passes_of_a_loop_in_a_tf1_graph_meet_in_order(control_flow: int) -> None:
    """They would run side by side, here the first ones of rank 0 last."""
    import ronde.tensorflow as hvd

    rank = hvd.rank()

    def slowly(number: Any) -> np.float32:
        time.sleep([0.02, 0.2, 0.4][int(number) if rank else 2 - int(number)])
        return np.float32(number + 100 * rank)

    def body(number: Any) -> Any:
        value = tf.numpy_function(slowly, [number], tf.float32, stateful=False)
        value.set_shape([])
        return hvd.allreduce(value, op=hvd.Sum)

    (v1.disable_control_flow_v2 if control_flow == 1 else v1.enable_control_flow_v2)()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            sums = tf.map_fn(body, tf.range(3), fn_output_signature=tf.float32, parallel_iterations=10)
            for _ in range(2):
                assert session.run(sums).tolist() == [100, 102, 104]
    finally:
        v1.enable_control_flow_v2()


@pytest.mark.parametrize("where", ["function", "cond", "while", "recompute"])
@pytest.mark.ranks(2)
def test_names_in_gradients_do_not_depend_on_what_else_a_rank_has_traced(where: str) -> None:
    import ronde.tensorflow as hvd

    for _ in range(3 * hvd.rank()):

        @tf.function
        def other(x: Any) -> Any:
            return tf.cond(
                tf.reduce_sum(x) > 0, lambda: x * 2, lambda: tf.while_loop(lambda y: y < 3.0, lambda y: y + 1.0, [x])[0]
            )

        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = other(x)
        tape.gradient(value, x)

    @tf.custom_gradient
    def summed_backward(x: Any) -> Any:
        return tf.identity(x), lambda upstream: hvd.allreduce(upstream, op=hvd.Sum)

    @tf.function
    def call(x: Any) -> Any:
        if where == "cond":
            return tf.cond(x > 0, lambda: summed_backward(x), lambda: x)
        if where == "while":
            for _ in tf.range(1):
                x = summed_backward(x)
            return x
        if where == "recompute":
            return tf.recompute_grad(lambda y: summed_backward(y) * 1.0)(x)
        return summed_backward(x)

    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = call(x) * (hvd.rank() + 1.0)
    assert float(tape.gradient(value, x)) == 3.0


@pytest.mark.ranks(2)
def test_a_dense_tensor_that_meets_slices_in_a_function_is_an_error() -> None:
    import ronde.tensorflow as hvd

    @tf.function
    def call() -> Any:
        dense = tf.ones([4, 2])
        return hvd.allreduce(
            dense if hvd.rank() else tf.IndexedSlices(dense[:1], tf.constant([0]), tf.constant([4, 2]))
        )

    with pytest.raises(tf.errors.InvalidArgumentError, match="allgather on rank 0; allreduce on rank 1"):
        call()


@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.ranks(2)
def test_slices_in_16_bits_do_not_overflow_where_the_mean_does_not(size: int) -> None:
    """Gathered (of a large tensor) and dense (of a small one)."""
    import ronde.tensorflow as hvd

    def reduce(dtype: Any, **options: Any) -> list[float]:
        slices = tf.IndexedSlices(tf.cast([[40000.0], [8.0]], dtype), [1, 0], [size, 1])
        return tf.cast(hvd.allreduce(slices, **options).values, tf.float32).numpy().ravel().tolist()

    assert reduce(tf.float16) == [8, 40000]
    assert reduce(tf.float32, compression=hvd.Compression.fp16) == [8, 40000]
    assert reduce(tf.float16, op=hvd.Sum, prescale_factor=0.25) == [4, 20000]


@pytest.mark.ranks(2)
def test_slices_without_columns() -> None:
    import ronde.tensorflow as hvd

    rows = [1, 2][: hvd.rank() + 1]
    got = hvd.allreduce(tf.IndexedSlices(tf.zeros([len(rows), 0]), rows, [5, 0]))
    assert got.values.shape == (2, 0) and got.indices.numpy().tolist() == [1, 2]


@pytest.mark.ranks(2)
def test_splits_must_be_a_vector_of_whole_numbers() -> None:
    import ronde.tensorflow as hvd

    for splits in ([[1], [1]], [1.0, 1.0]):
        with pytest.raises(hvd.ArgumentError, match="splits must be a vector of whole numbers"):
            hvd.alltoall(tf.ones([2]), splits)
