"""DistributedOptimizer: what it computes equals one process on the joined data."""

import copy
import pickle
import re
import warnings
from typing import Any, Callable, Optional

import pytest

torch = pytest.importorskip("torch")

import ronde.torch as hvd  # noqa: E402

DOUBLE = torch.float64


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(DOUBLE)


def batch(rank: int, step: int, rows: int = 6) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, 4, dtype=DOUBLE, generator=generator), torch.randn(
        rows, 2, dtype=DOUBLE, generator=generator
    )


def joined(step: int, size: int) -> tuple[Any, Any]:
    parts = [batch(r, step) for r in range(size)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def loss_of(model: Any, data: tuple[Any, Any]) -> Any:
    return ((model(data[0]) - data[1]) ** 2).mean()


def assert_same(model: Any, reference: Any, tolerance: float = 1e-10) -> None:
    for (name, got), wanted in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}

OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain": lambda model: {},
    "named": lambda model: {"named_parameters": model.named_parameters()},
    "two groups": lambda model: {"groups": 2, "named_parameters": model.named_parameters()},
    "one group": lambda model: {"groups": [[model[0].weight, model[2].bias]]},
    "views": lambda model: {"gradient_as_bucket_view": True},
    "predivide": lambda model: {"gradient_predivide_factor": 4.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.ranks(2)
def test_equals_one_process(optimizer: str, options: str) -> None:
    model, reference = make_model(), make_model()
    distributed = hvd.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()), **OPTIONS[options](model))
    alone = OPTIMIZERS[optimizer](reference.parameters())
    assert isinstance(distributed, type(alone)) and type(distributed).__name__ == type(alone).__name__
    for step in range(20):
        distributed.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        distributed.step()
        alone.zero_grad()
        loss_of(reference, joined(step, hvd.size())).backward()
        alone.step()
    assert_same(model, reference, 1e-6)
    state = [value.detach().numpy().tobytes() for value in model.state_dict().values()]
    assert len(set(hvd.allgather_object(b"".join(state)))) == 1  # equal on all ranks, bit by bit


@pytest.mark.ranks(2)
def test_sum_and_process_set() -> None:
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    loss_of(model, batch(hvd.rank(), 0)).backward()
    optimizer.step()
    sum(loss_of(reference, batch(r, 0)) for r in range(2)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_same(model, reference)

    only_zero = hvd.add_process_set([0])
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=only_zero)
    loss_of(model, batch(hvd.rank(), 0)).backward()
    optimizer.step()
    loss_of(reference, batch(hvd.rank(), 0)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_same(model, reference)


@pytest.mark.ranks(2)
def test_missing_gradients() -> None:
    """T2: one that only rank 0 has, one that nobody has, one that is frozen."""
    rank = hvd.rank()
    used, sometimes, never, frozen = (torch.nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(4))
    frozen.requires_grad_(False)
    params = [used, sometimes, never, frozen]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=1.0), named_parameters=[(f"p{i}", p) for i, p in enumerate(params)]
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = (used * (rank + 1)).sum()
        if rank == 0:
            loss = loss + (sometimes * 8).sum()
        loss.backward()
        optimizer.step()
    assert used[0] == 1 - 2 * 1.5
    assert sometimes[0] == 2 - 2 * 4
    assert never[0] == 3 and frozen[0] == 4
    # Unfrozen later: it takes part.
    frozen.requires_grad_(True)
    optimizer.zero_grad()
    (frozen * (rank + 1)).sum().backward()
    optimizer.step()
    assert frozen[0] == 4 - 1.5


