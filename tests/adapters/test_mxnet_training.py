"""Training with MXNet: what ranks compute together equals one process on the joined data."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

mx = pytest.importorskip("mxnet")

from mxnet import autograd, gluon, nd  # noqa: E402

import ronde.mxnet as hvd  # noqa: E402

ROWS = 6


def make_net(seed: int = 0, in_units: int = 4) -> Any:
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="tanh", in_units=in_units), gluon.nn.Dense(2, in_units=8 if in_units else 0))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def batch(rank: int, step: int, rows: int = ROWS) -> tuple[Any, Any]:
    random = np.random.RandomState(1000 * rank + step)
    return nd.array(random.normal(size=(rows, 4))), nd.array(random.normal(size=(rows, 2)))


def joined(step: int, ranks: Iterable[int]) -> tuple[Any, Any]:
    parts = [batch(rank, step) for rank in ranks]
    return nd.concat(*[x for x, _ in parts], dim=0), nd.concat(*[y for _, y in parts], dim=0)


def backward(net: Any, data: tuple[Any, Any]) -> None:
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(data[0]), data[1])
    loss.backward()


def weights(net: Any) -> list[np.ndarray]:
    return [param.data().asnumpy() for param in net.collect_params().values()]


def assert_same(net: Any, reference: Any, tolerance: float = 1e-5) -> None:
    for got, wanted in zip(weights(net), weights(reference)):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def assert_equal_on_all_ranks(arrays: list[np.ndarray]) -> None:
    assert len(set(hvd.allgather_object(b"".join(array.tobytes() for array in arrays)))) == 1


OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1},
    "nag": {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
}


def distributed_trainer(net: Any, name: str, **options: Any) -> tuple[Any, int]:
    return hvd.DistributedTrainer(net.collect_params(), name, dict(OPTIMIZERS[name]), **options), ROWS


def store_by_name(net: Any, name: str) -> tuple[Any, int]:
    trainer = gluon.Trainer(net.collect_params(), name, dict(OPTIMIZERS[name]), kvstore="dist_ronde")
    return trainer, ROWS * hvd.size()


def store_instance(net: Any, name: str) -> tuple[Any, int]:
    store = mx.kv.create("dist_ronde")
    trainer = gluon.Trainer(net.collect_params(), name, dict(OPTIMIZERS[name]), kvstore=store)
    return trainer, ROWS * store.num_workers


def distributed_optimizer(net: Any, name: str) -> tuple[Any, int]:
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create(name, **OPTIMIZERS[name]), num_groups=2)
    assert isinstance(optimizer, type(mx.optimizer.create(name)))
    return gluon.Trainer(net.collect_params(), optimizer, kvstore=None), ROWS


# A trainer for this rank, and the number of samples that its step() is to be told.
FORMS: dict[str, Callable[[Any, str], tuple[Any, int]]] = {
    "trainer": distributed_trainer,
    "in one group": lambda net, name: distributed_trainer(net, name, num_groups=1),
    "predivide": lambda net, name: distributed_trainer(net, name, gradient_predivide_factor=4.0),
    "store by name": store_by_name,
    "store instance": store_instance,
    "optimizer": distributed_optimizer,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.ranks(2)
def test_equals_one_process(optimizer: str, form: str) -> None:
    net, reference = make_net(), make_net()
    trainer, samples = FORMS[form](net, optimizer)
    alone = gluon.Trainer(reference.collect_params(), optimizer, dict(OPTIMIZERS[optimizer]), kvstore=None)
    for step in range(20):
        backward(net, batch(hvd.rank(), step))
        trainer.step(samples)
        backward(reference, joined(step, range(2)))
        alone.step(ROWS * 2)
    assert_same(net, reference)
    assert_equal_on_all_ranks(weights(net))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "optimizer"])
@pytest.mark.ranks(2)
def test_deferred_initialization(form: str) -> None:
    """M1: different seeds, no input sizes, one step."""
    net = make_net(seed=hvd.rank(), in_units=0)
    trainer, samples = FORMS[form](net, "sgd")
    backward(net, batch(hvd.rank(), 0))
    trainer.step(samples)
    assert_equal_on_all_ranks(weights(net))


@pytest.mark.ranks(2)
def test_broadcast_parameters() -> None:
    """All kinds, whatever else a rank has built before."""
    rank = hvd.rank()
    for _ in range(12 * rank):
        gluon.nn.Dense(1)  # gluon numbers names; from 10 on their order changes, too
    deferred, known = make_net(seed=rank, in_units=0), make_net(seed=rank)
    own = weights(known)
    hvd.broadcast_parameters(deferred.collect_params(), root_rank=1)
    hvd.broadcast_parameters(known.collect_params(), root_rank=1, prefix="known")
    assert_equal_on_all_ranks(weights(known))
    assert all((a == b).all() for a, b in zip(own, weights(known))) == (rank == 1)
    deferred(batch(rank, 0)[0])
    assert_equal_on_all_ranks(weights(deferred))
    arrays = {"a": nd.ones((2,)) * rank, "b": nd.ones((3,)) * rank}
    hvd.broadcast_parameters(dict(sorted(arrays.items(), reverse=bool(rank))), root_rank=1)
    assert arrays["a"].asnumpy().tolist() == [1, 1] and arrays["b"].asnumpy().tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="list"):
        hvd.broadcast_parameters([nd.ones(2)])
    with pytest.raises(TypeError, match="'a' is a int"):
        hvd.broadcast_parameters({"a": 1})


@pytest.mark.ranks(2)
def test_two_trainers_for_a_thousand_steps() -> None:
    """M4: of nets with equal names, one of them with a deferred part, and never a wait."""
    rank = hvd.rank()
    for _ in range(12 * rank):
        gluon.nn.Dense(1)
    nets = [make_net(seed=rank + 1), make_net(seed=rank + 5, in_units=0)]
    trainers = [distributed_trainer(nets[0], "sgd")[0], store_by_name(nets[1], "sgd")[0]]
    for step in range(1000):
        for net, trainer in zip(nets, trainers):
            backward(net, batch(rank, step % 50))
            trainer.step(ROWS * (1 if trainer is trainers[0] else 2))
    for net in nets:
        assert_equal_on_all_ranks(weights(net))


@pytest.mark.ranks(2)
def test_uneven_batches_with_join() -> None:
    """M5: rank 0 leaves first."""
    rank = hvd.rank()
    net = make_net(seed=rank)
    trainer, samples = distributed_trainer(net, "sgd")
    for step in range(3 if rank == 0 else 5):
        backward(net, batch(rank, step))
        trainer.step(samples)
    assert hvd.join() == 1
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    assert_equal_on_all_ranks(weights(net))
    backward(net, batch(rank, 0))
    trainer.step(samples)
    assert_equal_on_all_ranks(weights(net))


@pytest.mark.parametrize("form", ["trainer", "in one group", "store by name"])
@pytest.mark.ranks(2)
def test_several_devices(form: str) -> None:
    """Each rank computes on two."""
    devices = [mx.cpu(0), mx.cpu(1)]
    net, reference = make_net(), make_net()
    net.collect_params().reset_ctx(devices)
    trainer, samples = FORMS[form](net, "sgd")
    alone = gluon.Trainer(reference.collect_params(), "sgd", dict(OPTIMIZERS["sgd"]), kvstore=None)
    for step in range(5):
        x, y = (gluon.utils.split_and_load(part, devices) for part in batch(hvd.rank(), step))
        with autograd.record():
            losses = [gluon.loss.L2Loss()(net(one), other) for one, other in zip(x, y)]
        autograd.backward(losses)
        trainer.step(samples)
        backward(reference, joined(step, range(2)))
        alone.step(ROWS * 2)
    for param, wanted in zip(net.collect_params().values(), weights(reference)):
        for part in param.list_data():
            np.testing.assert_allclose(part.asnumpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["trainer", "store by name"])
@pytest.mark.ranks(2)
def test_numpy_arrays_of_mxnet(form: str) -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        mx.random.seed(hvd.rank())
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(8, activation="tanh"), gluon.nn.Dense(2))
        net.initialize()
        net.hybridize()
        trainer, samples = FORMS[form](net, "adam")
        for step in range(3):
            x, y = (part.as_np_ndarray() for part in batch(hvd.rank(), step))
            with autograd.record():
                loss = gluon.loss.L2Loss()(net(x), y)
            loss.backward()
            trainer.step(samples)
        assert_equal_on_all_ranks(weights(net))


@pytest.mark.ranks(2)
def test_data_loader_workers() -> None:
    """T7: forked workers live and end without a trace."""
    data = gluon.data.ArrayDataset(np.arange(40.0, dtype=np.float32))
    total = 0.0
    for _ in range(2):
        for part in gluon.data.DataLoader(data, batch_size=4, num_workers=2):
            total += hvd.allreduce(part, op=hvd.Sum).sum().asscalar()
    assert total == 2 * 2 * sum(range(40))


@pytest.mark.ranks(3)
def test_process_set() -> None:
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 2])
    net, reference = make_net(), make_net()
    trainer, samples = distributed_trainer(net, "sgd", process_set=pair)
    alone = gluon.Trainer(reference.collect_params(), "sgd", dict(OPTIMIZERS["sgd"]), kvstore=None)
    for step in range(3):
        backward(net, batch(rank, step))
        trainer.step(samples)
        backward(reference, joined(step, [1] if rank == 1 else [0, 2]))
        alone.step(ROWS * (1 if rank == 1 else 2))
    assert_same(net, reference)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.ranks(2)
def test_compression(compression: str) -> None:
    net, reference = make_net(), make_net()
    trainer, samples = distributed_trainer(net, "sgd", compression=getattr(hvd.Compression, compression))
    alone = gluon.Trainer(reference.collect_params(), "sgd", dict(OPTIMIZERS["sgd"]), kvstore=None)
    for step in range(3):
        backward(net, batch(hvd.rank(), step))
        trainer.step(samples)
        backward(reference, joined(step, range(2)))
        alone.step(ROWS * 2)
    assert_same(net, reference, 1e-2)
    assert any((got != wanted).any() for got, wanted in zip(weights(net), weights(reference)))
    assert_equal_on_all_ranks(weights(net))


class Lookup(gluon.Block):
    """Row-sparse gradients of a table, and a dense one."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = gluon.nn.Embedding(10, 3, sparse_grad=sparse)
        self.last = gluon.nn.Dense(2, in_units=3)

    def forward(self, x: Any) -> Any:
        return self.last(self.table(x))


