"""Names of operations inside graphs.

Eager operations need no name: they meet in the order in which they run. The nodes of a graph run in any order, so each
has a name of its own that must be the same on all ranks. It is made from the name of the traced function and a count of
the operations in it; never from names of tensors and layers, which TensorFlow numbers by what else a rank has built.
"""

import re
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


def base_name(kind: str) -> str:
    """What the name of a node starts with for which the user has given none. Names made of it must pass unique_name()."""
    name = getattr(_root(tf.compat.v1.get_default_graph()), "name", "graph")
    # Of the gradient of a function. TensorFlow numbers all functions that a process has traced.
    generated = re.fullmatch(r"__(backward|forward|inference)_(.+)_\d+", name)
    return f"{generated[1]}_{generated[2]}.{kind}" if generated else f"{name}.{kind}"


def _root(graph: Any) -> Any:
    """The graph of the function, for those of branches and loops in it, and of their gradients: TensorFlow numbers them."""
    while type(graph).__name__ != "FuncGraph" and getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph
