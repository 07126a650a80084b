"""Allreduce of sparse COO tensors.

Equal rows are merged before anything is sent. The indices of all ranks are gathered first, at once; when their number
is known, the values follow by whichever way sends less: gathered beside their indices, or as a dense tensor.
"""

from typing import Optional

import torch
from ronde._api import Api
from ronde._core import ArgumentError
from ronde.basics import Average, Sum
from ronde.process_sets import ProcessSet

Tensor = torch.Tensor


class SparseAllreduce:
    """A handle, for poll() and synchronize(): the result is a coalesced sparse tensor, equal on all ranks."""

    def __init__(self, api: Api[Tensor], tensor: Tensor, name: Optional[str], op: int, process_set: ProcessSet) -> None:
        if op not in (Average, Sum):
            raise ArgumentError("a sparse allreduce takes op=Average and op=Sum only")
        if tensor.layout != torch.sparse_coo:
            raise TypeError(f"a sparse allreduce needs a tensor of layout torch.sparse_coo, not {tensor.layout}")
        self._api, self._name, self._op, self._process_set = api, name, op, process_set
        self._tensor = tensor.detach().coalesce()
        # Under the plain name, so that a rank with a dense tensor of this name gets an error instead of a stall.
        self._indices = api.allgather_async(self._tensor.indices().t().contiguous(), name, process_set)
        self._result: Optional[Tensor] = None

    def poll(self) -> bool:
        """Whether the indices are there; the values are sent by wait()."""
        return self._result is not None or self._indices.poll()

    def wait(self) -> Tensor:
        """The result."""
        if self._result is None:
            indices = self._indices.wait().t()
            name = self._name and f"{self._name}.values"
            mine, shape = self._tensor, self._tensor.shape
            row = mine.values().shape[1:].numel()
            if indices.shape[1] * row < 2 * shape.numel():  # a dense allreduce sends each element twice
                values = self._api.allgather(mine.values(), name, self._process_set)
                if self._op == Average:
                    values = values / self._process_set.size()
                total = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()
            else:
                dense = self._api.allreduce(mine.to_dense(), None, name, None, self._op, process_set=self._process_set)
                ones = torch.ones(indices.shape[1], dtype=torch.bool, device=indices.device)
                merged = torch.sparse_coo_tensor(
                    indices, ones, shape[: len(indices)], check_invariants=False
                ).coalesce()
                places = merged.indices()
                values = dense[tuple(places)]
                total = torch.sparse_coo_tensor(places, values, shape, check_invariants=False, is_coalesced=True)
            self._result = total
        return self._result