@pytest.mark.ranks(2)
def test_accumulation() -> None:
    """T3: 10 batches, 4 passes at most, step after batches 4, 8 and 10."""
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=4)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(1, 11):
        loss_of(model, batch(hvd.rank(), step)).backward()
        (sum(loss_of(reference, batch(r, step)) for r in range(2)) / 2).backward()
        if step in (4, 8, 10):
            for each in (optimizer, alone):
                each.step()
                each.zero_grad()
    assert_same(model, reference)
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss_of(model, batch(hvd.rank(), 11)).backward()
    with pytest.raises(AssertionError, match=r"computed 3 times before step\(\), but backward_passes_per_step is 2"):
        loss_of(model, batch(hvd.rank(), 12)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="backward_passes_per_step is 0"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=0)


@pytest.mark.ranks(2)
def test_several_optimizers_and_equal_names() -> None:
    """T4: a GAN's loop; both networks have the same parameter names, and rank 1 made other wrappers before."""
    rank = hvd.rank()
    if rank == 1:
        spare = make_model(9)
        hvd.DistributedOptimizer(torch.optim.SGD(spare.parameters(), lr=1.0), spare.named_parameters())
    nets = [make_model(1), make_model(2)]
    references = [make_model(1), make_model(2)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01), net.named_parameters()) for net in nets
    ]
    alone = [torch.optim.Adam(net.parameters(), lr=0.01) for net in references]

    def losses(networks: list[Any], data: tuple[Any, Any]) -> Any:
        return ((networks[1](torch.cat([networks[0](data[0])] * 2, 1)) - data[1]) ** 2).mean()

    for step in range(6):
        turn = step % 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The other network gets gradients, too, and is not stepped: they are reduced and dropped.
        losses(nets, batch(rank, step)).backward()
        optimizers[turn].step()
        optimizers[1 - turn].synchronize()
        for optimizer in alone:
            optimizer.zero_grad()
        losses(references, joined(step, 2)).backward()
        alone[turn].step()
    for net, reference in zip(nets, references):
        assert_same(net, reference)


@pytest.mark.ranks(2)
def test_clipping_sends_once() -> None:
    """T5: synchronize(), clip, step()."""
    from ronde import _core

    names = []
    prepare = _core.prepare_allreduce
    _core.prepare_allreduce = lambda name, *a, **k: names.append(name) or prepare(name, *a, **k)
    try:
        model, reference = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        alone = torch.optim.SGD(reference.parameters(), lr=0.1)
        before = hvd.metrics()["operations"]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(hvd.rank(), step)).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if step == 1:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            alone.zero_grad()
            loss_of(reference, joined(step, 2)).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            alone.step()
        assert_same(model, reference)
        # Before the first step: which gradients are sparse.
        assert hvd.metrics()["operations"] - before == 3 * 4 + 1
        assert len(names) == 4  # told once
        assert all(re.fullmatch(r"gradient\.[0-9a-f]{8}\.\d+\.[02]\.(weight|bias)", name) for name in names)
    finally:
        _core.prepare_allreduce = prepare


@pytest.mark.ranks(2)
def test_zero_grad_while_gradients_are_on_their_way() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, batch(hvd.rank(), 0)).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_scheduler_made_before() -> None:
    """The wrapper keeps the optimizer's identity: the scheduler's learning rates count, and it does not complain."""
    model, reference = make_model(), make_model()
    runs = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for net, wrap in ((model, True), (reference, False)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            if wrap:
                assert hvd.DistributedOptimizer(optimizer, net.named_parameters()) is optimizer
                hvd.broadcast_optimizer_state(optimizer, 0)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(net, batch(hvd.rank(), step) if wrap else joined(step, 2)).backward()
                optimizer.step()
                scheduler.step()
            runs.append(optimizer.param_groups[0]["lr"])
    assert runs == [0.0125, 0.0125]
    assert_same(model, reference)


@pytest.mark.ranks(2)
def test_closures() -> None:
    """LBFGS calls the closure several times per step; its decisions depend on the loss of all ranks."""
    model, reference = make_model(), make_model()

    def run(net: Any, optimizer: Any, data: tuple[Any, Any]) -> float:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, data)
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    for line_search in (None, "strong_wolfe"):
        options = {"lr": 0.5, "max_iter": 6, "line_search_fn": line_search}
        distributed = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **options))
        alone = torch.optim.LBFGS(reference.parameters(), **options)
        for step in range(3):
            loss = run(model, distributed, batch(hvd.rank(), step))
            assert loss == pytest.approx(run(reference, alone, joined(step, 2)), rel=1e-9)
        assert_same(model, reference, 1e-8)
    assert run(model, hvd.DistributedOptimizer(torch.optim.Adam(model.parameters())), batch(hvd.rank(), 0)) > 0


