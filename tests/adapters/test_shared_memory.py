"""Tensors in memory that the ranks of a host reach, and gradients that live there."""

import gc
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ronde  # noqa: E402
import ronde.torch as hvd  # noqa: E402

LARGE = 100_003  # more than one chunk of float32, and no multiple of anything


def values(rank: int, count: int, dtype: Any = torch.float32) -> Any:
    return ((torch.arange(count) * 31 + rank * 1009) % 251).to(dtype)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8]
)
def test_results_are_those_of_ordinary_tensors(dtype: Any) -> None:
    tensor = hvd.empty_shared(LARGE, dtype=dtype)
    tensor.copy_(values(hvd.rank(), LARGE, dtype))
    ordinary = tensor.clone()
    for op in (hvd.Sum, hvd.Max):
        assert hvd.allreduce_(tensor, op=op) is tensor
        hvd.allreduce_(ordinary, op=op)
        assert torch.equal(tensor, ordinary)
    tensor.copy_(values(hvd.rank(), LARGE, dtype))
    assert torch.equal(hvd.allgather(tensor), torch.cat([values(r, LARGE, dtype) for r in range(3)]))
    hvd.broadcast_(tensor, 2)
    assert torch.equal(tensor, values(2, LARGE, dtype))


@pytest.mark.ranks(2)
def test_one_rank_may_have_ordinary_memory() -> None:
    count = LARGE
    tensors = [
        hvd.empty_shared(count) if (hvd.rank() + i) % 2 else torch.empty(count)  # by turns
        for i in range(4)
    ]
    for i, tensor in enumerate(tensors):
        tensor.copy_(values(hvd.rank() + 10 * i, count))
    hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, values(10 * i, count) + values(1 + 10 * i, count))


@pytest.mark.ranks(2)
def test_shapes() -> None:
    assert hvd.empty_shared(2, 3).shape == (2, 3)
    assert hvd.empty_shared((4, 5), dtype=torch.int64).shape == (4, 5)
    assert hvd.empty_shared([0, 7]).shape == (0, 7)
    assert hvd.empty_shared().shape == ()
    assert ronde.empty_shared((2, 2), np.float64).dtype == np.float64
    assert ronde.empty_shared(5).shape == (5,)
    for four in (np.int64(4), np.array([4]), (np.int32(4),), torch.Size([4]), torch.tensor(4)):
        assert hvd.empty_shared(four).shape == (4,) and ronde.empty_shared(four).shape == (4,)
    assert hvd.empty_shared(np.int64(2), torch.tensor(3)).shape == (2, 3)
    assert ronde.empty_shared(np.array([2, 3])).shape == (2, 3)
    with pytest.raises(TypeError, match="complex32"):
        hvd.empty_shared(3, dtype=torch.complex32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("shape", "error", "reason"),
    [
        (None, TypeError, "no number and no sequence"),
        (2.5, TypeError, "no number and no sequence"),
        ("x", TypeError, "no number and no sequence"),
        (b"ab", TypeError, "no number and no sequence"),
        ({4}, TypeError, "no number and no sequence"),
        ((4, None), TypeError, "whole numbers"),
        ([3, [4]], TypeError, "whole numbers"),
        ((2, 2.0), TypeError, "whole numbers"),
        (-1, ValueError, "negative"),
        ((4, -1), ValueError, "negative"),
        (-(1 << 70), ValueError, "negative"),
        (1 << 70, ValueError, "too large"),
        ((2, 1 << 63), ValueError, "too large"),
        ((1 << 40, 1 << 40), ValueError, "too large"),
        ((1 << 48,), ValueError, "RONDE_SHARED_BYTES"),
    ],
)
def test_what_is_no_shape_is_named(shape: Any, error: Any, reason: str) -> None:
    for empty_shared in (hvd.empty_shared, ronde.empty_shared):
        with pytest.raises(error, match=re.escape(f"empty_shared of shape {shape!r}: ") + f".*{reason}"):
            empty_shared(shape)
    with pytest.raises(TypeError, match=re.escape("empty_shared of shape (4, None): ")):
        hvd.empty_shared(4, None)


@pytest.mark.ranks(2, env={"RONDE_SHARED_BYTES": "1"})
def test_less_than_a_page_is_said_to_be_nothing() -> None:
    with pytest.raises(ValueError, match=r"rank has 0 in all \(RONDE_SHARED_BYTES is 1, of which whole pages of 4096"):
        hvd.empty_shared(4)


@pytest.mark.ranks(2)
def test_more_than_there_is_names_the_option() -> None:
    with pytest.raises(ValueError, match="RONDE_SHARED_BYTES"):
        hvd.empty_shared(1 << 50, dtype=torch.uint8)


@pytest.mark.ranks(2)
def test_memory_is_used_again() -> None:
    seen = set()
    for _ in range(8):
        tensor = hvd.empty_shared(1 << 20, dtype=torch.uint8)
        seen.add(tensor.data_ptr())
        del tensor
        gc.collect()
    assert len(seen) == 1


@pytest.mark.ranks(2, init=False)
def test_it_outlives_the_engine() -> None:
    hvd.init()
    tensor = hvd.empty_shared(LARGE)
    tensor.copy_(values(hvd.rank(), LARGE))
    hvd.shutdown()
    gc.collect()
    hvd.init()
    assert torch.equal(tensor, values(hvd.rank(), LARGE))
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert torch.equal(tensor, values(0, LARGE) + values(1, LARGE))
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_a_forked_child_leaves_it_alone() -> None:
    tensor = hvd.empty_shared(LARGE)
    tensor.copy_(values(hvd.rank(), LARGE))
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(tensor, values(hvd.rank(), LARGE))
    other = hvd.empty_shared(LARGE)
    assert other.data_ptr() != tensor.data_ptr()


