"""The life cycle of the process's engine, and what a rank knows about itself."""

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from enum import IntEnum
from types import TracebackType
from typing import Any, Optional, Union

from ronde import _clusters, _core, process_sets
from ronde._options import number, warn_of_missing

# The reductions, by the numbers of the core.
ReduceOp = IntEnum("ReduceOp", _core.REDUCTIONS)  # type: ignore[misc]
_REDUCTIONS = tuple(_core.REDUCTIONS.values())
Average = ReduceOp["Average"]
Sum = ReduceOp["Sum"]
Adasum = ReduceOp["Adasum"]
Min = ReduceOp["Min"]
Max = ReduceOp["Max"]
Product = ReduceOp["Product"]

_lock = threading.RLock()  # guards the variables below; one init() or shutdown() at a time
_generations: dict[tuple[int, ...], int] = {}  # by members: how many engines this process has had with them
_owner: Optional[int] = None  # the process that called init(), for forked children
_has_hooks = False
_before_end: list[Callable[[], None]] = []


def init(comm: Any = None, process_sets: Optional[Union[str, Iterable["process_sets.ProcessSet"]]] = None) -> None:
    """Meets the other ranks and starts the engine. Does nothing when it runs already.

    Who the ranks are is found in the environment: ronderun, torchrun, or neither (then this process is alone and no
    network is touched). After shutdown() it may be called again.

    Args:
        comm: None for all ranks; a list of ranks: they form a job of their own, numbered in the list's order, and only
            they may call; or an mpi4py communicator: its processes are the job.
        process_sets: process sets to add at once, the same on all ranks. "dynamic" is accepted: sets can always be
            added later.

    Raises:
        TimeoutError: RONDE_START_TIMEOUT seconds (300) passed; the text names ranks that did not come.
        ValueError: this rank is not in `comm`.
    """
    global _owner
    with _lock:
        if is_initialized():
            return
        warn_of_missing()
        cluster, ranks = _clusters.find(comm)
        generation = _generations.get(ranks, 0)
        _generations[ranks] = generation + 1  # also when it fails: what was handed around must not be used again
        _clusters.connect(cluster, ranks, generation, number("START_TIMEOUT"))
        _owner = os.getpid()
        _install_hooks()
        try:
            _add_process_sets(process_sets)
        except BaseException as error:
            _end(_describe(type(error), error))
            raise


def shutdown() -> None:
    """Ends the engine; operations that are pending fail with ShutdownError. Does nothing when there is none."""
    _end(None)


def is_initialized() -> bool:
    """Whether init() was called, shutdown() was not, and this is not a forked child."""
    return _core.is_initialized()


def before_end(function: Callable[[], None]) -> Callable[[], None]:
    """For frontends: calls the function before the engine ends in order, in shutdown() or at the process's exit."""
    _before_end.append(function)
    return function


def rank() -> int:
    """Number of this process in the job, from 0. NotInitializedError (a ValueError) before init()."""
    return _core.topology()["rank"]


def size() -> int:
    """Number of processes in the job."""
    return _core.topology()["size"]


def local_rank() -> int:
    """Number of this process among those of its host."""
    return _core.topology()["local_rank"]


def local_size() -> int:
    """Number of the job's processes on this host."""
    return _core.topology()["local_size"]


def cross_rank() -> int:
    """Number of this host among those that have a process with this local rank."""
    return _core.topology()["cross_rank"]


def cross_size() -> int:
    """Number of hosts that have a process with this local rank."""
    return _core.topology()["cross_size"]


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return bool(_core.topology()["is_homogeneous"])


def start_timeline(file_path: Union[str, "os.PathLike[str]"], mark_cycles: bool = False) -> None:
    """Starts to record what ronde does in a file of Chrome trace events, for Perfetto or `ronde timeline`.

    Every rank may call it; rank 0 writes the file. With RONDE_TIMELINE_ALL_RANKS (`ronderun --timeline-all-ranks`) each
    rank writes its own, t.rank0.json, t.rank1.json, ... for t.json. May be called from any thread.

    Args:
        file_path: the file; it is overwritten.
        mark_cycles: mark the rounds of the engine's control thread, too.

    Raises:
        ValueError: the file cannot be written, a timeline is being recorded already, or before init().
    """
    _core.start_timeline(os.fsencode(file_path), mark_cycles)


