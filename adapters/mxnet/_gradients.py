"""How gradients and other values of training become those of all ranks."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

import mxnet as mx
import ronde
from ronde._gradient_options import GradientOptions
from ronde.basics import Average, Sum
from ronde.mxnet import mpi_ops
from ronde.mxnet._engine import NDArray
from ronde.process_sets import engine_memory

_serials: "dict[str, itertools.count[int]]" = engine_memory()
_numbers: "dict[int, int]" = engine_memory()  # by id of the owner


def number_of(owner: Any) -> int:
    """Stores and optimizers are numbered by their first operations, which all ranks do in the same order."""
    if id(owner) not in _numbers:
        _numbers[id(owner)] = next(_serials.setdefault("next", itertools.count()))
        weakref.finalize(owner, _numbers.pop, id(owner), None)
    return _numbers[id(owner)]


def reduce_gradients(
    options: GradientOptions, name: str, grads: Sequence[Sequence[NDArray]], priority: int = 0
) -> list[NDArray]:
    """The gradients of all ranks together, sent as one group.

    Args:
        grads: each by its parts on this rank's devices, which are added. The first part is overwritten when it is dense.
    """
    totals = [first if not others else _added(first, others) for first, *others in grads]
    if not options.process_set.included():
        return totals
    dense = []
    for place, total in enumerate(totals):
        if total.stype == "default":
            dense.append(place)
        elif options.sparse_as_dense:
            (reduced,) = reduce_gradients(options, f"{name}.{place}", [[total.tostype("default")]], priority)
            totals[place] = reduced.tostype(total.stype)
        else:
            totals[place] = _reduce_rows(options, f"{name}.{place}", total)
    if not dense:
        return totals
    before, after = options.scales
    packed = [options.compression.compress(totals[place]) for place in dense]
    sent = mpi_ops.grouped_allreduce_(
        [array for array, _ in packed], None, name, priority, before, after, options.process_set, options.op
    )
    for place, array, (_, context) in zip(dense, sent, packed):
        totals[place] = options.compression.decompress(array, context)
    return totals


def store(result: NDArray, targets: Sequence[NDArray]) -> None:
    """Writes a result into arrays on any devices."""
    for target in targets:
        if target is not result:
            result.copyto(target)


def _added(first: NDArray, others: Sequence[NDArray]) -> NDArray:
    return mx.nd.add_n(first, *[other.as_in_context(first.context) for other in others])


def _reduce_rows(options: GradientOptions, name: str, grad: NDArray) -> NDArray:
    """A row-sparse gradient of all ranks: equal rows are added, in rank order. Waits, since each rank has other rows."""
    if grad.stype != "row_sparse":
        raise TypeError(f"gradients of storage type {grad.stype!r} cannot be sent: only dense and row_sparse ones")
    if options.op not in (Average, Sum):
        raise ValueError("row_sparse gradients can be sent with op=Average and op=Sum only")
    indices, rows = ronde.grouped_allgather([grad.indices.asnumpy(), grad.data.asnumpy()], name, options.process_set)
    if len(indices) == 0:
        return grad
    unique, places = np.unique(indices, return_inverse=True)
    total = np.zeros((len(unique), *rows.shape[1:]), np.promote_types(rows.dtype, np.float32))
    np.add.at(total, places, rows)
    if options.op == Average:
        total /= options.process_set.size()
    return mx.nd.sparse.row_sparse_array(
        (total.astype(rows.dtype), unique), shape=grad.shape, ctx=grad.context, dtype=grad.dtype
    )
