"""ronde._core: the binding itself. What the operations compute is tested elsewhere."""

import contextlib
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest

from ronde import _core

SECRET = "0123456789abcdef"
LIMIT = 30.0  # seconds; of every wait here
FLOAT32 = _core.DTYPES["float32"]
SUM = _core.REDUCTIONS["Sum"]

# Rank 1 of a pair: a process that does what it is told, one expression a line, and answers with its repr.
PEER = """
import signal, sys
import numpy as np
from ronde import _core
signal.alarm(60)
store = _core.Store(sys.argv[1], sys.argv[2])
endpoint = _core.Endpoint(1, 2, secret=sys.argv[2])
endpoint.connect(store.exchange("init", 1, 2, endpoint.blob(), 30), 30)
kept = {}
def allreduce(name, value):
    array = kept[name] = np.array(value, np.float32)
    _core.submit(_core.OPS["allreduce"], name, [(array.ctypes.data, array.ctypes.data, _core.DTYPES["float32"],
                 array.shape)], reduction=_core.REDUCTIONS["Sum"]).wait(30)
    return array.tolist()
def refused(*arguments):
    try:
        return allreduce(*arguments)
    except _core.RondeError as error:
        return error
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
_core.shutdown()
"""


def start(endpoint: _core.Endpoint, blobs: Optional[list[bytes]] = None) -> None:
    endpoint.connect([endpoint.blob()] if blobs is None else blobs, LIMIT)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is a job of one rank."""
    start(_core.Endpoint(0, 1))
    yield
    _core.shutdown()


class Peer:
    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER, url, SECRET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, expression: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()  # limited by the peer's own alarm

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT)
        finally:
            self._process.kill()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """This process is rank 0 of two; the fixture tells rank 1 what to do."""
    url = f"unix:{tmp_path}/store"
    server = _core.StoreServer(url, SECRET)
    other = Peer(url)
    store = _core.Store(url, SECRET)
    endpoint = _core.Endpoint(0, 2, secret=SECRET)
    start(endpoint, store.exchange("init", 0, 2, endpoint.blob(), LIMIT))
    assert other.answer() == "ready"
    yield other
    ender = threading.Thread(target=other.end)  # both leave together
    ender.start()
    _core.shutdown()
    ender.join(LIMIT)
    store.close()
    server.stop()


def allreduce(array: np.ndarray, name: Optional[str], keepalive: Any = None) -> _core.Handle:
    address = array.ctypes.data
    return _core.submit(
        _core.OPS["allreduce"], name, [(address, address, FLOAT32, array.shape)], keepalive, reduction=SUM
    )


@contextlib.contextmanager
def raised_by_signal(after: float) -> Iterator[None]:
    """A signal whose handler raises KeyboardInterrupt comes after some seconds; it must arrive within one more."""

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handler)
    begin = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        assert time.monotonic() - begin < after + 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# ---- Tables and classes ----


def test_tables() -> None:
    for name, size in _core.DTYPE_SIZES.items():
        if hasattr(np, name):
            assert np.dtype(name).itemsize == size, name
    assert _core.DTYPE_SIZES["bfloat16"] == 2
    for table in (_core.DTYPES, _core.OPS, _core.REDUCTIONS):
        assert len(set(table.values())) == len(table) > 0
    assert _core.DTYPES.keys() == _core.DTYPE_SIZES.keys()
    assert {"Average", "Sum", "Adasum", "Min", "Max", "Product"} == _core.REDUCTIONS.keys()
    rows = {row[0]: row for row in _core.OPTIONS}
    assert len(rows) == len(_core.OPTIONS)
    name, type_, default, scope, flag, scale, section, text = rows["FUSION_THRESHOLD"]
    assert (type_, default, scope, flag, scale) == ("Int", "134217728", "Job", "--fusion-threshold-mb", 1048576)
    assert section and text
    version = Path(__file__).parents[2] / "VERSION"
    assert _core.__version__ == version.read_text().strip()


def test_exception_classes() -> None:
    for name in ("PeerLostError", "ShutdownError", "TransportError"):
        assert issubclass(getattr(_core, name), _core.HorovodInternalError), name
    for name in ("ArgumentError", "MismatchError", "StallError", "TimeoutError", "NotInitializedError"):
        assert not issubclass(getattr(_core, name), _core.HorovodInternalError), name
        assert issubclass(getattr(_core, name), _core.RondeError), name
    assert issubclass(_core.RondeError, RuntimeError)
    assert issubclass(_core.ArgumentError, ValueError)
    assert issubclass(_core.NotInitializedError, ValueError)
    assert issubclass(_core.TimeoutError, TimeoutError)
    for class_ in (_core.TimeoutError, _core.PeerLostError):
        copy = pickle.loads(pickle.dumps(class_("rank 1")))
        assert type(copy) is class_
        assert str(copy) == "rank 1"


def test_only_own_symbols_are_exported() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    folder = Path(_core.__file__).parent
    for library, own in ((Path(_core.__file__), "PyInit__core"), (folder / "libronde.so", "ronde_")):
        lines = subprocess.run([nm, "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
        names = [line.split()[-1] for line in lines.splitlines()]
        assert names
        assert [name for name in names if not name.startswith(own)] == []


# ---- submit and Handle ----


def test_before_init() -> None:
    assert not _core.is_initialized()
    with pytest.raises(_core.NotInitializedError):
        _core.topology()
    with pytest.raises(_core.NotInitializedError):
        allreduce(np.ones(3, np.float32), "x")
    _core.shutdown()  # no error


@pytest.mark.usefixtures("alone")
def test_one_rank() -> None:
    assert _core.is_initialized()
    topology = _core.topology()
    assert (topology["rank"], topology["size"], topology["local_size"], topology["is_homogeneous"]) == (0, 1, 1, 1)
    assert _core.process_set_ranks(0) == [0]
    with pytest.raises(ValueError, match="77"):
        _core.process_set_ranks(77)
    array = np.arange(5, dtype=np.float32)
    handle = allreduce(array, "x")
    handle.wait(LIMIT)
    handle.wait()  # again
    assert handle.poll()
    assert array.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="'x'"):
        handle.output(1)


@pytest.mark.usefixtures("alone")
def test_buffer_outlives_its_handle() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    handle = _core.submit(_core.OPS["allgather"], "x", [(array.ctypes.data, 0, FLOAT32, array.shape)], array)
    handle.wait(LIMIT)
    buffer = handle.output(0)
    del handle
    gc.collect()
    assert (buffer.shape, buffer.dtype, buffer.nbytes) == ((2, 3), "float32", 24)
    view = memoryview(buffer)
    assert (view.format, view.nbytes, view.readonly) == ("B", 24, False)
    del buffer
    gc.collect()
    result = np.frombuffer(view, np.float32)
    assert result.tolist() == array.ravel().tolist()
    result[0] = 7  # writable


@pytest.mark.usefixtures("alone")
def test_values() -> None:
    array = np.arange(3, dtype=np.float32)
    row = (array.ctypes.data, 0, FLOAT32, array.shape)
    handle = _core.submit(_core.OPS["alltoall"], "x", [row], array, splits=[3])
    handle.wait(LIMIT)
    assert handle.received_splits(0) == [3]
    handle = _core.submit(_core.OPS["add_process_set"], "set", [], ranks=(0,))
    handle.wait(LIMIT)
    assert handle.existed()  # that of all ranks
    assert handle.value() == 0
    handle = _core.submit(_core.OPS["join"], None, ())
    handle.wait(LIMIT)
    assert handle.value() == 0


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((0, "x"), {}, TypeError, "tensors"),
        ((0, "x", []), {"nmae": "y"}, TypeError, "nmae"),
        ((0, "x", []), {"name": "y"}, TypeError, "name"),
        (tuple(range(14)), {}, TypeError, "too many"),
        ((0, 3, []), {}, TypeError, "name"),
        ((0, "a\0b", []), {}, ValueError, "null"),
        ((0, "x", 3), {}, TypeError, "tensors"),
        ((0, "x", [3]), {}, TypeError, "tuple"),
        ((0, "x", [(0, 0, 0)]), {}, TypeError, "shape"),
        ((0, "x", [(0, 0, 0, 3)]), {}, TypeError, "shape"),
        ((0, "x", [("0", 0, 0, ())]), {}, TypeError, None),
        ((0, "x", [(0, 0, 2**31, ())]), {}, ValueError, "dtype"),
        ((0, "x", [(0, 0, 0, (2**63,))]), {}, ValueError, "shape"),
        ((0, "x", []), {"process_set": -1}, ValueError, "process_set"),
        ((0, "x", []), {"root": 2**70}, ValueError, "root"),
        ((0, "x", []), {"prescale": "1"}, TypeError, None),
        ((0, "x", []), {"splits": 3}, TypeError, "splits"),
        ((0, "x", []), {"names": ["a"]}, ValueError, "names"),
        ((12345, "x", []), {}, ValueError, None),
    ],
)
@pytest.mark.usefixtures("alone")
def test_wrong_arguments(arguments: tuple, keywords: dict, error: type, text: Optional[str]) -> None:
    with pytest.raises(error, match=text):
        _core.submit(*arguments, **keywords)


def test_wait_has_a_limit_and_hears_signals(peer: Peer) -> None:
    array = np.array([1, 2], np.float32)
    handle = allreduce(array, "late", array)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="allreduce 'late'"):
        handle.wait(0.2)
    assert 0.2 <= time.monotonic() - begin < 2
    with pytest.raises(ValueError, match="late"):
        handle.output(0)
    with raised_by_signal(0.3):
        handle.wait(LIMIT)
    assert not handle.poll()
    peer.tell("allreduce('late', [10, 20])")
    handle.wait(LIMIT)
    assert array.tolist() == [11, 22]
    assert peer.answer() == "[11.0, 22.0]"


def test_other_threads_run_while_one_waits(peer: Peer) -> None:
    array = np.array([1], np.float32)
    handle = allreduce(array, "x", array)
    waiter = threading.Thread(target=handle.wait, args=(LIMIT,))
    waiter.start()
    time.sleep(0.1)  # this line needs the interpreter's lock afterwards
    assert waiter.is_alive()
    peer.tell("allreduce('x', [5])")
    waiter.join(LIMIT)
    assert not waiter.is_alive()
    assert array.tolist() == [6]
    assert peer.answer() == "[6.0]"


class Owner:
    """Stands for a tensor: owns memory, and one can see when it is gone."""

    def __init__(self, value: float) -> None:
        self.array = np.array([value], np.float32)


def submit_and_drop(name: str, value: float) -> "weakref.ref[Owner]":
    owner = Owner(value)
    allreduce(owner.array, name, owner)
    return weakref.ref(owner)


def test_a_dropped_handle_keeps_its_memory_until_the_end(peer: Peer) -> None:
    owners = [submit_and_drop(f"dropped.{i}", i) for i in range(5)]
    for i in range(20):  # looks through the dropped ones, and must let none go
        array = np.ones(1, np.float32)
        handle = allreduce(array, f"kept.{i}", array)
        peer.tell(f"allreduce('kept.{i}', [1])")
        handle.wait(LIMIT)
        assert peer.answer() == "[2.0]"
    gc.collect()
    assert all(owner() is not None for owner in owners)
    for i in (2, 3, 0, 1, 4):
        peer.tell(f"allreduce('dropped.{i}', [100])")
        assert peer.answer() == f"[{100.0 + i}]"  # the memory that was read was still what had been submitted

    def gone() -> bool:
        with contextlib.suppress(_core.ArgumentError):
            _core.submit(12345, None, ())  # a submission that fails looks through them, too
        return all(owner() is None for owner in owners)

    assert eventually(gone)


def test_a_prepared_allreduce_is_started_again_and_again(peer: Peer) -> None:
    prepared = _core.prepare_allreduce("again", FLOAT32, (2,), SUM)
    prepared.wait()  # nothing has been started
    for step in range(3):
        owner = Owner(step)
        owner.array = np.array([step, 10 + step], np.float32)  # elsewhere each time
        gone = weakref.ref(owner)
        prepared.start(owner.array.ctypes.data, owner)
        array = owner.array
        del owner
        assert gone() is not None
        peer.tell("allreduce('again', [100, 200])")
        prepared.wait()
        prepared.wait()
        assert gone() is None
        assert array.tolist() == [100 + step, 210 + step]
        assert peer.answer() == f"[{100.0 + step}, {210.0 + step}]"


def test_what_a_prepared_allreduce_says(peer: Peer) -> None:
    array = np.ones(2, np.float32)
    prepared = _core.prepare_allreduce("bad", FLOAT32, (2,), SUM)
    with pytest.raises(TypeError, match=r"start\(\) takes an address"):
        prepared.start(array.ctypes.data)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        prepared.start("address", array)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.PreparedAllreduce()
    with pytest.raises(_core.ArgumentError, match="null character"):
        _core.prepare_allreduce("a\0b", FLOAT32, (2,))
    with pytest.raises(_core.ArgumentError, match="there is no reduction 77"):
        _core.prepare_allreduce("bad", FLOAT32, (2,), 77).start(array.ctypes.data, array)
    with pytest.raises(_core.ArgumentError, match="process set 5"):
        _core.prepare_allreduce("bad", FLOAT32, (2,), SUM, process_set=5).start(array.ctypes.data, array)
    prepared.start(array.ctypes.data, array)
    peer.tell("refused('bad', [1, 2, 3])")
    for _ in range(2):
        with pytest.raises(_core.MismatchError, match="bad"):
            prepared.wait()
    assert "MismatchError" in peer.answer()


def test_a_prepared_allreduce_that_nobody_waited_for(peer: Peer) -> None:
    """Its memory is the engine's until it has ended, whether it is dropped or started once more."""
    for number in range(2):
        name = f"left.{number}"
        prepared = _core.prepare_allreduce(name, FLOAT32, (1,), SUM)
        owner = Owner(7)
        gone = weakref.ref(owner)
        prepared.start(owner.array.ctypes.data, owner)
        del owner
        if number == 0:
            del prepared
        else:
            other = Owner(1)
            prepared.start(other.array.ctypes.data, other)
            with pytest.raises(_core.ArgumentError, match=name):  # in flight twice
                prepared.wait()
        gc.collect()
        assert gone() is not None
        peer.tell(f"allreduce('{name}', [100])")
        assert peer.answer() == "[107.0]"

        def ended(gone: Any = gone) -> bool:
            with contextlib.suppress(_core.ArgumentError):
                _core.submit(12345, None, ())
            return gone() is None

        assert eventually(ended)


