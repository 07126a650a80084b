"""Broadcasts of what a script starts from: variables, objects."""

from collections.abc import Callable, Iterable
from typing import Any, Optional

import tensorflow as tf
from ronde import _objects
from ronde.process_sets import ProcessSet, global_process_set
from ronde.tensorflow.mpi_ops import broadcast_

v1 = tf.compat.v1

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Gives every rank the root's values of variables: the same number, in the same order, on all ranks.

    Args:
        variables: of TensorFlow, or of Keras on TensorFlow.
        inplace: accepted for compatibility; variables always keep their memory.

    Returns: in a TF 1 graph, the operation to run.
    """
    plain = [getattr(variable, "value", variable) if _is_keras(variable) else variable for variable in variables]
    return broadcast_(plain, root_rank, "broadcast_variables", process_set)


def broadcast_global_variables(root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """Gives every rank the root's values of all global variables of a TF 1 graph: the operation to run.

    Raises:
        RuntimeError: in eager mode, where there is no such list: see broadcast_variables.
    """
    if v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "broadcast_global_variables() needs a TF 1 graph; in eager mode give the variables to broadcast_variables()"
        )
    return broadcast_variables(v1.global_variables(), root_rank, process_set)


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):  # type: ignore[misc,name-defined]
    """Gives every rank the root's values of all global variables, when a session was made or recovered.

    So all start alike, from random values or from the root's checkpoint.

    Args:
        root_rank: whose values.
        device: where to place the operation.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank, self.device, self._process_set = root_rank, device, process_set
        self.bcast_op: Any = None

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph != v1.get_default_graph():
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank, self._process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank, at once, also while a graph is being built. `session` is not needed."""
    return _objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """broadcast_object as a function of the object alone."""
    return lambda obj: _objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in rank order, at once. `session` is not needed."""
    return _objects.allgather_object(obj, name, process_set)


def _is_keras(variable: Any) -> bool:
    """Keras 3 wraps TensorFlow's variables in a class of its own."""
    return not isinstance(variable, tf.Variable) and hasattr(variable, "value")