@pytest.mark.parametrize("form", ["rows", "as dense", "optimizer"])
@pytest.mark.ranks(2)
def test_sparse_gradients(form: str) -> None:
    """Ranks have different rows, one of them none in one step; momentum makes steps of rows without gradient show."""
    rank = hvd.rank()
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    nets = [Lookup(True), Lookup(True)]
    for net in nets:
        net.initialize(mx.init.Constant(0.3))
    if form == "optimizer":
        trainer = gluon.Trainer(
            nets[0].collect_params(), hvd.DistributedOptimizer(mx.optimizer.SGD(**settings)), kvstore=None
        )
    else:
        params = nets[0].collect_params()
        trainer = hvd.DistributedTrainer(params, "sgd", settings, sparse_as_dense=form == "as dense")
    alone = gluon.Trainer(nets[1].collect_params(), "sgd", settings, kvstore=None)
    rows = [([0, 1], [1, 2]), ([5, 5], [7, 0]), ([1, 2], [2, 9])]
    for step in rows:
        for net, given in ((nets[0], step[rank]), (nets[1], step[0] + step[1])):
            with autograd.record():
                loss = gluon.loss.L2Loss()(net(nd.array(given)), nd.ones((len(given), 2)))
            loss.backward()
        trainer.step(2)
        alone.step(4)
    assert nets[0].table.weight.grad().stype == "row_sparse"
    assert_same(nets[0], nets[1])
    assert_equal_on_all_ranks(weights(nets[0]))


@pytest.mark.ranks(2)
def test_sparse_things_that_do_not_work_say_so() -> None:
    net = Lookup(True)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_ronde")
    with autograd.record():
        loss = net(nd.array([1])).sum()
    loss.backward()
    with pytest.raises(ValueError, match="KVStore.*sparse gradients"):
        trainer.step(1)
    table = gluon.Parameter("table", shape=(4, 2), stype="row_sparse", grad_stype="row_sparse")
    table.initialize(ctx=mx.cpu())
    with pytest.raises(ValueError, match="row_sparse parameters"):
        hvd.DistributedTrainer([table], "sgd")


@pytest.mark.ranks(2)
def test_gradients_that_only_one_rank_has() -> None:
    rank = hvd.rank()
    used, other = gluon.nn.Dense(1, in_units=2), gluon.nn.Dense(1, in_units=2)
    for net in (used, other):
        net.initialize(mx.init.One())
    params = [*used.collect_params().values(), *other.collect_params().values()]
    trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0})
    for step in range(2):
        with autograd.record():
            loss = used(nd.ones((1, 2))) + (other(nd.ones((1, 2))) if rank == step else 0)
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
    assert used.weight.data().asnumpy().tolist() == [[-1, -1]]
    assert other.weight.data().asnumpy().tolist() == [[0, 0]]
    with autograd.record():
        loss = used(nd.ones((1, 2)))
    loss.backward()
    trainer.step(1, ignore_stale_grad=True)
    assert other.weight.data().asnumpy().tolist() == [[0, 0]]


@pytest.mark.ranks(2)
def test_clipping_between_reduction_and_update() -> None:
    rank = hvd.rank()
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.Zero())
    for trainer in (distributed_trainer(net, "sgd")[0], store_by_name(net, "sgd")[0]):
        with autograd.record():
            loss = (net(nd.ones((1, 2))) * (rank + 1)).sum()
        loss.backward()
        trainer.allreduce_grads()
        total = 1.5 if isinstance(trainer, hvd.DistributedTrainer) else 3.0
        assert net.weight.grad().asnumpy().tolist() == [[total, total]]
        trainer.update(1)


@pytest.mark.parametrize("form", ["trainer", "optimizer"])
@pytest.mark.ranks(2)
def test_states_are_saved_and_loaded(form: str, tmp_path: Path) -> None:
    """A restored trainer still averages, and equals one that went on."""
    rank = hvd.rank()
    nets = [make_net(), make_net()]
    file = str(tmp_path / f"states{rank}")
    trainer, samples = FORMS[form](nets[0], "adam")
    for step in range(3):
        backward(nets[0], batch(rank, step))
        trainer.step(samples)
    trainer.save_states(file)
    nets[0].save_parameters(file + ".params")
    nets[1].load_parameters(file + ".params")
    restored, _ = FORMS[form](nets[1], "adam")
    restored.load_states(file)
    for net, each in zip(nets, (trainer, restored)):
        backward(net, batch(rank, 3))
        each.step(samples)
    assert_same(nets[0], nets[1])
    assert_equal_on_all_ranks(weights(nets[1]))


@pytest.mark.ranks(2)
def test_store() -> None:
    """What MXNet's interface says of stores, without a trainer."""
    rank = hvd.rank()
    store, second = mx.kv.create("dist_ronde"), mx.kv.create("dist_ronde")
    assert (store.rank, store.num_workers) == (rank, 2)
    assert "dist" in store.type and "async" not in store.type and not store.is_capable("optimizer")
    out = nd.zeros((2,))
    store.init("w", nd.ones((2,)) * (rank + 5))
    store.pull("w", out=out)
    assert out.asnumpy().tolist() == [5, 5]
    value = nd.ones((2,)) * (rank + 1)
    store.push("w", value)
    store.pull("w", out=out)
    assert out.asnumpy().tolist() == [3, 3] and value.asnumpy().tolist() == [rank + 1] * 2
    for each in (store, second):
        each.pushpull(3, value, out=out, priority=-3)
        assert out.asnumpy().tolist() == [3, 3]
    parts = [nd.ones((2,)) * (rank + 1), nd.ones((2,))]  # as from two devices
    store.pushpull("p", parts)
    assert [part.asnumpy().tolist() for part in parts] == [[5, 5], [5, 5]]
    several = [nd.ones((1,)) * rank, nd.ones((3,)) * rank]
    store.pushpull(["a", "b"], several)
    assert several[1].asnumpy().tolist() == [1, 1, 1]
    store.broadcast(["a", "b"], several, out=[[out[:1]], [nd.zeros((3,))]])
    store.barrier()
    with pytest.raises(KeyError, match="'nothing'"):
        store.pull("nothing", out=out)
    for refused, text in (
        (lambda: store.set_gradient_compression({"type": "2bit"}), "compression=Compression.fp16"),
        (lambda: store.set_optimizer(mx.optimizer.SGD()), "update_on_kvstore=False"),
        (lambda: store.row_sparse_pull("w", out=out, row_ids=nd.array([0])), "row_sparse"),
    ):
        with pytest.raises(ValueError, match=text):
            refused()
    assert store.join() in (0, 1)


