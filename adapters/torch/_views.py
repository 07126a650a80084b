"""Gradients that live in memory which the other ranks of the host reach: see `gradient_as_bucket_view`."""

from collections.abc import Iterable

import torch
from ronde.torch import mpi_ops

_CACHE_LINE = 64  # bytes


def shared_views(params: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter that is trained on the CPU, memory for a gradient that the other ranks of this host reach.

    One piece of memory per dtype, in the order in which a backward pass reaches the parameters, so that gradients that
    travel together are neighbours."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in reversed(list(params)):
        if param.requires_grad and param.is_cpu and param.layout == torch.strided and param.is_contiguous():
            by_dtype.setdefault(param.dtype, []).append(param)
    views = {}
    for dtype, members in by_dtype.items():
        align = max(1, _CACHE_LINE // dtype.itemsize)
        sizes = [-(-param.numel() // align) * align for param in members]
        memory = mpi_ops.empty_shared(sum(sizes), dtype=dtype)
        for param, part in zip(members, memory.split(sizes)):
            views[param] = part[: param.numel()].view(param.shape)
    return views


def move(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Has the gradient live in its view. It does not when somebody has set it to None since, as zero_grad() does.

    False: the view does not fit, as the parameter has another dtype, shape or layout by now."""
    grad = param.grad
    if grad is view or grad is None or grad.is_sparse:
        return True
    if (grad.dtype, grad.shape, grad.stride(), grad.device) != (view.dtype, view.shape, view.stride(), view.device):
        return False
    # A gradient that somebody put into another one's view stays: what is there would be overwritten.
    if grad.untyped_storage().data_ptr() != view.untyped_storage().data_ptr():
        with torch.no_grad():
            param.grad = view.copy_(grad)
    return True