def test_a_signal_ends_the_wait_for_a_prepared_allreduce(peer: Peer) -> None:
    array = np.ones(1, np.float32)
    prepared = _core.prepare_allreduce("slow", FLOAT32, (1,), SUM)
    prepared.start(array.ctypes.data, array)
    with raised_by_signal(0.2):
        prepared.wait()
    peer.tell("allreduce('slow', [3])")
    prepared.wait()
    assert array.tolist() == [4]
    assert peer.answer() == "[4.0]"


def test_shutdown_lets_dropped_ones_go(tmp_path: Path) -> None:
    server = _core.StoreServer(f"unix:{tmp_path}/store", SECRET)
    other = Peer(server.url)
    store = _core.Store(server.url, SECRET)
    endpoint = _core.Endpoint(0, 2, secret=SECRET)
    start(endpoint, store.exchange("init", 0, 2, endpoint.blob(), LIMIT))
    assert other.answer() == "ready"
    owner = submit_and_drop("never", 1)
    array = np.ones(1, np.float32)
    kept = allreduce(array, "never either", array)
    assert owner() is not None
    _core.shutdown()
    assert owner() is None
    with pytest.raises(_core.ShutdownError):
        kept.wait(LIMIT)
    other.end()
    server.stop()


@pytest.mark.usefixtures("alone")
def test_forked_child_gets_an_error() -> None:
    array = np.ones(3, np.float32)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                allreduce(array, "x")
            except _core.NotInitializedError:
                code = 0 if not _core.is_initialized() else 2
        os._exit(code)
    begin = time.monotonic()
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        assert time.monotonic() - begin < 5
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0
    allreduce(array, "x").wait(LIMIT)


# ---- Endpoint and Store ----


def test_endpoint_is_used_once() -> None:
    endpoint = _core.Endpoint(0, 1)
    start(endpoint)
    _core.shutdown()
    with pytest.raises(ValueError, match="connect"):
        endpoint.blob()
    with pytest.raises(ValueError, match="connect"):
        endpoint.connect([], 1)
    with pytest.raises(ValueError):
        _core.Endpoint(3, 2, secret=SECRET)


def test_connect_hears_signals_and_has_a_limit() -> None:
    for attempt in ("signal", "limit"):
        first, second = _core.Endpoint(0, 2, secret=SECRET), _core.Endpoint(1, 2, secret=SECRET)
        blobs = [first.blob(), second.blob()]
        if attempt == "signal":
            with raised_by_signal(0.3):
                first.connect(blobs, 3)
        else:
            begin = time.monotonic()
            with pytest.raises(_core.RondeError, match="rank 1"):
                first.connect(blobs, 1)
            assert time.monotonic() - begin < 5
        assert not _core.is_initialized()


def test_store(tmp_path: Path) -> None:
    server = _core.StoreServer(f"unix:{tmp_path}/s", SECRET)
    store = _core.Store(server.url, SECRET)
    store.set("key", b"\0value\xff")
    assert store.get("key", LIMIT) == b"\0value\xff"
    store.set("empty", b"")
    assert store.get("empty", LIMIT) == b""
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="missing"):
        store.get("missing", 0.2)
    assert time.monotonic() - begin < 2
    with raised_by_signal(0.2):
        store.get("missing", 2)
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.get("key", 1)
    server.stop()
    server.stop()  # again


def test_store_exchange(tmp_path: Path) -> None:
    server = _core.StoreServer(f"unix:{tmp_path}/s", SECRET)
    count = 3
    results: list[Any] = [None] * count

    def take_part(index: int) -> None:
        store = _core.Store(server.url, SECRET)
        results[index] = store.exchange("round", index, count, bytes([index]) * index, LIMIT)

    threads = [threading.Thread(target=take_part, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert results == [[b"", b"\1", b"\2\2"]] * count
    server.stop()
