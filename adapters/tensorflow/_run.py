"""One way to every op: `run` makes a node of a graph, or runs the op at once in eager mode."""

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow as tf
from ronde import _core, exceptions
from ronde._core import ArgumentError
from ronde._frontend import dtype_number
from ronde.tensorflow._library import ops
from ronde.tensorflow._names import base_name, unique_name

Tensor = Any

_OPS = {kind: getattr(ops, f"ronde_{kind}") for kind in _core.OPS if hasattr(ops, f"ronde_{kind}")}
_NUMBERS: dict[Any, int] = {}  # dtypes seen so far

# The last barrier or join in the graph of a function: it comes after all that is above it in the program, and what is
# below comes after it.
_dividers: "weakref.WeakKeyDictionary[Any, list[Any]]" = weakref.WeakKeyDictionary()

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
        arguments["splits"] = tf.zeros([0], tf.int64) if splits is None else _as_splits(splits)
    op = _OPS[kind]
    if tf.executing_eagerly():
        return _flat(_translating(op, tensor_name=name or "", **arguments))
    graph = tf.compat.v1.get_default_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    divides = manager is not None and kind in ("barrier", "join")
    before = (
        [each for each in graph.get_operations() if each.op_def.is_stateful] if divides else _dividers.get(graph, [])
    )
    _one_pass_at_a_time(graph)
    with tf.control_dependencies(before):
        results = op(tensor_name=unique_name(base_name(kind) if name is None else name), **arguments)
    node = results if isinstance(results, tf.Operation) else _flat(results)[0].op
    if divides:
        _dividers[graph] = [node]
    elif manager is not None:
        # It runs also when nobody uses its result, in no order with others: it must not wait for them.
        manager.run_independently(node)
    elif hasattr(graph, "control_outputs"):  # a branch or loop in a TF 1 graph: a pass ends when this has ended
        graph.control_outputs.append(node)
    return [node] if kind == "barrier" else _flat(results)


def _one_pass_at_a_time(graph: Any) -> None:
    """Passes of TF 1's loops run side by side, in an order of their own on each rank; those of tf.function do not."""
    context = graph._get_control_flow_context()
    while context is not None:
        if context.IsWhileContext():
            context._parallel_iterations = 1
            frame = context.name.encode()
            for op in graph.get_operations():
                if op.type == "Enter" and op.get_attr("frame_name") == frame:
                    op._set_attr("parallel_iterations", tf.compat.v1.AttrValue(i=1))
        context = context.outer_context


def _as_splits(splits: Any) -> Tensor:
    given = tf.convert_to_tensor(splits)
    if not given.dtype.is_integer or given.shape.rank not in (None, 1):
        raise ArgumentError(f"alltoall: splits must be a vector of whole numbers, not {given.dtype.name} {given.shape}")
    return tf.cast(given, tf.int64)


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
