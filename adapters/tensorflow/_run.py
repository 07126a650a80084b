"""One way to every op: `run` makes a node of a graph, or runs the op at once in eager mode."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow as tf
from ronde import _core, exceptions
from ronde._core import ArgumentError
from ronde._frontend import dtype_number
from ronde.tensorflow._library import ops
from ronde.tensorflow._names import node_name, unique_name

Tensor = Any

_OPS = {kind: getattr(ops, f"ronde_{kind}") for kind in _core.OPS if hasattr(ops, f"ronde_{kind}")}
_NUMBERS: dict[Any, int] = {}  # dtypes seen so far

# What SetStatus of ops.cc writes, and what TensorFlow adds behind.
_MESSAGE = re.compile(r"ronde (\w+Error): (.*?)(?:\n| \[Op:|$)")


def run(
    kind: str,
    tensors: Sequence[Tensor],
    name: Optional[str],
    process_set: int,
    reduction: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Any = None,
) -> list[Tensor]:
    """The results of an operation of the core's op table; alltoall: and the numbers of received rows."""
    if not tensors and kind not in ("barrier", "join"):
        raise ArgumentError(f"{kind} needs at least one tensor")
    arguments: dict[str, Any] = {"process_set": process_set, "reduction": int(reduction), "root_rank": root}
    if prescale != 1.0 or postscale != 1.0:
        arguments.update(prescale=repr(float(prescale)), postscale=repr(float(postscale)))
    if tensors:
        arguments.update(tensors=tensors, dtypes=[_number(tensor.dtype) for tensor in tensors])
    if kind == "alltoall":
        arguments["splits"] = tf.zeros([0], tf.int64) if splits is None else tf.cast(splits, tf.int64)
    op = _OPS[kind]
    if tf.executing_eagerly():
        return _flat(_translating(op, tensor_name=name or "", **arguments))
    results = op(tensor_name=node_name(kind) if name is None else unique_name(name), **arguments)
    node = results if isinstance(results, tf.Operation) else _flat(results)[0].op
    # Inside tf.function the op runs also when nobody uses its result, in no order with others: it must not wait for them.
    manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(node)
    return [node] if kind == "barrier" else _flat(results)


def topology(field: str, name: Optional[str]) -> Tensor:
    """What the rank knows about itself when this runs: see ReadTopology of ops.cc."""
    return _translating(ops.ronde_topology, field=field, name=name)


def translated(error: Exception) -> Exception:
    """The exception of ronde's that TensorFlow has wrapped, else the error itself."""
    found = _MESSAGE.search(getattr(error, "message", str(error)))
    kind = getattr(exceptions, found[1], None) if found else None
    return kind(found[2]) if found and kind is not None else error


def _translating(op: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return op(**arguments)
    except tf.errors.OpError as error:
        raise translated(error) from None


def _number(dtype: Any) -> int:
    number = _NUMBERS.get(dtype)
    if number is None:
        number = _NUMBERS[dtype] = dtype_number(dtype.name, dtype.name)
    return number


def _flat(results: Any) -> list[Tensor]:
    """The tensors of an op's results, which come as one, a list, or (alltoall) a pair of both."""
    if results is None:
        return []
    if isinstance(results, (list, tuple)):
        return [tensor for part in results for tensor in (part if isinstance(part, list) else [part])]
    return [results]