@pytest.mark.parametrize("way", ["plain", "synchronize", "unscale and clip"])
@pytest.mark.ranks(2)
def test_autocast_and_grad_scaler(way: str) -> None:
    """Overflow on one rank: both skip the step. Otherwise both step, with gradients unscaled once."""
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip(f"torch {torch.__version__} has no GradScaler for CPUs")
    model = make_model().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        inputs, targets = (t.float() for t in batch(hvd.rank(), step))
        if step == 2 and hvd.rank() == 1:
            inputs = inputs * float("inf")
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ((model(inputs).float() - targets) ** 2).mean()
        scaler.scale(loss).backward()
        if way == "synchronize":
            optimizer.synchronize()
        if way == "unscale and clip":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if way == "synchronize":
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before))
        assert changed == (step != 2)
        assert all(q.abs().max() < 10 for q in model.parameters())
        assert len(set(hvd.allgather_object(tuple(model[0].weight.flatten().tolist())))) == 1
    assert scaler.get_scale() == 512


@pytest.mark.ranks(2)
def test_access_to_groups_amid_backward_passes() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0))
    (first * 2).sum().backward()
    assert optimizer.param_groups[0]["lr"] == 1  # reduces; zeros stand for the second
    with pytest.raises(AssertionError, match="param_groups"):
        second.sum().backward()
    optimizer.zero_grad()
    (first * 2 + second).sum().backward()
    optimizer.step()
    assert first[0] == -1 and second[0] == 0


@pytest.mark.ranks(2)
def test_sparse_gradients() -> None:
    """Embeddings, also with a rank that has no gradient in a later step; dense, sparse and sparse as dense agree."""
    rank = hvd.rank()
    tables = []
    for kind in ("sparse", "as dense", "dense"):
        torch.manual_seed(3)
        table = torch.nn.Embedding(50, 4, sparse=kind != "dense").to(DOUBLE)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.5), table.named_parameters(), sparse_as_dense=kind == "as dense"
        )
        for step in range(3):
            optimizer.zero_grad()
            if step != 2 or rank == 0:
                rows = torch.tensor([[1, 1, 7 + rank], [rank, 30, 31], [2, 2, 3]][step])
                (table(rows) ** 2).sum().backward()
            optimizer.step()
            assert table.weight.grad.is_sparse == (kind == "sparse")
        tables.append(table.weight.detach().clone())
    torch.testing.assert_close(tables[0], tables[2], rtol=1e-12, atol=0)
    torch.testing.assert_close(tables[1], tables[2], rtol=1e-12, atol=0)
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()))
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    assert len(set(hvd.allgather_object(tuple(table.weight[:2].flatten().tolist())))) == 1


@pytest.mark.ranks(2)
def test_compression_of_gradients() -> None:
    """T11: on CPU tensors. Whole numbers are exact in 16 bits, so the result must be, too."""
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        weight = torch.nn.Parameter(torch.zeros(5))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression)
        (weight * torch.arange(5.0) * (hvd.rank() + 1) * 2).sum().backward()
        optimizer.step()
        assert weight.dtype == torch.float32 and weight.grad.dtype == torch.float32
        assert weight.tolist() == [0, -3, -6, -9, -12]


