"""DistributedTrainer: a gluon Trainer whose steps take the gradients of all ranks."""

import warnings
from typing import Any, Optional

import mxnet as mx
from ronde._gradient_options import GradientOptions
from ronde.basics import Average, Max
from ronde.common.util import split_list
from ronde.compression import Compressor
from ronde.mxnet import mpi_ops
from ronde.mxnet._engine import NDArray
from ronde.mxnet._gradients import number_of
from ronde.mxnet.compression import Compression
from ronde.mxnet.kvstore import KVStore
from ronde.mxnet.optimizer import is_distributed, undistributed
from ronde.process_sets import ProcessSet, global_process_set


class DistributedTrainer(mx.gluon.Trainer):
    """Averages gradients over ranks: step(batch_size) takes the size of this rank's batch.

    The first step gives all ranks the parameters of the first one, whether or not broadcast_parameters did so before.

    Args:
        params, optimizer, optimizer_params: as for gluon.Trainer.
        compression: how gradients travel: Compression.none, .fp16 or .bf16.
        gradient_predivide_factor: divides gradients before they are summed; the rest of the average comes after.
        prefix: not needed, several trainers are told apart; it appears in messages.
        num_groups: into how many groups to cut the gradients, that are sent together; 0: each by itself, as soon as it
            is there.
        process_set: the ranks that train together. On others the trainer works as if it were not distributed.
        sparse_as_dense: sends row_sparse gradients as dense ones.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Optional[dict[str, Any]] = None,
        compression: Optional[Compressor[NDArray]] = None,
        gradient_predivide_factor: float = 1.0,
        prefix: Optional[str] = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        sparse_as_dense: bool = False,
    ) -> None:
        if is_distributed(optimizer):
            warnings.warn("DistributedTrainer averages by itself: it takes the optimizer as it was", stacklevel=2)
            optimizer = undistributed(optimizer)
        options = GradientOptions(
            compression=compression or Compression.none,
            op=Average,
            predivide=gradient_predivide_factor,
            groups=num_groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if self._contains_sparse_weight:
            raise ValueError("row_sparse parameters cannot be trained on several ranks: only their gradients may be so")
        # Trainer sorts by name, and gluon's names depend on what else a rank has built; the order of the net does not.
        order = {id(param): place for place, param in enumerate(params.values() if _is_dict(params) else params)}
        places = [order[id(param)] for param in self._params]
        self._in_order = sorted(range(len(places)), key=places.__getitem__)
        self._options, self._prefix = options, prefix or ""
        self._store = KVStore(options, lambda key: f"{self._prefix}{places[key]}")

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """As Trainer's. With ignore_stale_grad, all ranks update a parameter of which one has a new gradient."""
        if ignore_stale_grad and self._options.process_set.included():
            self._share_freshness()
        super().step(batch_size, ignore_stale_grad)

    def _trained(self) -> list[int]:
        """The numbers of the parameters that have gradients, in the order of the net."""
        return [key for key in self._in_order if self._params[key].grad_req != "null"]

    def _share_freshness(self) -> None:
        """Zeros stand for the gradients that only others have. Waits for the other ranks, but for no computation."""
        params = [self._params[key] for key in self._trained()]
        fresh = [any(data._fresh_grad for data in param.list_data()) for param in params]
        name = f"trainer.{number_of(self._store)}.{self._prefix}fresh"
        anywhere = mpi_ops.allreduce(mx.nd.array(fresh), None, name, op=Max, process_set=self._options.process_set)
        for param, here, there in zip(params, fresh, anywhere.asnumpy()):
            if there and not here:
                param.zero_grad()
                for data in param.list_data():
                    data._fresh_grad = True

    def _init_kvstore(self) -> None:
        self._kvstore, self._update_on_kvstore = self._store, False
        self._distributed = self._kv_initialized = True

    def _allreduce_grads(self) -> None:
        keys, number = self._trained(), self._options.groups
        for group in split_list(keys, number or len(keys)) if keys else []:
            grads = [self._params[key].list_grad() for key in group]
            self._store.pushpull(group, grads, priority=-keys.index(group[0]))


def _is_dict(params: Any) -> bool:
    return isinstance(params, (dict, mx.gluon.ParameterDict))