@pytest.mark.ranks(2)
def test_options_that_are_refused() -> None:
    net = make_net()
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", kvstore="dist_ronde", compression_params={"type": "2bit", "threshold": 0.5}
    )
    backward(net, batch(hvd.rank(), 0))
    with pytest.raises(ValueError, match="gradient compression"):
        trainer.step(1)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD())
    for refused in (
        lambda: hvd.DistributedOptimizer(optimizer),
        lambda: hvd.DistributedTrainer(net.collect_params(), "sgd", gradient_predivide_factor=0.0),
        lambda: hvd.DistributedTrainer(net.collect_params(), "sgd", num_groups=-1),
    ):
        with pytest.raises(ValueError):
            refused()
    with pytest.raises(TypeError, match="Trainer"):
        hvd.DistributedOptimizer(trainer)
    with pytest.warns(UserWarning, match="averages by itself"):
        hvd.DistributedTrainer(net.collect_params(), optimizer)
    assert type(optimizer) is mx.optimizer.SGD
    with pytest.raises(TypeError, match="compression"):
        hvd.DistributedTrainer(net.collect_params(), "sgd", compression="fp16")


def test_before_init() -> None:
    net = make_net()
    with pytest.raises(hvd.NotInitializedError):
        hvd.DistributedTrainer(net.collect_params(), "sgd")
    with pytest.raises(hvd.NotInitializedError):
        hvd.DistributedOptimizer(mx.optimizer.SGD())
    with pytest.raises(hvd.NotInitializedError):
        hvd.allreduce(nd.ones((1,)))


@pytest.mark.ranks(2)
def test_copies_of_an_optimizer_are_distributed() -> None:
    rank = hvd.rank()
    optimizer = pickle.loads(pickle.dumps(hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0))))
    weight, grad = nd.zeros((2,)), nd.ones((2,)) * (rank + 1)
    mx.optimizer.get_updater(optimizer)(0, grad, weight)
    assert weight.asnumpy().tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("form", ["store", "optimizer"])
@pytest.mark.ranks(2)
def test_module_equals_one_process(form: str) -> None:
    """From different initial weights: both take those of rank 0."""
    rank = hvd.rank()

    def make_module(rows: int) -> Any:
        flow = mx.sym.tanh(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="one"))
        flow = mx.sym.FullyConnected(flow, num_hidden=2, name="two")
        module = mx.mod.Module(
            mx.sym.LinearRegressionOutput(flow, mx.sym.var("label"), name="out"), ["data"], ["label"]
        )
        module.bind([("data", (rows, 4))], [("label", (rows, 2))])
        return module

    def run(module: Any, data: list[tuple[Any, Any]]) -> list[np.ndarray]:
        for x, y in data:
            module.forward_backward(mx.io.DataBatch([x], [y]))
            module.update()
        return [value.asnumpy() for _, value in sorted(module.get_params()[0].items())]

    settings = (("learning_rate", 0.1), ("momentum", 0.9))
    module, reference = make_module(ROWS), make_module(2 * ROWS)
    mx.random.seed(rank)
    module.init_params(mx.init.Xavier())
    mx.random.seed(0)
    reference.init_params(mx.init.Xavier())
    if form == "store":
        module.init_optimizer("dist_ronde", "sgd", settings)
    else:
        hvd.broadcast_parameters(module.get_params()[0])
        module.set_params(*module.get_params())
        optimizer = mx.optimizer.SGD(momentum=0.9, learning_rate=0.1, rescale_grad=1 / ROWS)
        module.init_optimizer(None, hvd.DistributedOptimizer(optimizer))
    reference.init_optimizer(None, "sgd", settings)
    got = run(module, [batch(rank, step) for step in range(10)])
    wanted = run(reference, [joined(step, range(2)) for step in range(10)])
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert_equal_on_all_ranks(got)