@pytest.mark.ranks(2)
def test_channels_last_parameters() -> None:
    rank = hvd.rank()
    torch.manual_seed(1)
    layer = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters())
    images = [torch.arange(2 * 3 * 25.0).reshape(2, 3, 5, 5) / 100 + r for r in range(2)]
    reference = copy.deepcopy(layer)
    layer(images[rank].contiguous(memory_format=torch.channels_last)).sum().backward()
    optimizer.synchronize()
    (reference(torch.cat(images)).sum() / 2).backward()
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad)


@pytest.mark.ranks(2)
def test_wrong_arguments() -> None:
    model = make_model()

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    first, *others = list(model.named_parameters())
    with pytest.raises(ValueError, match="more than once: 0.weight"):
        make(named_parameters=[first, *others, ("0.weight", others[0][1])])
    with pytest.raises(ValueError, match=r"1 of the optimizer's parameters have no name: number 0 \(8, 4\)"):
        make(named_parameters=others)
    with pytest.raises(ValueError, match="pairs"):
        make(named_parameters=list(model.parameters()))
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        make(gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="group 0 is not in the optimizer"):
        make(groups=[[torch.nn.Parameter(torch.ones(1))]])
    with pytest.raises(ValueError, match="'parameter.0' is in groups 0 and 1"):
        make(groups=[[model[0].weight], [model[0].weight]])
    with pytest.raises(ValueError, match="groups is -1"):
        make(groups=-1)
    with pytest.raises(TypeError, match="torch optimizer"):
        hvd.DistributedOptimizer(model)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(make())
    with pytest.warns(DeprecationWarning, match="num_groups"):
        make(num_groups=2)


@pytest.mark.ranks(2)
def test_life_of_the_wrapper() -> None:
    """Groups added later, copies, loading a state, and wrappers that are gone."""
    rank = hvd.rank()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model[0].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    assert len(set(hvd.allgather_object(tuple(model[2].weight.flatten().tolist())))) == 1
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.Adam
        assert [group["lr"] for group in copied.param_groups] == [0.1, 0.01]
    optimizer.zero_grad()
    loss_of(model, batch(rank, 1)).backward()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad()

    parameter = torch.nn.Parameter(torch.ones(2))
    for _ in range(3):  # each replaces the one before, whose hook must not send any more
        replaced = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        replaced.zero_grad()
        (parameter * (rank + 1)).sum().backward()
        replaced.step()
    assert parameter.tolist() == [1 - 4.5] * 2


@pytest.mark.ranks(2)
def test_torch_compile() -> None:
    model, reference = make_model(), make_model()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(compiled, batch(hvd.rank(), step)).backward()
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, joined(step, 2)).backward()
        alone.step()
    assert_same(model, reference)

    @torch.compile(backend="eager")
    def scaled_mean(tensor: Any) -> Any:
        return hvd.allreduce(tensor * 2) + 1

    assert scaled_mean(torch.tensor([1.0 + hvd.rank()])).tolist() == [4]


@pytest.mark.ranks(2)
def test_data_loader_workers() -> None:
    """T7: forked workers live and end without a trace."""
    loader = torch.utils.data.DataLoader(torch.arange(40.0), batch_size=4, num_workers=2)
    total = torch.zeros(1)
    for _ in range(2):
        for data in loader:
            total += hvd.allreduce(data, op=hvd.Sum).sum()
    assert total == 2 * 2 * sum(range(40))


@pytest.mark.ranks(2)
def test_uneven_batches_with_join() -> None:
    rank = hvd.rank()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3 if rank == 0 else 5):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
    assert hvd.join() == 1
    hvd.broadcast_parameters(model.state_dict(), 1)
    assert len(set(hvd.allgather_object(tuple(model[0].weight.flatten().tolist())))) == 1


def test_before_init() -> None:
    parameter: Optional[Any] = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(hvd.NotInitializedError):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.ranks(2)
