"""Allreduce of sparse COO tensors.

Equal rows are merged before anything is sent. Indices and values are gathered; or, where the operation of this name
before had so many rows that a dense tensor is smaller, the values are sent as that. All ranks know how many there were, so
all choose alike, and nothing has to be started later, when only some of them look.
"""

from typing import Any, Optional

import torch
from ronde._api import Api
from ronde._collectives import Handle
from ronde._core import ArgumentError, RondeError
from ronde.basics import Average, Sum
from ronde.process_sets import ProcessSet, engine_memory, set_id

Tensor = torch.Tensor

# Of the operation before, by process set and name: its indices, elements of a row, elements of a dense tensor.
_before: "dict[tuple[int, str], tuple[Handle[Tensor], int, int]]" = engine_memory()


class SparseAllreduce:
    """A handle, for poll() and synchronize(): the result is a coalesced sparse tensor, equal on all ranks."""

    def __init__(self, api: Api[Tensor], tensor: Tensor, name: Optional[str], op: int, process_set: ProcessSet) -> None:
        if op not in (Average, Sum):
            raise ArgumentError("a sparse allreduce takes op=Average and op=Sum only")
        if tensor.layout != torch.sparse_coo:
            raise TypeError(f"a sparse allreduce needs a tensor of layout torch.sparse_coo, not {tensor.layout}")
        mine = tensor.detach().coalesce()
        self._shape, width = mine.shape, mine.values().shape[1:].numel()
        self._average_of = process_set.size() if op == Average else 1
        key = (set_id(process_set), name or "")
        before = _before.get(key) if name else None
        # Under the plain name, so that a rank with a dense tensor of this name gets an error instead of a stall.
        self._indices = api.allgather_async(mine.indices().t().contiguous(), name, process_set)
        self._is_dense = before is not None and _was_dense(*before)
        self._values: Handle[Tensor]
        if self._is_dense:
            dense = mine.to_dense()
            self._values = api.allreduce_async(dense, None, name and f"{name}.dense", op, process_set=process_set)
        else:
            self._values = api.allgather_async(mine.values(), name and f"{name}.values", process_set)
        if name:
            _before[key] = self._indices, width, mine.numel()
        self._result: Optional[Tensor] = None

    def poll(self) -> bool:
        """Whether wait() will not wait."""
        return self._indices.poll() and self._values.poll()

    def wait(self) -> Tensor:
        """The result."""
        if self._result is None:
            indices = self._indices.wait().t()
            values: Any = self._values.wait()
            shape = self._shape
            if self._is_dense:
                ones = torch.ones(indices.shape[1], dtype=torch.bool, device=indices.device)
                merged = torch.sparse_coo_tensor(indices, ones, shape[: len(indices)], check_invariants=False)
                places = merged.coalesce().indices()
                picked = values[tuple(places)]
                total = torch.sparse_coo_tensor(places, picked, shape, check_invariants=False, is_coalesced=True)
            else:
                if self._average_of > 1:
                    values = values / self._average_of
                total = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()
            self._result = total
        return self._result


def _was_dense(indices: Handle[Tensor], width: int, elements: int) -> bool:
    """Whether a dense tensor would have been the smaller one to send, of an operation that has ended."""
    try:
        rows = indices.wait().shape[0]
    except RondeError:
        return False
    return rows * width >= 2 * elements  # a dense allreduce sends each element twice
