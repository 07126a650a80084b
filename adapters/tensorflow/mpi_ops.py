"""The collectives on TensorFlow's tensors: eager, in tf.function and in TF 1 graphs. Each is described in
ronde._collectives.

In a graph every operation needs a name that is the same on all ranks; without one it is named after the traced function
and its place among the operations there.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow as tf
from ronde._collectives import Collectives, Result
from ronde._common import *  # noqa: F403
from ronde._frontend import Values
from ronde.basics import reduction
from ronde.compression import Compressor
from ronde.process_sets import ProcessSet, global_process_set, set_id
from ronde.tensorflow import _gradients, _sparse  # noqa: F401  (registers gradients)
from ronde.tensorflow._run import run, topology

Tensor = Any


class _TensorFlowValues(Values[Tensor]):
    def convert(self, value: Any) -> Tensor:
        if isinstance(value, tf.IndexedSlices):
            raise TypeError("needs a dense tensor: of the collectives, only allreduce takes tf.IndexedSlices")
        return tf.convert_to_tensor(value)

    def integers(self, values: Any) -> Tensor:
        return tf.convert_to_tensor(values, tf.int64)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return tf.zeros_like(tensor)

    def dtype_name(self, tensor: Tensor) -> str:
        return tensor.dtype.name

    def cast(self, tensor: Tensor, dtype_name: str) -> Tensor:
        return tf.cast(tensor, dtype_name)


class _Ready:
    """Stands where other frameworks have a handle: TensorFlow itself waits for an op's results."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def wait(self) -> Any:
        return self._results

    def then(self, change: Callable[[Any], Any]) -> "_Ready":
        return _Ready(change(self._results))


class _TensorFlowCollectives(Collectives[Tensor]):
    """The gradients are those of the ops (see _gradients), so `differentiable` has nothing to add."""

    def _start(  # type: ignore[override]
        self,
        kind: str,
        given: Sequence[Any],
        name: Optional[str],
        process_set: ProcessSet,
        where: Result,
        **options: Any,
    ) -> _Ready:
        tensors = [self._frontend.convert(tensor) for tensor in given]
        return _Ready(run(kind, tensors, name, set_id(process_set), **options))

    def alltoall(
        self,
        tensor: Any,
        splits: Any = None,
        name: Optional[str] = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Sends rows to every member and receives rows from each, in rank order.

        Args:
            splits: int64 vector, how many rows of the first dimension go to each member; None: as many to each (the
                dimension must be divisible), and then the result is the tensor alone.

        Returns: the received rows; with splits, also how many came from each member.

        The gradient is an alltoall the other way.
        """
        rows, received = self._start("alltoall", [tensor], name, process_set, Result.CORE, splits=splits).wait()
        return rows if splits is None else (rows, received)

    def join(self, device: int = -1) -> Tensor:
        """This rank has no more data: it takes part in the others' operations with nothing, until all ranks have joined.

        Returns: the rank that joined last, int32.
        """
        return run("join", [], None, 0)[0]

    def barrier(self, process_set: ProcessSet = global_process_set) -> Any:
        """Returns when every member has called it. In a TF 1 graph: the operation to run."""
        nodes = run("barrier", [], None, set_id(process_set))
        return nodes[0] if nodes else None


api = _TensorFlowCollectives(_TensorFlowValues())

grouped_allgather = api.grouped_allgather
allgather = api.allgather
broadcast = api.broadcast
alltoall = api.alltoall
reducescatter = api.reducescatter
grouped_reducescatter = api.grouped_reducescatter
join = api.join
barrier = api.barrier


def allreduce(
    tensor: Any,
    average: Optional[bool] = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Optional[Compressor[Tensor]] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combines tensors of one shape and dtype, element by element: the same result on every rank, bit by bit.

    Args:
        tensor: a tensor of any shape; or tf.IndexedSlices, of which ranks may have different rows: the result has the
            rows that any rank has, each once.
        average: deprecated; True means op=Average, False op=Sum.
        device_dense, device_sparse: where to place the operations around the collective, for each kind of tensor.
        compression: Compression.none, .fp16 or .bf16: how it travels.
        op: Average (the default), Sum, Min, Max, Product or, for floating point types, Adasum; for IndexedSlices Average
            or Sum. Averages of whole numbers are rounded down; their sums must fit in 64 bits.
        prescale_factor, postscale_factor: multiply each rank's tensor before, and the result.

    The gradient, of Average and Sum, is the allreduce of the result's gradient, with the same op and factors.
    """
    op = reduction(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse or None):
            factor = prescale_factor * postscale_factor
            return _sparse.allreduce(tensor, name, op, factor, compression or api.compression.none, process_set)
    with tf.device(device_dense or None):
        return api.allreduce(tensor, None, name, compression, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: Optional[bool] = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Optional[Compressor[Tensor]] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """allreduce of several tensors, all or nothing: it starts when every rank has given all of them."""
    op = reduction(op, average)
    with tf.device(device_dense or None):
        return api.grouped_allreduce(
            tensors, None, name, compression, op, prescale_factor, postscale_factor, process_set
        )


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives variables the root's values, all or nothing.

    Returns: the variables; in a TF 1 graph, the operation to run.
    """
    values = [tf.convert_to_tensor(variable) for variable in variables]
    results = run("broadcast", values, name, set_id(process_set), root=root_rank) if values else []
    assigned = [variable.assign(result) for variable, result in zip(variables, results)]
    return variables if tf.compat.v1.executing_eagerly_outside_functions() else tf.group(*assigned)


def rank_op(name: Optional[str] = None) -> Tensor:
    """rank() when the graph runs, int32."""
    return topology("rank", name)


def local_rank_op(name: Optional[str] = None) -> Tensor:
    """local_rank() when the graph runs, int32."""
    return topology("local_rank", name)


def size_op(process_set_id: int = 0, name: Optional[str] = None) -> Tensor:
    """size() of a process set when the graph runs, int32."""
    return topology(f"size:{process_set_id}", name)


def local_size_op(name: Optional[str] = None) -> Tensor:
    """local_size() when the graph runs, int32."""
    return topology("local_size", name)


def process_set_included_op(process_set_id: int = 0, name: Optional[str] = None) -> Tensor:
    """1 if this rank is in the process set when the graph runs, else 0, int32."""
    return topology(f"included:{process_set_id}", name)