def test_a_model_that_one_rank_does_not_use_at_first(named: bool) -> None:
    """Two models with equal names: which gradient comes first differs, the order of the steps does not."""
    rank = hvd.rank()
    models, references = [make_model(), make_model()], [make_model(), make_model()]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters() if named else None)
        for m in models
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(models[1], batch(rank, step))
        if rank == 0 or step == 2:
            loss = loss + loss_of(models[0], batch(rank, step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for number, reference in enumerate(references):
            reference.zero_grad()
            ranks = [r for r in range(2) if number == 1 or r == 0 or step == 2]
            sum(loss_of(reference, batch(r, step)) / 2 for r in ranks).backward()
            with torch.no_grad():
                for param in reference.parameters():
                    param -= 0.1 * param.grad
    for model, reference in zip(models, references):
        assert_same(model, reference)


@pytest.mark.ranks(2)
def test_a_parameter_of_two_optimizers() -> None:
    rank = hvd.rank()
    shared, other = torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(2))
    first = hvd.DistributedOptimizer(torch.optim.SGD([shared], lr=1.0), [("shared", shared)])
    second = hvd.DistributedOptimizer(torch.optim.SGD([shared, other], lr=1.0), [("shared", shared), ("o", other)])
    for _ in range(4):
        shared.grad = other.grad = None
        (shared * (rank + 1) + other.sum()).sum().backward()
        first.synchronize()
        second.synchronize()
        assert shared.grad.unique().tolist() == [1.5]
        first.step()
        second.step()
    with pytest.raises(ValueError, match="'shared' is in another DistributedOptimizer"):
        hvd.DistributedOptimizer(torch.optim.SGD([shared], lr=1.0), [("shared", shared)], op=hvd.Sum)


@pytest.mark.ranks(2)
def test_sparse_gradients_that_one_rank_does_not_have_at_first() -> None:
    """And embeddings that are used in another order on each rank."""
    rank = hvd.rank()
    tables = [torch.nn.Embedding(10, 2, sparse=True) for _ in range(2)]
    for table in tables:
        torch.nn.init.ones_(table.weight)
    named = [(f"t{number}", table.weight) for number, table in enumerate(tables)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param for _, param in named], lr=1.0), named)
    for step in range(3):
        optimizer.zero_grad()
        used = [tables[0]] if step == 0 and rank == 1 else [*tables][:: 1 if rank else -1]
        loss = torch.zeros(())
        for table in used:
            loss = loss + table(torch.tensor([rank])).sum()
        loss.backward()
        optimizer.step()
    assert tables[0].weight[:3, 0].tolist() == [1 - 3 / 2, 1 - 3 / 2, 1]
    assert tables[1].weight[:3, 0].tolist() == [1 - 3 / 2, 1 - 2 / 2, 1]


@pytest.mark.ranks(2)
def test_sums_are_not_reduced_twice() -> None:
    rank = hvd.rank()
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        ((rank + 1) * a + b).backward()
        optimizer.synchronize()
        optimizer.synchronize()
        optimizer.step()
    assert (a.item(), b.item()) == (-6, -4)
    optimizer.zero_grad(set_to_none=False)
    a.backward()
    assert optimizer.param_groups[0]["lr"] == 1.0  # reduces what there is
    with pytest.raises(AssertionError, match="only op=Average"):
        b.backward()


@pytest.mark.ranks(2)
def test_the_scaler_sees_reduced_gradients_of_groups_that_are_not_complete() -> None:
    rank = hvd.rank()
    used, unused = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0), groups=1)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        (used * (rank + 1)).sum().backward()
        seen.append(optimizer.param_groups[0]["params"][0].grad.item())
        optimizer.step()
    assert seen == [1.5, 1.5]


@pytest.mark.ranks(2)
def test_hooks_of_before_see_reduced_gradients() -> None:
    rank = hvd.rank()
    param = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([param], lr=1.0)
    seen = []
    plain.register_step_pre_hook(lambda *_: seen.append(param.grad.item()))
    optimizer = hvd.DistributedOptimizer(plain)
    for _ in range(2):
        optimizer.zero_grad()
        (param * (rank + 1)).sum().backward()
        optimizer.step()
    assert seen == [1.5, 1.5]
