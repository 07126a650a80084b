"""Batch normalization over the batches of all ranks.

One collective each way. Forward: every rank's mean and sum of squared deviations, combined pairwise as in T. F. Chan,
G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), which
does not cancel as a sum of squares does. Backward: the sums of the gradient, and of the gradient times the normalized
input.
"""

from typing import Any, Optional

import torch
from ronde.basics import Sum
from ronde.process_sets import ProcessSet, global_process_set
from ronde.torch import mpi_ops
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

Tensor = torch.Tensor


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d with the statistics of all ranks' batches, which may differ in size.

    Input: (batch, channels, ...). In evaluation mode, and with no running statistics to update in training mode, it
    does what torch's layers do.

    Args:
        process_set: the ranks whose batches count together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: Optional[float] = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input of 2 dimensions or more, not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.process_set)
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                factor: Any = self.momentum
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
                    if factor is None:  # a plain average over all batches
                        factor = 1 / float(self.num_batches_tracked)
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor or 0.0)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor or 0.0)
        return output


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        exact = torch.promote_types(input.dtype, torch.float32)  # 16-bit inputs are summed in float32
        values = input.to(exact)
        count = values.new_tensor([input.numel() // max(input.shape[1], 1)])
        mean = values.sum(dims) / count.clamp(min=1)
        squares = (values - _spread(mean, input)).square().sum(dims)
        parts = mpi_ops.allgather(torch.cat([mean, squares, count])[None], process_set=process_set)
        means, all_squares, counts = parts.split([len(mean), len(mean), 1], 1)
        total = counts.sum(0)
        if float(total) == 0:
            raise ValueError("SyncBatchNorm got an empty batch on every rank")
        mean = (means * counts).sum(0) / total
        variance = (all_squares + counts * (means - mean).square()).sum(0) / total
        scale = (variance + eps).rsqrt()
        normalized = (values - _spread(mean, input)) * _spread(scale, input)
        ctx.save_for_backward(normalized, weight, scale, total)
        ctx.process_set, ctx.dims, ctx.bias_dtype = process_set, dims, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        output = normalized
        if weight is not None:
            output = output * _spread(weight, input)
        if bias is not None:
            output = output + _spread(bias, input)
        return output.to(input.dtype, copy=True), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Optional[Tensor], ...]:
        normalized, weight, scale, total = ctx.saved_tensors
        grad = grad_output.to(normalized.dtype)
        sums = torch.stack([grad.sum(ctx.dims), (grad * normalized).sum(ctx.dims)])
        grad_weight = sums[1].to(weight.dtype) if weight is not None else None
        grad_bias = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        grad_input = None
        if ctx.needs_input_grad[0]:
            total_sums = mpi_ops.allreduce(sums, op=Sum, process_set=ctx.process_set) / total
            factor = scale if weight is None else scale * weight
            grad_input = grad - _spread(total_sums[0], grad) - normalized * _spread(total_sums[1], grad)
            grad_input = (grad_input * _spread(factor, grad)).to(grad_output.dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    """One value per channel, shaped to combine with an input."""
    return channels.view([1, -1] + [1] * (like.dim() - 2))
