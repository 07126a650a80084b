"""init, shutdown, and what a rank knows about itself."""

import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import ronde
from ronde import _clusters

QUESTIONS = "rank size local_rank local_size cross_rank cross_size is_homogeneous".split()


def run_alone(code: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """A program that no launcher started."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RONDE_", "HOROVOD_", "TORCHELASTIC", "OMPI_"))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, timeout=60)


def test_before_init() -> None:
    assert not ronde.is_initialized()
    for call in [getattr(ronde, name) for name in QUESTIONS] + [
        lambda: ronde.allreduce(np.ones(3)),
        lambda: ronde.barrier(),
        lambda: ronde.join(),
        lambda: ronde.broadcast_object(1),
        lambda: ronde.add_process_set([0]),
        lambda: ronde.global_process_set.size(),
    ]:
        with pytest.raises(ronde.NotInitializedError) as info:
            call()
        assert isinstance(info.value, ValueError)
    ronde.shutdown()  # no error


def test_capabilities() -> None:
    assert ronde.gloo_built() and ronde.gloo_enabled()
    for (
        name
    ) in "mpi_threads_supported mpi_enabled mpi_built nccl_built ddl_built ccl_built cuda_built rocm_built".split():
        assert not getattr(ronde, name)(), name


@pytest.mark.ranks(3)
def test_topology() -> None:
    rank = ronde.rank()
    assert [getattr(ronde, name)() for name in QUESTIONS] == [rank, 3, rank, 3, 0, 1, True]
    ronde.init()  # does nothing
    assert ronde.allgather_object(ronde.rank()) == [0, 1, 2]


@pytest.mark.ranks(2, init=False)
def test_twenty_cycles() -> None:
    for cycle in range(20):
        ronde.init()
        result = ronde.allreduce(np.array([cycle + ronde.rank()]), op=ronde.Sum, name="x")
        assert result == [2 * cycle + 1]
        ronde.shutdown()
        assert not ronde.is_initialized()
        with pytest.raises(ValueError):
            ronde.rank()


@pytest.mark.ranks(3, init=False)
def test_a_job_of_some_ranks() -> None:
    rank = int(os.environ["RONDE_RANK"])
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1, which is not in it"):
            ronde.init([2, 0])
        with pytest.raises(ValueError, match="from 0 to 2"):
            ronde.init([1, 3])
        ronde.init(comm=[1])
        assert ronde.allreduce(np.array([7])) == [7]
    else:
        ronde.init([2, 0])  # numbered in this order
        assert (ronde.rank(), ronde.size()) == ((1, 2) if rank == 0 else (0, 2))
        assert ronde.allgather(np.array([rank])).tolist() == [2, 0]
    ronde.shutdown()
    ronde.init()
    assert ronde.allgather(np.array([rank])).tolist() == [0, 1, 2]


class FakeCommunicator:
    """What ronde uses of an mpi4py communicator."""

    def __init__(self) -> None:
        self._ranks = [int(os.environ["RONDE_RANK"]), int(os.environ["RONDE_SIZE"])]
        self._store = _clusters.Ronderun()
        self._calls = 0

    def Get_rank(self) -> int:  # noqa: N802
        return self._ranks[0]

    def Get_size(self) -> int:  # noqa: N802
        return self._ranks[1]

    def allgather(self, value: object) -> list:
        import pickle

        self._calls += 1
        blob = pickle.dumps(value)
        return [pickle.loads(each) for each in self._store.exchange(f"fake/{self._calls}", *self._ranks, blob, 30)]

    def bcast(self, value: object, root: int) -> object:
        return self.allgather(value)[root]


@pytest.mark.ranks(2, init=False)
def test_communicator() -> None:
    comm = FakeCommunicator()
    ronde.init(comm)
    assert ronde.allgather_object(ronde.rank()) == [0, 1]
    assert ronde.add_process_set(ronde.ProcessSet(comm)).process_set_id == 0


@pytest.mark.ranks(2, init=False, env={"RONDE_START_TIMEOUT": "1"})
def test_start_limit_names_who_is_missing() -> None:
    rank = int(os.environ["RONDE_RANK"])
    if rank == 1:
        time.sleep(1.5)  # too late
    begin = time.monotonic()
    with pytest.raises(
        ronde.TimeoutError,
        match=rf"1 s \(RONDE_START_TIMEOUT\): rank {1 - rank} (did not call init|.*could not be reached)",
    ):
        ronde.init()
    assert 0.5 < time.monotonic() - begin < 3


@pytest.mark.parametrize("value", ["soon", "nan", "inf", "-5"])
@pytest.mark.ranks(2, init=False)
def test_start_limit_must_be_a_number(value: str) -> None:
    os.environ["RONDE_START_TIMEOUT"] = value
    try:
        with pytest.raises(ValueError, match=f"RONDE_START_TIMEOUT: '{value}' is not a number from 0"):
            ronde.init()
    finally:
        del os.environ["RONDE_START_TIMEOUT"]


def test_alone_and_without_shutdown() -> None:
    done = run_alone(
        """
        import socket
        def forbidden(*_): raise AssertionError("the network was used")
        socket.getaddrinfo = socket.gethostbyname = forbidden
        import numpy as np, ronde
        ronde.init()
        print(ronde.rank(), ronde.size(), ronde.allreduce(np.arange(3)))
        """
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "0 1 [0 1 2]\n")


def test_exception_code_stays() -> None:
    done = run_alone("import ronde; ronde.init(); raise ValueError('boom')")
    assert done.returncode == 1
    assert done.stderr.count("boom") >= 1 and "Traceback" in done.stderr
    assert run_alone("import sys, ronde; ronde.init(); sys.exit(7)").returncode == 7


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, "srun"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script that starts one process
    ],
)
def test_other_launchers(variables: dict, text: str) -> None:
    done = run_alone("import ronde; ronde.init(); print(ronde.size())", **variables)
    if text is None:
        assert done.stdout == "1\n", done.stderr
    else:
        assert done.returncode == 1 and text in done.stderr and "ronderun" in done.stderr


def test_torchrun() -> None:
    pytest.importorskip("torch")
    code = "import numpy as np, ronde; ronde.init(); print(ronde.allreduce(np.array([1 + ronde.rank()]), op=ronde.Sum))"
    env = {k: v for k, v in os.environ.items() if not k.startswith("RONDE_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[3]") == 2


@pytest.mark.ranks(2)
def test_idle_ranks_use_no_processor() -> None:
    ronde.allreduce(np.ones(3))
    affinity = os.sched_getaffinity(0)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(2)
    assert time.process_time() - before < 0.02
    assert os.sched_getaffinity(0) == affinity


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.ranks(init=False)
def test_leaving_right_after_an_operation(size: int) -> None:
    """Who leaves first takes nothing from the others: what was agreed ends well everywhere."""
    for cycle in range(15):
        for root in range(size):
            ronde.init()
            data = np.full(100_000, ronde.rank() + 10 * cycle)
            assert (ronde.broadcast(data, root) == root + 10 * cycle).all()
            ronde.shutdown()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.ranks(3, init=False)
def test_ranks_that_end_and_meet_again_at_different_times(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank comes to its results when the others have left, longer ago than a farewell takes, and wait for it in
    init()."""
    monkeypatch.setenv("RONDE_TRANSPORT", transport)
    for cycle, delay in enumerate((1.3, 0.0, 0.03, 0.0, 0.003, 0.1)):
        late = cycle % 3
        ronde.init()
        data = [np.arange(count) % 1000 + ronde.rank() + 10 * cycle for count in (5, 300_000)]
        handles = [ronde.allreduce_async(each, op=ronde.Sum, name=f"{len(each)}") for each in data]
        if ronde.rank() == late:
            time.sleep(delay)
        for handle, each in zip(handles, data):
            wanted = 3 * (np.arange(len(each)) % 1000) + 3 + 30 * cycle
            np.testing.assert_array_equal(ronde.synchronize(handle), wanted)
        if ronde.rank() == (late + 1) % 3:
            time.sleep(delay / 3)
        ronde.shutdown()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RONDE_SIZE": "3", "RONDE_RANK": "1"}, "RONDE_SIZE=3.*RONDE_STORE"),
        ({"RONDE_RANK": "1"}, "RONDE_RANK=1.*RONDE_STORE"),
        ({"RONDE_SIZE": "3", "RONDE_RANK": "-3", "RONDE_STORE": "unix:/nowhere"}, "RONDE_RANK=-3.*no rank -3 of 3"),
        ({"RONDE_SIZE": "3", "RONDE_RANK": "3", "RONDE_STORE": "unix:/nowhere"}, "RONDE_RANK=3.*no rank 3 of 3"),
        ({"RONDE_SIZE": "0", "RONDE_RANK": "0", "RONDE_STORE": "unix:/nowhere"}, "RONDE_SIZE=0"),
        ({"RONDE_SIZE": "3", "RONDE_RANK": "x", "RONDE_STORE": "unix:/nowhere"}, "RONDE_RANK='x'"),
    ],
)
def test_an_environment_that_cannot_be_right(variables: dict, text: str) -> None:
    import re

    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "HOROVOD_"))}
    result = subprocess.run(
        [sys.executable, "-c", "import ronde; ronde.init()"], env={**clean, **variables}, capture_output=True, text=True,
        timeout=30,
    )  # fmt: skip
    assert result.returncode == 1 and "ArgumentError" in result.stderr and re.search(text, result.stderr), result.stderr


@pytest.mark.ranks(1)
def test_wrong_process_sets_and_targets() -> None:
    for wrong in (None, 0, [0]):
        with pytest.raises(ValueError, match="give a ProcessSet"):
            ronde.allreduce(np.ones(2), process_set=wrong)
    for function in (ronde.allreduce_, lambda value: ronde.broadcast_(value, 0)):
        with pytest.raises(TypeError, match="a list: give an array"):
            function([1.0, 2.0])
    import array

    values = array.array("d", [1.0, 2.0])
    ronde.allreduce_(values)
