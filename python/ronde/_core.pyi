"""The compiled core: a thin binding of ronde/ronde.h. Frontends use it; users do not."""

import builtins
from collections.abc import Sequence
from typing import Any, Optional, SupportsIndex, Union

__version__: str

# Tables. name -> number
DTYPES: dict[str, int]
DTYPE_SIZES: dict[str, int]
OPS: dict[str, int]
REDUCTIONS: dict[str, int]  # by public name: {"Average": 0, "Sum": 1, ...}
# (name, type, default, scope, flag, flag_scale, section, help), type in {"Bool", "Int", "Double", "String"}
OPTIONS: list[tuple[str, str, str, str, str, float, str, str]]

# Exceptions. RondeError derives from RuntimeError.
class RondeError(RuntimeError): ...
class HorovodInternalError(RondeError): ...  # base of those that elastic training may retry
class ArgumentError(RondeError, ValueError): ...
class MismatchError(RondeError): ...
class PeerLostError(HorovodInternalError): ...
class StallError(RondeError): ...
class ShutdownError(HorovodInternalError): ...
class TransportError(HorovodInternalError): ...
class TimeoutError(RondeError, builtins.TimeoutError): ...
class NotInitializedError(RondeError, ValueError): ...

class Buffer:
    """Memory that the core allocated: the buffer protocol, flat bytes, writable. Keeps its memory alive."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    address: int

def allocate_shared(dtype: int, shape: Union[SupportsIndex, Sequence[SupportsIndex]]) -> Buffer:
    """Memory that the ranks of this host reach without copies; ordinary memory where they share none."""

class Handle:
    def poll(self) -> bool:
        """Whether the operation has ended (well or not)."""
    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits without the interpreter lock, checks signals every 100 ms; raises the operation's error.

        TimeoutError if `timeout` seconds passed. May be called again."""
    def output(self, index: int) -> Buffer:
        """Output `index` that the core allocated (its request gave output address 0)."""
    def received_splits(self, index: int) -> list[int]: ...
    def value(self) -> int: ...  # join: last rank; add_process_set: id
    def existed(self) -> bool: ...  # add_process_set: the set was there already

def submit(
    op: int,
    name: Optional[str],
    tensors: Sequence[tuple[int, int, int, tuple[int, ...]]],  # (input address, output address or 0, dtype, shape)
    keepalive: Any = None,  # held until the operation has ended, also when the handle is dropped
    reduction: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    device: int = -1,
    splits: Sequence[int] = (),  # alltoall: rows to each member, tensor after tensor; empty: even
    ranks: Sequence[int] = (),
    names: Sequence[str] = (),  # of a group's members; empty: name.0, name.1, ...
) -> Handle: ...

class PreparedAllreduce:
    """An allreduce of one tensor in place, to be started again and again; also the handle of the last one started."""

    def start(self, address: int, keepalive: Any) -> None:
        """Starts the operation on this memory; keepalive is held until it has ended."""
    def wait(self) -> None:
        """As Handle.wait(), of the operation that was started last. May be called again."""

def prepare_allreduce(
    name: str,
    dtype: int,
    shape: Sequence[int],
    reduction: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
) -> PreparedAllreduce:
    """What is wrong with the arguments start() says."""

def defer(
    op: int,
    name: str,
    arrays: Sequence[tuple[int, int, tuple[int, ...]]],  # (array of the framework's, dtype, shape); owned from now on
    lend: int,  # address of int lend(void* array, DLManagedTensor** lent)
    free: int,  # address of int free(void* array)
    reduction: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
) -> tuple[int, int, int]:
    """An operation in place, for a framework's engine to start (MXEnginePushAsyncND).

    Returns the addresses of start(context, completion, argument), argument and release(argument). Raises what submit()
    would at once; then the arrays stay the caller's. Errors that come later go to the completion, as
    "ronde.<class>: <text>"."""

def deferred_counts() -> tuple[int, int]:
    """How many deferred operations were started so far, and how many have ended."""

class Endpoint:
    """First half of init: listens; the blob goes to every rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        generation: int = 0,
        host_name: Optional[str] = None,
        host_id: Optional[str] = None,
        secret: Optional[str] = None,
        store_url: Optional[str] = None,
    ) -> None: ...
    def blob(self) -> bytes: ...
    def connect(self, blobs: Sequence[bytes], timeout: float) -> None:
        """Second half: meets the others and starts the process's engine. The endpoint is used up."""

def shutdown(failure: Optional[str] = None) -> None: ...
def is_initialized() -> bool: ...
def topology() -> dict[str, int]:
    """rank, size, local_rank, local_size, cross_rank, cross_size, is_homogeneous, shared_memory.

    NotInitializedError before init, after shutdown and in a forked child."""

def process_set_ranks(process_set: int) -> list[int]: ...
def start_timeline(path: bytes, mark_cycles: bool = False) -> None: ...
def stop_timeline() -> None: ...
def metrics() -> dict[str, Any]: ...

class Store:
    def __init__(self, url: str, secret: Optional[str] = None) -> None: ...
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout: float) -> bytes: ...
    def exchange(self, key: str, index: int, count: int, blob: bytes, timeout: float) -> list[bytes]: ...
    def close(self) -> None: ...

class StoreServer:
    def __init__(self, url: str, secret: Optional[str] = None) -> None: ...
    url: str
    def stop(self) -> None: ...
