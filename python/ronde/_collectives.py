"""The collectives, written once for all frameworks. See _frontend for what differs between them.

Arguments that all of them take:
    name: identity of the operation. Operations of one name meet across ranks, in whatever order each rank starts them;
        unnamed ones meet in the order in which they are started. A name must not be in flight twice.
    process_set: whose ranks take part. Others get an ArgumentError at once.

Errors that all of them raise: ArgumentError (this call cannot be right), MismatchError (ranks disagree; on all of them,
with the same text), StallError, PeerLostError, ShutdownError, TransportError; NotInitializedError before init(). All but
the last come from synchronize() when an operation was started with ..._async.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, Optional, TypeVar

from ronde import _core
from ronde._core import ArgumentError
from ronde._frontend import T, Values
from ronde._objects import allgather_object, broadcast_object
from ronde.basics import Average, Sum, reduction
from ronde.compression import Compression, Compressor
from ronde.process_sets import ProcessSet, global_process_set, set_id

R = TypeVar("R")


class Handle(Generic[R]):
    """An operation that was started: give it to poll() and synchronize()."""

    __slots__ = ("_core", "_finish", "_result")

    def __init__(self, core: _core.Handle, finish: Callable[[_core.Handle], R]) -> None:
        self._core = core
        self._finish: Optional[Callable[[_core.Handle], R]] = finish
        self._result: Optional[R] = None

    def poll(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._core.poll()

    def wait(self) -> R:
        """Waits for the end: the result, or its error raised. May be called again."""
        self._core.wait()
        return self._end()

    def _end(self) -> R:
        if self._finish is not None:
            self._result = self._finish(self._core)
            self._finish = None
        return self._result  # type: ignore[return-value]

    def then(self, change: Callable[[R], Any]) -> "Handle[Any]":
        """The same operation with a result that is changed once it is there."""
        return Handle(self._core, lambda _: change(self._end()))


class Result(Enum):
    """Where results go."""

    NEW = 1  # into new memory, of the input's shape
    IN_PLACE = 2  # into the tensors themselves
    CORE = 3  # into memory of the core's: the shape is known at the end only


class Collectives(ABC, Generic[T]):
    """The public functions for one framework are the methods of one such object."""

    def __init__(self, frontend: Values[T]) -> None:
        self._frontend = frontend
        self.compression: Compression[T] = Compression(frontend)

    # ---- allreduce ----

    def allreduce(
        self,
        tensor: Any,
        average: Optional[bool] = None,
        name: Optional[str] = None,
        compression: Optional[Compressor[T]] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Combines tensors of one shape and dtype, element by element: the same result on every rank, bit by bit.

        Args:
            tensor: any shape.
            op: Average (the default), Sum, Min, Max, Product or Adasum. Averages of whole numbers are rounded down; their
                sums must fit in 64 bits. Adasum, for floating point types, adds what is orthogonal and averages what
                is parallel, each tensor by itself (Maleki et al. 2020; docs/adasum.md).
            average: deprecated; True means op=Average, False op=Sum.
            compression: Compression.none, .fp16 or .bf16: how it travels.
            prescale_factor, postscale_factor: multiply each rank's tensor before, and the result.

        The gradient, of Average and Sum, is the allreduce of the result's gradient, with the same op and factors.
        """
        op = reduction(op, average)
        return self.grouped_allreduce(
            [tensor], None, name, compression, op, prescale_factor, postscale_factor, process_set
        )[0]

    def allreduce_async(
        self,
        tensor: Any,
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[T]:
        """Starts an allreduce: a handle for poll() and synchronize(). The tensor must not change until it has ended."""
        op = reduction(op, average)
        return self._start_one(
            "allreduce", tensor, name, process_set, Result.NEW, reduction=op, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def allreduce_(
        self,
        tensor: Any,
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """allreduce into the tensor itself, which is returned. Any layout whose elements do not overlap. No gradient."""
        op = reduction(op, average)
        return self.allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set).wait()

    def allreduce_async_(
        self,
        tensor: Any,
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[T]:
        """Starts an allreduce into the tensor itself; it holds the result once synchronize() has returned."""
        op = reduction(op, average)
        return self._start_one(
            "allreduce", tensor, name, process_set, Result.IN_PLACE, reduction=op, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_allreduce(
        self,
        tensors: Sequence[Any],
        average: Optional[bool] = None,
        name: Optional[str] = None,
        compression: Optional[Compressor[T]] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """allreduce of several tensors, all or nothing: it starts when every rank has given all of them."""
        op = reduction(op, average)
        compression = compression or self.compression.none
        pairs = [compression.compress(self._frontend.convert(tensor)) for tensor in tensors]

        def forward(values: list[T]) -> list[T]:
            return self._reduce("allreduce", values, name, op, prescale_factor, postscale_factor, process_set).wait()

        def gradient(grads: list[T]) -> list[T]:
            self._check_linear("allreduce", op)
            return self.grouped_allreduce(
                grads, None, _gradient_name(name), compression, op, prescale_factor, postscale_factor, process_set
            )

        results = self._frontend.differentiable(forward, gradient, [tensor for tensor, _ in pairs])
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Any],
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[T]]:
        """Starts a grouped_allreduce: one handle for all."""
        op = reduction(op, average)
        return self._reduce("allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set)

    def grouped_allreduce_(
        self,
        tensors: Sequence[Any],
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """grouped_allreduce into the tensors themselves. No gradient."""
        op = reduction(op, average)
        handle = self._reduce("allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, True)
        return handle.wait()

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[Any],
        average: Optional[bool] = None,
        name: Optional[str] = None,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[T]]:
        """Starts a grouped_allreduce into the tensors themselves."""
        op = reduction(op, average)
        return self._reduce("allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, True)

    # ---- allgather ----

    def allgather(self, tensor: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> T:
        """Joins tensors along their first dimension, in rank order, on every rank.

        The first dimension may differ between ranks, and be 0; the others must agree.
        The gradient of a rank's tensor is its slice of the sum of all ranks' gradients of the result.
        """
        return self.grouped_allgather([tensor], name, process_set)[0]

    def allgather_async(
        self, tensor: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Starts an allgather."""
        return self._start_one("allgather", tensor, name, process_set, Result.CORE)

    def grouped_allgather(
        self, tensors: Sequence[Any], name: Optional[str] = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """allgather of several tensors, all or nothing."""
        values = [self._frontend.convert(tensor) for tensor in tensors]

        def forward(values: list[T]) -> list[T]:
            return self.grouped_allgather_async(values, name, process_set).wait()

        def gradient(grads: list[T]) -> list[T]:
            name_of_sum = _gradient_name(name)
            # Beside the rows of each tensor the rank: those that have joined give none.
            own, width = process_set.rank(), 1 + len(values)
            rows = self._frontend.integers([own, *(value.shape[0] for value in values)])  # type: ignore[attr-defined]
            counts = self.allgather_async(rows, name_of_sum and name_of_sum + ".rows", process_set)
            sums = self.grouped_allreduce(grads, None, name_of_sum, None, Sum, process_set=process_set)
            flat = _list(counts.wait())
            before = [flat[at + 1 : at + width] for at in range(0, len(flat), width) if flat[at] < own]
            starts = [sum(each[number] for each in before) for number in range(len(values))]
            return [each[start : start + len(value)] for each, start, value in zip(sums, starts, values)]  # type: ignore[index,arg-type]

        return self._frontend.differentiable(forward, gradient, values)

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: Optional[str] = None, process_set: ProcessSet = global_process_set
    ) -> Handle[list[T]]:
        """Starts a grouped_allgather."""
        return self._start("allgather", tensors, name, process_set, Result.CORE)

    # ---- broadcast ----

    def broadcast(
        self,
        tensor: Any,
        root_rank: int,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """The root's tensor on every rank. Shape and dtype must agree.

        root_rank is a rank of the job, also with a process set. The gradient is the sum of all ranks' at the root, and
        zero elsewhere.
        """

        def forward(values: list[T]) -> list[T]:
            return [self.broadcast_async(values[0], root_rank, name, process_set).wait()]

        def gradient(grads: list[T]) -> list[T]:
            result = self.allreduce(grads[0], None, _gradient_name(name), None, Sum, process_set=process_set)
            return [result if _core.topology()["rank"] == root_rank else self._frontend.zeros_like(result)]

        return self._frontend.differentiable(forward, gradient, [self._frontend.convert(tensor)])[0]

    def broadcast_async(
        self,
        tensor: Any,
        root_rank: int,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[T]:
        """Starts a broadcast."""
        return self._start_one("broadcast", tensor, name, process_set, Result.NEW, root=root_rank)

    def broadcast_(
        self,
        tensor: Any,
        root_rank: int,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """broadcast into the tensor itself, which is returned. No gradient."""
        return self.broadcast_async_(tensor, root_rank, name, process_set).wait()

    def broadcast_async_(
        self,
        tensor: Any,
        root_rank: int,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[T]:
        """Starts a broadcast into the tensor itself."""
        return self._start_one("broadcast", tensor, name, process_set, Result.IN_PLACE, root=root_rank)

    # ---- alltoall ----

    def alltoall(
        self,
        tensor: Any,
        splits: Any = None,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Sends rows to every member and receives rows from each, in rank order.

        Args:
            splits: how many rows of the first dimension go to each member; None: as many to each (the dimension must
                be divisible), and then the result is the tensor alone.

        Returns: the received rows; with splits, also how many came from each member.

        The gradient is an alltoall the other way.
        """
        received: list[int] = []

        def forward(values: list[T]) -> list[T]:
            rows, counts = self._alltoall(values[0], splits, name, process_set).wait()
            received.extend(counts)
            return [rows]

        def gradient(grads: list[T]) -> list[T]:
            return [self.alltoall(grads[0], list(received), _gradient_name(name), process_set)[0]]

        (result,) = self._frontend.differentiable(forward, gradient, [self._frontend.convert(tensor)])
        return result if splits is None else (result, self._frontend.integers(received))

    def alltoall_async(
        self,
        tensor: Any,
        splits: Any = None,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Any]:
        """Starts an alltoall."""
        handle = self._alltoall(tensor, splits, name, process_set)
        if splits is None:
            return handle.then(_one)
        return handle.then(lambda pair: (pair[0], self._frontend.integers(pair[1])))

    def _alltoall(
        self, tensor: Any, splits: Any, name: Optional[str], process_set: ProcessSet
    ) -> Handle[tuple[T, list[int]]]:
        rows = () if splits is None else _list(splits)
        handle = self._start("alltoall", [tensor], name, process_set, Result.CORE, splits=rows)
        return Handle(handle._core, lambda core: (handle.wait()[0], core.received_splits(0)))

    # ---- reducescatter ----

    def reducescatter(
        self,
        tensor: Any,
        name: Optional[str] = None,
        compression: Optional[Compressor[T]] = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """allreduce of which each rank receives its rows only: evenly cut, the first ranks get one more.

        op: as allreduce's, without Adasum. Gradients travel by allgather, scaled as the result was.
        """
        return self.grouped_reducescatter(
            [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
        )[0]

    def reducescatter_async(
        self,
        tensor: Any,
        name: Optional[str] = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[T]:
        """Starts a reducescatter."""
        op = reduction(op, None)
        return self._start_one(
            "reducescatter", tensor, name, process_set, Result.CORE, reduction=op, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    def grouped_reducescatter(
        self,
        tensors: Sequence[Any],
        name: Optional[str] = None,
        compression: Optional[Compressor[T]] = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """reducescatter of several tensors, all or nothing."""
        compression = compression or self.compression.none
        pairs = [compression.compress(self._frontend.convert(tensor)) for tensor in tensors]

        def forward(values: list[T]) -> list[T]:
            return self.grouped_reducescatter_async(
                values, name, op, process_set, prescale_factor, postscale_factor
            ).wait()

        def gradient(grads: list[T]) -> list[T]:
            self._check_linear("reducescatter", op)
            factor = prescale_factor * postscale_factor / (process_set.size() if op == Average else 1)
            return [grad * factor for grad in self.grouped_allgather(grads, _gradient_name(name), process_set)]  # type: ignore[operator,misc]

        results = self._frontend.differentiable(forward, gradient, [tensor for tensor, _ in pairs])
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs)]

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[Any],
        name: Optional[str] = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[list[T]]:
        """Starts a grouped_reducescatter."""
        op = reduction(op, None)
        return self._start(
            "reducescatter", tensors, name, process_set, Result.CORE, reduction=op, prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip

    # ---- control ----

    def join(self, device: int = -1) -> int:
        """This rank has no more data: it takes part in the others' operations with nothing, until all ranks have joined.

        Returns: the rank that joined last. Averages still divide by the number of all ranks. Steps after a rank has
            joined are not that rank's: to go on with equal weights, broadcast them from the rank that is returned.
        """
        handle = _core.submit(_core.OPS["join"], None, ())
        handle.wait()
        return handle.value()

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Returns when every member has called it."""
        _core.submit(_core.OPS["barrier"], None, (), process_set=set_id(process_set)).wait()

    def poll(self, handle: Handle[Any]) -> bool:
        """Whether an operation has ended, so that synchronize() will not wait."""
        return handle.poll()

    def synchronize(self, handle: Handle[R]) -> R:
        """Waits for an operation that was started with ..._async: its result, or its error raised."""
        return handle.wait()

    broadcast_object = staticmethod(broadcast_object)
    allgather_object = staticmethod(allgather_object)

    # ---- the way to the core ----

    def _reduce(
        self,
        kind: str,
        tensors: Sequence[Any],
        name: Optional[str],
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        in_place: bool = False,
    ) -> Handle[list[T]]:
        where = Result.IN_PLACE if in_place else Result.NEW
        return self._start(
            kind, tensors, name, process_set, where, reduction=op, prescale=prescale, postscale=postscale
        )

    @abstractmethod
    def _start(
        self,
        kind: str,
        given: Sequence[Any],
        name: Optional[str],
        process_set: ProcessSet,
        where: Result,
        **options: Any,
    ) -> Handle[list[T]]:
        """Starts an operation of the core's op table. Options: reduction, prescale, postscale, root, splits."""

    def _start_one(
        self, kind: str, given: Any, name: Optional[str], process_set: ProcessSet, where: Result, **options: Any
    ) -> Handle[T]:
        """The same for one tensor."""
        return self._start(kind, [given], name, process_set, where, **options).then(_one)

    @staticmethod
    def _check_linear(kind: str, op: int) -> None:
        if op not in (Average, Sum):
            raise ArgumentError(f"{kind} has a gradient with op=Average and op=Sum only")


def _one(results: Sequence[Any]) -> Any:
    return results[0]


def _list(values: Any) -> list[int]:
    """Whole numbers given as a list, an array or a tensor."""
    if hasattr(values, "asnumpy"):  # MXNet's arrays
        values = values.asnumpy()
    return [int(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def _gradient_name(name: Optional[str]) -> Optional[str]:
    return name and f"{name}.gradient"
