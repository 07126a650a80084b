"""ronde.mxnet's collectives beyond the conformance suite: MXNet's engine, layouts, gradients, errors."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mxnet")

from mxnet import autograd, gluon, nd  # noqa: E402

import ronde.mxnet as hvd  # noqa: E402


def ranks_sum(function: Any) -> Any:
    return sum(function(rank) for rank in range(hvd.size()))


@pytest.mark.ranks(4)
def test_allgather_of_four_ranks() -> None:
    """M2."""
    rank = hvd.rank()
    result = hvd.allgather(nd.ones((2, 3, 2)) * rank)
    assert result.shape == (8, 3, 2)
    np.testing.assert_array_equal(result.asnumpy()[:, 0, 0], np.repeat(np.arange(4), 2))


@pytest.mark.ranks(2)
def test_started_in_any_order_and_not_waited_for() -> None:
    """Named operations pair up whatever the order.

    As long as nothing uses their results: MXNet lets operators share temporary memory, so that one may wait for an
    unrelated one before it, and that for its collective.
    """
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        pytest.skip("NaiveEngine waits in every call")
    rank, size = hvd.rank(), hvd.size()
    results: dict[int, Any] = {}
    for number in np.random.default_rng(rank).permutation(80):
        given = nd.ones((number + 1,)) * (rank + 1)
        for _ in range(3):
            given = given * 2  # still on its way when the collective is pushed
        results[number] = hvd.allreduce(given, op=hvd.Sum, name=f"n{number}", priority=-int(number))
    for number, result in results.items():
        assert result.shape == (number + 1,) and (result.asnumpy() == 8 * sum(range(1, size + 1))).all()


@pytest.mark.ranks(2)
def test_unnamed_operations_meet_in_the_order_of_the_program() -> None:
    """Although the engine of each rank starts them when their arrays are ready."""
    rank = hvd.rank()
    slow, quick = nd.ones((600, 600)), nd.ones((2,)) * rank
    for _ in range(4):
        slow = nd.dot(slow, slow) / 600
    first, second = (slow, quick) if rank else (nd.ones((600, 600)), quick)
    one, two = hvd.allreduce(first), hvd.allreduce(second, op=hvd.Sum)
    assert two.asnumpy().tolist() == [1, 1]
    np.testing.assert_allclose(one.asnumpy(), 1, rtol=1e-4)


@pytest.mark.ranks(2)
def test_one_name_again_before_the_first_has_ended() -> None:
    rank = hvd.rank()
    if rank == 1:
        time.sleep(0.5)
    results = [hvd.allreduce(nd.array([rank + step]), op=hvd.Sum, name="loss") for step in range(20)]
    assert [result.asscalar() for result in results] == [1 + 2 * step for step in range(20)]


@pytest.mark.ranks(2)
def test_dependencies_go_through_the_engine() -> None:
    """M4: an array in place, with operators before and after, and never a wait."""
    rank = hvd.rank()
    x = nd.ones((64,)) * (rank + 1)
    for _ in range(1000):
        x += 1
        hvd.allreduce_(x)
        x -= 1
    assert x.asnumpy().tolist() == [1.5] * 64


@pytest.mark.ranks(2)
def test_groups_of_views() -> None:
    x = nd.ones((4, 3)) * (hvd.rank() + 1)
    hvd.grouped_allreduce_([x[:2], x[2:]], op=hvd.Sum)
    assert x.asnumpy().tolist() == [[3.0] * 3] * 4
    with pytest.raises(hvd.ArgumentError, match="share memory"):
        hvd.grouped_allreduce_([x, x])
        x.wait_to_read()


@pytest.mark.ranks(2)
def test_layouts_of_onednn() -> None:
    """Results of convolutions, and weights after inference, are not in the plain layout."""
    rank = hvd.rank()
    net = gluon.nn.Conv2D(32, 3, in_channels=16)
    net.initialize(mx.init.Constant(0.5 + rank))
    x = nd.random.normal(shape=(2, 16, 8, 8))
    plain = net(x).asnumpy()
    np.testing.assert_array_equal(
        hvd.allreduce(net(x), op=hvd.Sum).asnumpy(), np.sum(hvd.allgather_object(plain), axis=0)
    )
    assert hvd.allgather(net(x)).asnumpy()[2 * rank : 2 * rank + 2].tolist() == plain.tolist()
    output = net(x)
    assert hvd.broadcast_(output, 0).asnumpy().tolist() == hvd.broadcast_object(plain).tolist()
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    assert (net.weight.data().asnumpy() == 1.5).all()


def gradient_of(function: Any, x: Any) -> np.ndarray:
    x.attach_grad()
    with autograd.record():
        function(x).backward()
    return x.grad.asnumpy()


@pytest.mark.ranks(3)
def test_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    factor = float(rank + 1)
    total = sum(range(1, size + 1))
    x = nd.arange(4) + rank
    assert gradient_of(lambda x: (hvd.allreduce(x, op=hvd.Sum) * factor).sum(), x).tolist() == [total] * 4
    assert gradient_of(lambda x: (hvd.allreduce(x) * factor).sum(), x).tolist() == [total / size] * 4
    result = gradient_of(lambda x: (hvd.broadcast(x, 1) * factor).sum(), x)
    assert result.tolist() == [total if rank == 1 else 0] * 4
    rows = nd.ones((rank + 1, 2))
    assert gradient_of(lambda x: (hvd.allgather(x) * factor).sum(), rows).tolist() == [[total] * 2] * (rank + 1)
    result = gradient_of(lambda x: (hvd.alltoall(x) * factor).sum(), nd.ones((size, 2)))
    assert result[:, 0].tolist() == [1, 2, 3]
    result = gradient_of(lambda x: (hvd.reducescatter(x, op=hvd.Sum) * factor).sum(), nd.ones((size, 2)))
    assert result[:, 0].tolist() == [1, 2, 3]
    with pytest.raises(hvd.ArgumentError, match="gradient"):
        hvd.mpi_ops.api._check_linear("allreduce", hvd.Max)


@pytest.mark.ranks(2)
def test_gradients_of_independent_operations() -> None:
    """Backward runs them in any order."""
    rank = hvd.rank()
    inputs = [nd.ones((3,)) * (rank + number) for number in range(20)]
    for x in inputs:
        x.attach_grad()
    with autograd.record():
        outputs = [hvd.allreduce(x, op=hvd.Sum) * (number * (rank + 1)) for number, x in enumerate(inputs)]
    autograd.backward(outputs)
    for number, x in enumerate(inputs):
        assert x.grad.asnumpy().tolist() == [3.0 * number] * 3


@pytest.mark.ranks(2)
def test_errors_come_with_the_arrays_and_the_engine_goes_on() -> None:
    rank = hvd.rank()
    with pytest.raises(hvd.MismatchError, match=r"allreduce 'x': ranks disagree about shape: \[3\] on rank 0; \[4\]"):
        result = hvd.allreduce(nd.ones((3 + rank,)), name="x")
        (result + 1).asnumpy()
    assert hvd.allreduce(nd.ones((2,)), name="x", op=hvd.Sum).asnumpy().tolist() == [2, 2]
    with pytest.raises(TypeError, match="ndarray"):
        hvd.allreduce(np.ones(3))
    if rank == 0:  # a wrong call of one rank; unnamed operations still pair up
        with pytest.raises(ValueError, match="root"):
            hvd.broadcast(nd.ones((1,)), root_rank=5)
        with pytest.raises(ValueError, match="bool"):
            hvd.allreduce(nd.ones((1,), dtype="bool"))
    assert hvd.allreduce(nd.ones((1,)), op=hvd.Sum).asscalar() == hvd.broadcast(nd.ones((1,)) * 2, 0).asscalar()
    with pytest.raises(TypeError, match="row_sparse"):
        hvd.allreduce(nd.sparse.zeros("row_sparse", (3, 2)))


@pytest.mark.ranks(2, dies=(1,))
def test_a_rank_that_dies() -> None:
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(hvd.PeerLostError, match="rank 1.*signal 9"):
        (hvd.allreduce(nd.ones((1000,))) * 2).asnumpy()
    assert time.monotonic() - start < 10


@pytest.mark.ranks(3)
def test_process_sets() -> None:
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 2])
    if rank == 1:
        with pytest.raises(hvd.ArgumentError, match="not in process set"):
            hvd.allreduce(nd.ones((2,)), process_set=pair)
    else:
        assert hvd.allreduce(nd.ones((2,)) * rank, process_set=pair).asnumpy().tolist() == [1, 1]
        assert hvd.broadcast(nd.ones((2,)) * rank, 2, process_set=pair).asnumpy().tolist() == [2, 2]
    assert hvd.allreduce(nd.ones((2,)) * rank, op=hvd.Max).asnumpy().tolist() == [2, 2]
    hvd.barrier()


@pytest.mark.ranks(2)
def test_join_resets_the_names() -> None:
    """C2: after ranks did different numbers of operations, unnamed ones pair up again."""
    rank = hvd.rank()
    for _ in range(3 if rank == 0 else 5):
        hvd.allreduce(nd.ones((2,)))
    assert hvd.join() == 1
    assert hvd.allreduce(nd.ones((2,)) * rank, op=hvd.Sum).asnumpy().tolist() == [1, 1]


@pytest.mark.ranks(2)
def test_objects_and_numpy_arrays_of_mxnet() -> None:
    rank = hvd.rank()
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == [0, 1]
    with mx.util.np_shape(True):
        x = mx.np.ones((2, 2)) * rank
        for result in (hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)):
            assert isinstance(result, mx.np.ndarray)
        assert hvd.allreduce(x, op=hvd.Sum).asnumpy().tolist() == [[1, 1], [1, 1]]


@pytest.mark.ranks(2)
def test_memory_does_not_grow() -> None:
    import psutil

    def step(number: int) -> None:
        for _ in range(10):
            hvd.allreduce(nd.ones((1000,)), name=f"x{number % 10}").wait_to_read()

    for number in range(20):
        step(number)
    before = psutil.Process().memory_info().rss
    for number in range(100):
        step(number)
    assert psutil.Process().memory_info().rss - before < 10e6
