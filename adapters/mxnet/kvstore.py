"""MXNet's own interface of distributed training: the store `dist_ronde`."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Optional

import mxnet as mx
from mxnet.module import module
from ronde._gradient_options import GradientOptions
from ronde.basics import Sum, init, rank, size
from ronde.mxnet import mpi_ops
from ronde.mxnet._engine import NDArray
from ronde.mxnet._gradients import number_of, reduce_gradients, store
from ronde.mxnet.compression import Compression
from ronde.process_sets import global_process_set

_NAME = "dist_ronde"


class KVStore(mx.kvstore.KVStoreBase):
    """A store without servers: mx.kv.create("dist_ronde"), or kvstore="dist_ronde" wherever MXNet takes a store.

    As with every store of MXNet, what is pushed is summed, over this rank's devices and over all ranks. So what a
    gluon.Trainer is told in step() is the number of samples of all ranks: batch_size * kv.num_workers. Module does that
    by itself. Keys that are pushed together, as a list, travel together.

    Operations go through MXNet's engine: nobody waits but who reads the results. All ranks must do them in the same
    order on each key, and make and use several stores in the same order.

    Calls ronde.init() where the script has not.
    """

    def __init__(self, options: Optional[GradientOptions] = None, name_of: Callable[[Any], str] = str) -> None:
        """How values are reduced, and a key's name on all ranks: for ronde's own trainer."""
        init()
        self._options = options or GradientOptions(
            compression=Compression.none, op=Sum, predivide=1.0, groups=None, sparse_as_dense=False,
            process_set=global_process_set,
        )  # fmt: skip
        self._name_of = name_of
        self._keeps = options is None  # a trainer of ronde's pulls nothing
        self._values: dict[Any, NDArray] = {}  # for pull()

    # ---- what trainers call ----

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Rank 0's value (of a process set: that of its first rank) on all ranks, in `out` and for pull()."""
        for each, (first, *_), targets in zip(*_lists(key, value, out)):
            process_set = self._options.process_set
            if process_set.included():
                root = (process_set.ranks or [0])[0]
                first = mpi_ops.broadcast(first, root, self._name("broadcast", each), priority, process_set)
            if self._keeps:
                self._values[each] = first.copy()
            store(first, targets)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """The sum of all ranks' values, in `out` or in the values themselves."""
        keys, values, targets = _lists(key, value, value if out is None else out)
        values = values if out is None else _copies(values)
        for result, each in zip(self._reduce(keys, values, priority), targets):
            store(result, each)

    @property
    def type(self) -> str:
        """Module divides by the samples of all ranks where the type says `dist` and `_sync`."""
        return f"{_NAME}_sync"

    @property
    def rank(self) -> int:
        return rank()

    @property
    def num_workers(self) -> int:
        return size()

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Trainers ask for "optimizer": no, they shall update the weights, on every rank alike."""
        if capability.lower() != mx.kvstore.KVStoreBase.OPTIMIZER:
            raise ValueError(f"unknown capability: {capability}")
        return False

    # ---- what other code calls ----

    def init(self, key: Any, value: Any) -> None:
        """Gives keys their values, those of rank 0."""
        keys, values, _ = _lists(key, value, value)
        self.broadcast(keys, values, [[] for _ in keys])

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Replaces the keys' values by the sums of all ranks' values. Those given stay as they are."""
        keys, values, _ = _lists(key, value, value)
        self._values.update(zip(keys, self._reduce(keys, _copies(values), priority)))

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copies the keys' values into `out`."""
        if out is None:
            raise ValueError("pull() needs out=: arrays to write the values into")
        for each, _, targets in zip(*_lists(key, out, out)):
            if each not in self._values:
                raise KeyError(f"{_NAME} has no value of the key {each!r}: init(), broadcast() or push() it first")
            store(self._values[each], targets)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        mpi_ops.barrier(self._options.process_set)

    _barrier = barrier

    def join(self) -> int:
        """See ronde.mxnet.join: this rank has no more data."""
        return mpi_ops.join()

    def set_gradient_compression(self, compression_params: Any) -> NoReturn:
        raise ValueError(
            f"{_NAME} has no gradient compression of MXNet's kind (compression_params={compression_params!r}): "
            "use ronde.mxnet.DistributedTrainer(..., compression=Compression.fp16)"
        )

    def set_optimizer(self, optimizer: Any) -> NoReturn:
        raise ValueError(f"{_NAME} runs no optimizer: use update_on_kvstore=False")

    def row_sparse_pull(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"{_NAME} keeps no row_sparse weights: use dense weights (gradients may be row_sparse)")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> NoReturn:
        self.set_optimizer(None)

    def load_optimizer_states(self, fname: str) -> NoReturn:
        self.set_optimizer(None)

    # ---- ----

    def _reduce(self, keys: Sequence[Any], values: Sequence[Sequence[NDArray]], priority: int) -> list[NDArray]:
        return reduce_gradients(self._options, self._name("sum", *keys), values, priority)

    def _name(self, what: str, *keys: Any) -> str:
        names = [self._name_of(key) for key in keys]
        return f"kvstore.{number_of(self)}.{what}.{names[0]}" + (f"..{names[-1]}" if len(names) > 1 else "")


def _lists(key: Any, value: Any, out: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Keys, the arrays of each on this rank's devices, and those to write. MXNet takes one or a list of all."""
    if not isinstance(key, (list, tuple)):
        key, value, out = [key], [value], [out]
    if not len(key) == len(value) == len(out):
        raise ValueError(f"{len(key)} keys, but values for {len(value)} and {len(out)}")

    def arrays(given: Any) -> list[NDArray]:
        return [given] if isinstance(given, NDArray) else list(given)

    return list(key), [arrays(each) for each in value], [arrays(each) for each in out]


def _copies(values: list[list[NDArray]]) -> list[list[NDArray]]:
    """A reduction writes into the first array of each value."""
    return [[first.copy(), *others] for first, *others in values]


mx.kvstore.KVStoreBase.kv_registry[_NAME] = KVStore

_initialize = module._initialize_kvstore


def _initialize_kvstore(kvstore: Any, update_on_kvstore: bool, **arguments: Any) -> None:
    """Module only gives a store its weights when that runs no optimizer, and would start with other ones on each rank.

    It shall take over the store's, as it does when the store runs the optimizer.
    """
    _initialize(kvstore=kvstore, update_on_kvstore=update_on_kvstore or isinstance(kvstore, KVStore), **arguments)


module._initialize_kvstore = _initialize_kvstore
