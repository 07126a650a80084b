"""Names of operations inside graphs.

Eager operations need no name: they meet in the order in which they run. The nodes of a graph run in any order, so each
has a name of its own that must be the same on all ranks. It is made from the name of the traced function and a count of
the operations in it; never from names of tensors and layers, which TensorFlow numbers by what else a rank has built.
"""

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

_counts: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()


def unique_name(name: str) -> str:
    """The name for a node in the graph that is being built; further nodes that ask for the same one get numbers."""
    graph = _root(tf.compat.v1.get_default_graph())
    uses = _counts.setdefault(graph, Counter())
    uses[name] += 1
    return name if uses[name] == 1 else f"{name}#{uses[name]}"  # "name.2" is what the core calls a group's member


def node_name(kind: str) -> str:
    """A name for a node for which the user has given none."""
    function = getattr(_root(tf.compat.v1.get_default_graph()), "name", "graph")
    return unique_name(f"{function}.{kind}")


def _root(graph: Any) -> Any:
    """The graph of the function, for graphs of branches and loops in it: their names have numbers of TensorFlow's."""
    while type(graph).__name__ in ("CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph"):
        graph = graph.outer_graph
    return graph
