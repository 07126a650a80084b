"""Sizes and numbers beyond the usual: the cases that broke other libraries."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import ronde


@pytest.mark.ranks(2, deadline=110)
@pytest.mark.timeout(150)
def test_more_than_two_to_the_31_bytes_and_elements() -> None:
    count = 2**31 + 4099
    x = np.full(count, ronde.rank() + 1, np.uint8)
    places = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, count - 1]
    for k, place in enumerate(places):
        x[place] = 10 * (ronde.rank() + 1) + k
    assert ronde.allreduce_(x, op=ronde.Sum) is x
    assert [int(x[p]) for p in places] == [30 + k * 2 for k in range(len(places))]
    assert int(x[:: 2**20].min()) == 3 and int(x.sum(dtype=np.int64)) == 3 * count + sum(
        27 + 2 * k for k in range(len(places))
    )


@pytest.mark.ranks(2, env={"RONDE_CACHE_CAPACITY": "1024"})
def test_more_names_than_the_cache_holds_and_shapes_that_change() -> None:
    for step in range(2):
        handles = []
        for k in range(5000):
            size = 1 + (k + step) % 3  # another shape under the same name, on all ranks
            handles.append(ronde.allreduce_async(np.full(size, k + ronde.rank(), np.int64), name=f"n{k}", op=ronde.Sum))
        for k, handle in enumerate(handles):
            assert ronde.synchronize(handle).tolist() == [2 * k + 1] * (1 + (k + step) % 3)
    with pytest.raises(ronde.MismatchError, match="'n7'.*shape"):
        ronde.allreduce(np.ones(2 + ronde.rank()), name="n7")
    assert ronde.allreduce(np.ones(2), name="n7", op=ronde.Sum).tolist() == [2, 2]


def test_a_tiny_dev_shm() -> None:
    """64 MB through a /dev/shm of 1 MB, in a mount namespace of the test's own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    code = (
        "import numpy as np, ronde as hvd; hvd.init(); x = np.arange(16_000_000, dtype=np.float32) + hvd.rank();"
        "hvd.allreduce_(x, op=hvd.Sum); assert (x == 2 * np.arange(16_000_000, dtype=np.float32) + 1).all(); print('right')"
    )
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "ronde.launcher", "-np", "2", sys.executable, "-c", code]
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *command], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("right") == 2


@pytest.mark.parametrize(("variable", "value"), [("RONDE_TRANSPORT", "tcp"), ("RONDE_RING_BYTES", "8388608")])
@pytest.mark.parametrize("setter", [0, 1])
@pytest.mark.ranks(3, init=False)
def test_job_options_are_those_of_rank_0(setter: int, variable: str, value: str) -> None:
    from ronde import _core

    if os.environ["RONDE_RANK"] == str(setter):
        os.environ[variable] = value
    try:
        ronde.init()
        assert ronde.allreduce(np.full(100_000, ronde.rank()), op=ronde.Sum)[-1] == 3
        assert bool(_core.topology()["shared_memory"]) == ((setter, variable) != (0, "RONDE_TRANSPORT"))
    finally:
        os.environ.pop(variable, None)
        ronde.shutdown()


@pytest.mark.ranks(2)
def test_a_group_whose_results_share_memory() -> None:
    x, other = np.ones(10), np.ones(10)
    for group in ([x, x], [x[:6], x[5:]], [x, other, x[3:4]]):
        with pytest.raises(ValueError, match="tensors 0 and [12] share memory"):
            ronde.grouped_allreduce_(group, op=ronde.Sum)
    ronde.grouped_allreduce_([x[:5], x[5:], other, x[5:5]], op=ronde.Sum)
    assert x.tolist() == other.tolist() == [2] * 10
    assert [each.tolist() for each in ronde.grouped_allreduce([x, x], op=ronde.Sum)] == [[4] * 10] * 2