@pytest.mark.ranks(2)
def test_errors_leave_it_usable() -> None:
    tensor = hvd.empty_shared(LARGE)
    tensor.copy_(values(hvd.rank(), LARGE))
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce_(tensor[: LARGE - hvd.rank()], op=hvd.Sum, name="differs")
    assert torch.equal(tensor, values(hvd.rank(), LARGE))
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert torch.equal(tensor, values(0, LARGE) + values(1, LARGE))


@pytest.mark.ranks(2)
def test_numpy_arrays() -> None:
    array = ronde.empty_shared(LARGE, np.float32)
    array[:] = values(ronde.rank(), LARGE).numpy()
    ronde.allreduce_(array, op=ronde.Sum)
    np.testing.assert_array_equal(array, (values(0, LARGE) + values(1, LARGE)).numpy())


def lent() -> tuple[int, int]:
    """Bytes of this rank's allreduces so far: lent, all."""
    allreduce = hvd.metrics()["ops"]["allreduce"]
    assert hvd.metrics()["lent"] >= allreduce["lent"]
    return allreduce["lent"], allreduce["bytes"]


@pytest.mark.ranks(3)
def test_it_is_lent_and_other_memory_is_not() -> None:
    count = 1 << 18  # of float32: 1 MiB
    tensor, array = hvd.empty_shared(count), ronde.empty_shared(count)
    for i, (shared, is_lent) in enumerate(
        [(tensor, True), (array, True), (tensor.clone(), False), (array.copy(), False)]
    ):
        data = values(hvd.rank() + 10 * i, count)
        shared[:] = data if isinstance(shared, torch.Tensor) else data.numpy()
        before = lent()
        if isinstance(shared, torch.Tensor):
            hvd.allreduce_(shared, op=hvd.Sum)
        else:
            ronde.allreduce_(shared, op=ronde.Sum)
        now = lent()
        assert (now[0] - before[0], now[1] - before[1]) == ((1 << 20) * is_lent, 1 << 20)
        np.testing.assert_array_equal(np.asarray(shared), sum(values(r + 10 * i, count) for r in range(3)).numpy())
    before = lent()
    hvd.allreduce(tensor, op=hvd.Sum)  # the result is elsewhere: neighbours cannot write it where the input lies
    assert lent()[0] == before[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [True, False])
def test_gradients_are_lent(views: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=views, op=hvd.Sum
    )
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        before = lent()
        model(values(hvd.rank() + 10 * step, 4 * 512).view(4, 512)).mean().backward()
        optimizer.step()
        all_bytes = lent()[1] - before[1]
        gradients = sum(4 * param.numel() for param in model.parameters())
        assert gradients <= all_bytes < gradients + 1000  # ranks also tell each other which gradients they have
        # Two megabytes of weights, and biases of two kilobytes that may travel alone and then be packed.
        assert lent()[0] - before[0] >= (2 << 20 if views else 0)
        assert views or lent()[0] == 0


@pytest.mark.ranks(2, env={"RONDE_SHARED_BYTES": "0"})
def test_without_a_heap_it_is_ordinary_memory() -> None:
    tensor = hvd.empty_shared(LARGE)
    tensor.copy_(values(hvd.rank(), LARGE))
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert torch.equal(tensor, values(0, LARGE) + values(1, LARGE))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_live_there(to_none: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.ReLU(), torch.nn.Linear(600, 64))
    reference = torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.ReLU(), torch.nn.Linear(600, 64))
    reference.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), gradient_as_bucket_view=True
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    places: list[set[int]] = [set() for _ in model.parameters()]
    for step in range(4):
        inputs = [values(r + 10 * step, 8 * 64).view(8, 64) / 251 for r in range(2)]
        optimizer.zero_grad(set_to_none=to_none)
        model(inputs[hvd.rank()]).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        (sum(reference(each).square().mean() for each in inputs) / 2).backward()
        plain.step()
        for place, param in zip(places, model.parameters()):
            place.add(param.grad.data_ptr())
    assert all(len(place) == 1 for place in places)
    for got, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got, wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_a_parameter_that_changes_afterwards_leaves_its_view(change: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 600))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), gradient_as_bucket_view=True)
    weight.data = weight.data.double() if change == "dtype" else weight.data[:32].clone()
    for _ in range(2):
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
    assert torch.equal(weight.data, torch.full_like(weight.data, -3.0))


@pytest.mark.ranks(2)
def test_gradients_that_were_exchanged() -> None:
    one, other = torch.nn.Parameter(torch.zeros(20_000)), torch.nn.Parameter(torch.zeros(20_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, other], lr=1.0), gradient_as_bucket_view=True)
    (one + other).sum().backward()
    optimizer.step()
    for param in (one, other):
        param.data.zero_()
    one.grad, other.grad = other.grad, one.grad
    one.grad.fill_(1 + hvd.rank())
    other.grad.fill_(100 + hvd.rank())
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert (one == -1.5).all() and (other == -100.5).all()


@pytest.mark.ranks(2)
def test_adasum_has_no_gradients_to_keep_there() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1)
    with pytest.raises(ValueError, match="gradient_as_bucket_view"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, gradient_as_bucket_view=True)


def test_a_limit_of_address_space_costs_the_heap_only(tmp_path: Any) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "import numpy as np, ronde as hvd\n"
        "hvd.init()\n"
        "array = hvd.empty_shared(100000)\n"
        "array[:] = hvd.rank() + 1\n"
        "hvd.allreduce_(array, op=hvd.Sum)\n"
        "assert (array == 3).all()\n"
        "hvd.shutdown()\n"
    )
    command = [sys.executable, "-m", "ronde.launcher", "-np", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "no shared memory" not in done.stderr, done.stderr