def stop_timeline() -> None:
    """Ends the record and closes its file; shutdown() does so, too. Does nothing when none is being recorded."""
    _core.stop_timeline()


def metrics() -> dict[str, Any]:
    """What ronde did on this rank since init(): counts, bytes, and where the time went.

    Returns:
        A dictionary:

        - operations, failed: operations of this rank that ended, and how many of them with an error;
        - tensors, bytes: tensors that were run, and the bytes of this rank's inputs;
        - lent: of these bytes, those that the other ranks of the host reached where they lay (see empty_shared), so that
          they were not copied. Allreduces run them in place;
        - batches, lists: what ranks committed together, and fused operations run;
        - ops: the same by kind, as in ["ops"]["allreduce"]["bytes"];
        - seconds: negotiate (from a submission to its commit by all ranks) and queue (from there until it runs), summed
          over operations, which overlap; run (fused operations, one by one) and its parts pack, network (waiting for
          peers and bytes), reduce and unpack;
        - cache: hits and misses: operations whose definition travelled as an id, or whole;
        - stalls: warnings about operations that some ranks did not submit; rank 0 counts them.

    Raises:
        ValueError: before init().
    """
    return _core.metrics()


def gloo_enabled() -> bool:
    """True: ronde's own TCP and shared-memory backend takes the place that Gloo has in Horovod."""
    return True


def gloo_built() -> bool:
    """True, see gloo_enabled."""
    return True


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: False, MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI moves the data: False."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used: False."""
    return False


def nccl_built() -> bool:
    """Whether NCCL can be used: False."""
    return False


def ddl_built() -> bool:
    """Whether IBM DDL can be used: False."""
    return False


def ccl_built() -> bool:
    """Whether Intel oneCCL can be used: False."""
    return False


def cuda_built() -> bool:
    """Whether tensors in CUDA memory are reduced there: False."""
    return False


def rocm_built() -> bool:
    """Whether tensors in ROCm memory are reduced there: False."""
    return False


def reduction(op: Optional[int], average: Optional[bool]) -> int:
    """What a call's `op` and its deprecated `average` mean together."""
    if average is not None:
        if op is not None:
            raise _core.ArgumentError("`op` and `average` say the same: give only `op` (`average` is deprecated)")
        warnings.warn("`average` is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if isinstance(op, bool) or op not in _REDUCTIONS:
        raise _core.ArgumentError(f"op={op!r} is no reduction: use one of {', '.join(_core.REDUCTIONS)}")
    return op


def _add_process_sets(sets: Optional[Union[str, Iterable["process_sets.ProcessSet"]]]) -> None:
    if isinstance(sets, str):
        if sets.lower() != "dynamic":
            raise _core.ArgumentError(f"process_sets={sets!r}: give a list of ProcessSet or 'dynamic'")
        return
    for process_set in sets or ():
        process_sets.add_process_set(process_set)


def _end(failure: Optional[str]) -> None:
    if failure is None and _owner == os.getpid() and is_initialized():
        for function in _before_end:
            function()
    with _lock:
        if _owner != os.getpid():
            return  # never initialized, or a forked child, whose parent's engine is none of its business
        process_sets.forget()
        _core.shutdown(failure)


def _describe(type_: type, value: object) -> str:
    """One line about an exception, for the other ranks' errors.

    TensorFlow's start with a heading ("Graph execution error:"); what happened comes before a node in brackets, or last.
    """
    lines = [line.strip() for line in str(value).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if line.endswith(":"):
        line = next((text for text, after in zip(lines, lines[1:]) if after.startswith("[[")), lines[-1])
    return (f"{type_.__name__}: {line}" if line else type_.__name__)[:500]


def _install_hooks() -> None:
    global _has_hooks
    if _has_hooks:
        return
    _has_hooks = True
    atexit.register(_end, None)
    previous = sys.excepthook

    # An exception that nobody catches ends this process: the others shall learn of it, not just see it vanish.
    def excepthook(type_: type[BaseException], value: BaseException, traceback: Optional[TracebackType]) -> None:
        try:
            previous(type_, value, traceback)
        finally:
            if not (hasattr(sys, "ps1") or sys.flags.interactive):  # at a prompt the process lives on
                _end(_describe(type_, value))

    sys.excepthook = excepthook
