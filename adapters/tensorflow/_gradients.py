"""The gradients of the ops. They are ops in turn, so all ranks must ask for them."""

from typing import Any, Optional

import tensorflow as tf
from ronde import _core
from ronde._core import ArgumentError
from ronde.basics import Average, Sum
from ronde.tensorflow._run import run

Tensor = Any


@tf.RegisterGradient("RondeAllreduce")
def _allreduce(op: Any, *grads: Tensor) -> list[Optional[Tensor]]:
    _check_linear(op, "allreduce")
    return _Differentiable(op, grads).apply("allreduce", reduction=op.get_attr("reduction"), **_scales(op))


@tf.RegisterGradient("RondeBroadcast")
def _broadcast(op: Any, *grads: Tensor) -> list[Optional[Tensor]]:
    sums = _Differentiable(op, grads).apply("allreduce", reduction=Sum)
    if _core.topology()["rank"] == op.get_attr("root_rank"):
        return sums
    # Of a TF 1 graph only what a fetched value depends on runs; the root waits for this rank's part of the sum.
    with tf.control_dependencies([each for each in sums if each is not None]):
        return [each if each is None else tf.zeros_like(each) for each in sums]


@tf.RegisterGradient("RondeAllgather")
def _allgather(op: Any, *grads: Tensor) -> list[Optional[Tensor]]:
    floats = _Differentiable(op, grads)
    sums = floats.apply("allreduce", reduction=Sum)
    rows = tf.stack([tf.shape(each, out_type=tf.int64)[0] for each in op.inputs])
    # Beside the rows of each tensor the rank: those that have joined give none.
    own = tf.constant(_core.topology()["rank"], tf.int64)
    entry = tf.concat([own[None], rows], 0)[None]
    (table,) = run("allgather", [entry], floats.name and f"{floats.name}.rows", floats.process_set)
    starts = tf.reduce_sum(tf.boolean_mask(table[:, 1:], table[:, 0] < own), axis=0)
    return [
        each if each is None else each[starts[number] : starts[number] + rows[number]]
        for number, each in enumerate(sums)
    ]


@tf.RegisterGradient("RondeReducescatter")
def _reducescatter(op: Any, *grads: Tensor) -> list[Optional[Tensor]]:
    _check_linear(op, "reducescatter")
    floats = _Differentiable(op, grads)
    scales = _scales(op)
    factor = scales["prescale"] * scales["postscale"]
    if op.get_attr("reduction") == Average:
        factor /= len(_core.process_set_ranks(floats.process_set))
    return [each if each is None else each * factor for each in floats.apply("allgather")]


@tf.RegisterGradient("RondeAlltoall")
def _alltoall(op: Any, *grads: Tensor) -> list[Optional[Tensor]]:
    received = op.outputs[-1]
    return [*_Differentiable(op, grads[:-1]).apply("alltoall", splits=received), None]


tf.no_gradient("RondeBarrier")
tf.no_gradient("RondeJoin")
tf.no_gradient("RondeTopology")


class _Differentiable:
    """The gradients of those results of an op that can have one; whole numbers have none."""

    def __init__(self, op: Any, grads: tuple[Tensor, ...]) -> None:
        self._grads = [
            tf.convert_to_tensor(grad) if grad is not None and _is_float(grad.dtype) else None for grad in grads
        ]
        name = op.get_attr("tensor_name")
        name = name.decode() if isinstance(name, bytes) else name
        self.name = f"{name}.gradient" if name else None
        self.process_set = op.get_attr("process_set")

    def apply(self, kind: str, **options: Any) -> list[Optional[Tensor]]:
        """The results of an operation on them, in their places."""
        sent = [grad for grad in self._grads if grad is not None]
        results = iter(run(kind, sent, self.name, self.process_set, **options) if sent else ())
        return [grad if grad is None else next(results) for grad in self._grads]


def _is_float(dtype: Any) -> bool:
    return dtype.is_floating or dtype.is_complex


def _scales(op: Any) -> dict[str, float]:
    return {name: float(op.get_attr(name)) for name in ("prescale", "postscale")}


def _check_linear(op: Any, kind: str) -> None:
    if op.get_attr("reduction") not in (Average, Sum):
        raise ArgumentError(f"{kind} has a gradient with op=Average and op=Sum only")
