"""Ranks that disagree, are late, fail or die: an error on every rank that says who, what and why."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import numpy as np
import pytest

import ronde


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def reduce(value: float = 1.0, **options: object) -> np.ndarray:
    return ronde.allreduce(np.array([value]), op=ronde.Sum, **options)  # type: ignore[arg-type]


# ---- Disagreement ----


@pytest.mark.parametrize("what", ["dtype", "shape", "op", "root", "prescale", "kind", "group"])
@pytest.mark.ranks(2)
def test_mismatch(what: str) -> None:
    """C3: both raise the same text, which has both sides; then all goes on."""
    first = ronde.rank() == 0
    small, large = np.ones(3, np.float32), np.ones(4, np.float32)
    calls = {
        "dtype": lambda: ronde.allreduce(np.ones(3, np.float32 if first else np.float64), name="x"),
        "shape": lambda: ronde.allreduce(small if first else large, name="x"),
        "op": lambda: ronde.allreduce(small, name="x", op=ronde.Sum if first else ronde.Max),
        "root": lambda: ronde.broadcast(small, 0 if first else 1, name="x"),
        "prescale": lambda: ronde.allreduce(small, name="x", prescale_factor=1.0 if first else 2.0),
        "kind": lambda: ronde.allreduce(small, name="x") if first else ronde.allgather(small, name="x"),
        "group": lambda: ronde.grouped_allreduce([small] * (2 if first else 3), name="x"),
    }
    sides = {
        "dtype": ("float32", "float64"),
        "shape": ("3", "4"),
        "op": ("(?i)sum", "(?i)max"),
        "root": ("0", "1"),
        "prescale": ("1", "2"),
        "kind": ("allreduce", "allgather"),
        "group": ("2", "3"),
    }
    with pytest.raises(ronde.MismatchError, match="'x'") as info:
        calls[what]()
    for side in sides[what]:
        info.match(side)
    info.match("rank 0")
    info.match("rank 1")
    assert len(set(ronde.allgather_object(str(info.value)))) == 1
    assert reduce(name="y") == [2]
    assert reduce(name="x") == [2]


@pytest.mark.ranks(2)
def test_a_name_twice_in_flight() -> None:
    if ronde.rank() == 0:
        handle = ronde.allreduce_async(np.array([1.0]), name="x", op=ronde.Sum)
        with pytest.raises(ronde.RondeError, match="'x'"):
            ronde.synchronize(ronde.allreduce_async(np.array([5.0]), name="x", op=ronde.Sum))
        ronde.barrier()
        assert ronde.synchronize(handle) == [2]
    else:
        ronde.barrier()
        assert reduce(name="x") == [2]


# ---- Lateness ----


@pytest.mark.ranks(
    2, env={"RONDE_STALL_CHECK_TIME_SECONDS": "1", "RONDE_STALL_SHUTDOWN_TIME_SECONDS": "3"}, deadline=40
)
def test_stall() -> None:
    """C1: rank 1 is away for longer than the limit."""
    begin = time.monotonic()
    if ronde.rank() == 1:
        time.sleep(5)
    with pytest.raises(ronde.StallError, match="'x'.*rank 1") as info:
        reduce(name="x")
    elapsed = time.monotonic() - begin
    assert 2.5 < elapsed < 5 if ronde.rank() == 0 else elapsed < 6
    with pytest.raises(ronde.StallError) as later:  # it sticks
        reduce(name="y")
    assert str(later.value) == str(info.value)
    # Both had the same text: compared in a new job, as this one has ended.
    ronde.shutdown()
    ronde.init()
    assert len(set(ronde.allgather_object(str(info.value)))) == 1


@pytest.mark.ranks(2, env={"RONDE_STALL_CHECK_TIME_SECONDS": "0.5"})
def test_slow_is_no_stall() -> None:
    if ronde.rank() == 1:
        time.sleep(2)
    assert reduce(name="x") == [2]


# ---- Failure and death ----


@pytest.mark.ranks(2, dies=(1,))
def test_killed() -> None:
    """C11: while rank 0 waits, and in the middle of a large exchange."""
    handle = ronde.allreduce_async(np.ones(1), name="waited for")
    if ronde.rank() == 1:
        ronde.synchronize(handle)
        os.kill(os.getpid(), signal.SIGKILL)
    ronde.synchronize(handle)
    with within(1), pytest.raises(ronde.PeerLostError, match="rank 1.*testhost.*signal 9"):
        reduce(name="x")
    with within(1), pytest.raises(ronde.PeerLostError, match="rank 1"):
        reduce(name="y")
    with within(3):
        ronde.shutdown()


@pytest.mark.ranks(3, dies=(1,))
def test_killed_in_an_exchange() -> None:
    data = np.ones(8 << 20, np.float32)
    ronde.allreduce_(data, name="first")
    handles = [ronde.allreduce_async(data, name=f"x{i}") for i in range(8)]
    if ronde.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with within(8), pytest.raises(ronde.HorovodInternalError, match="rank 1.*signal 9"):
        for handle in handles:
            ronde.synchronize(handle)
        reduce(name="y")


SCRIPT = """
    import os, sys
    import numpy as np, ronde
    ronde.init()
    rank = ronde.rank()
    ronde.allreduce(np.ones(1), name="first")
    if rank == 1:
        {end}
    try:
        ronde.allreduce(np.ones(1), name="second")
    except ronde.RondeError as error:
        print(type(error).__name__, error)
"""


def two_ranks(tmp_path: object, end: str) -> "list[tuple[int, str, str]]":
    """Runs SCRIPT on two ranks of which the second ends in its own way: code, output and error output of each."""
    from ronde import _core

    server = _core.StoreServer(f"unix:{tmp_path}/store")
    store = _core.Store(server.url)
    store.set("secret", b"0123456789abcdef")
    common = {**os.environ, "RONDE_SIZE": "2", "RONDE_STORE": server.url, "RONDE_HOSTNAME": "testhost"}
    code = textwrap.dedent(SCRIPT).format(end=end)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**common, "RONDE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=30)
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
        store.close()
        server.stop()
    return results


def test_uncaught_exception(tmp_path: object) -> None:
    """C11: the other rank's error has its text."""
    (code, out, err), (failed_code, _, failed_err) = two_ranks(tmp_path, "raise ValueError('boom')")
    assert (code, failed_code) == (0, 1), err
    assert "PeerLostError" in out and "rank 1" in out and "testhost" in out and "ValueError: boom" in out
    assert "Traceback" in failed_err and "boom" in failed_err


def test_interrupt(tmp_path: object) -> None:
    (_, out, _), _ = two_ranks(tmp_path, "raise KeyboardInterrupt")
    assert "rank 1" in out and "KeyboardInterrupt" in out


def test_leaving_early(tmp_path: object) -> None:
    """A rank that ends without an error: the operation that needs it fails and says so."""
    (code, out, err), (other, _, other_err) = two_ranks(tmp_path, "sys.exit(0)")
    assert (code, other) == (0, 0), err + other_err
    assert "ShutdownError" in out and "rank 1" in out and "second" in out


def test_vanishing(tmp_path: object) -> None:
    (code, out, err), (other, _, _) = two_ranks(tmp_path, "os._exit(3)")
    assert (code, other) == (0, 3), err
    assert "PeerLostError" in out and "rank 1" in out


@pytest.mark.ranks(2)
def test_shutdown_with_an_operation_pending() -> None:
    """C10: its handle raises, here and on the ranks that wait for this one."""
    if ronde.rank() == 1:
        handle = ronde.allreduce_async(np.ones(3), name="pending")
        ronde.shutdown()
        with within(5), pytest.raises(ronde.ShutdownError):
            ronde.synchronize(handle)
    else:
        with within(10), pytest.raises(ronde.HorovodInternalError, match="rank 1|shut"):
            reduce(name="other")


def test_a_daemon_thread_that_waits_does_not_abort_the_exit(tmp_path: object) -> None:
    """The interpreter ends such threads in its own way, in the middle of the core's call."""
    end = (
        "import threading\n"
        "    def work():\n"
        "        while True:\n"
        "            try: ronde.allreduce(np.ones(1), name='of rank 1')\n"
        "            except ronde.RondeError: pass\n"
        "    for _ in range(8): threading.Thread(target=work, daemon=True).start()\n"
        "    sys.exit(0)"
    )
    for _ in range(3):
        (code, _, err), (daemon_code, _, daemon_err) = two_ranks(tmp_path, end)
        assert (code, daemon_code) == (0, 0), err + daemon_err


# ---- Fork ----


@pytest.mark.ranks(2)
def test_a_forked_child_cannot_wait_for_its_parents_operation() -> None:
    handle = ronde.allreduce_async(np.ones(3), name=f"of rank {ronde.rank()}")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert ronde.poll(handle)
            ronde.synchronize(handle)
        except ronde.NotInitializedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not ronde.poll(handle)
    assert reduce(ronde.rank()) == [1]


@pytest.mark.ranks(2)
def test_fork() -> None:
    """A collective in a forked child raises at once, and the child's end harms nothing."""
    for how in ("exit", "_exit"):
        child = os.fork()
        if child == 0:
            code = 1
            begin = time.monotonic()
            try:
                reduce()
            except ronde.NotInitializedError:
                code = 0 if not ronde.is_initialized() and time.monotonic() - begin < 1 else 2
            ronde.shutdown()
            if how == "_exit":
                os._exit(code)
            import atexit

            atexit._run_exitfuncs()
            os._exit(code)
        end = time.monotonic() + 5
        status = None
        while status is None:
            assert time.monotonic() < end
            pid, code = os.waitpid(child, os.WNOHANG)
            status = code if pid else None
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(status) == 0
        assert reduce(ronde.rank()) == [1]


@pytest.mark.ranks(2)
def test_signals_are_heard_while_waiting() -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    if ronde.rank() == 0:
        handle = ronde.allreduce_async(np.array([1.0]), name="x", op=ronde.Sum)
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with within(2), pytest.raises(Alarm):
                ronde.synchronize(handle)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert not ronde.poll(handle)
        ronde.barrier()
        assert ronde.synchronize(handle) == [2]
    else:
        ronde.barrier()
        assert reduce(name="x") == [2]
