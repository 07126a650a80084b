"""Process sets: groups of ranks that run collectives among themselves."""

import warnings
from collections.abc import Sequence
from typing import Any, Optional, Union

from ronde import _core
from ronde._core import ArgumentError


class ProcessSet:
    """Ranks that run collectives among themselves: `allreduce(x, process_set=even)`.

    It can be used once it was given to init(process_sets=[...]) or add_process_set(), by all ranks of the job alike.

    Attributes:
        ranks: the members' ranks in the job, ascending. None: not known before init().
        process_set_id: number of the set, None while it cannot be used.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        """ranks_or_comm: ranks, or an mpi4py communicator whose processes are the members."""
        self.process_set_id: Optional[int] = None
        self._ranks: Optional[list[int]] = None
        self._comm: Any = None
        if hasattr(ranks_or_comm, "allgather"):
            self._comm = ranks_or_comm  # its ranks in the job are known after init()
        else:
            self._ranks = sorted(int(rank) for rank in ranks_or_comm)

    @property
    def ranks(self) -> Optional[list[int]]:
        if self._ranks is None and self._comm is not None and _core.is_initialized():
            self._ranks = sorted(self._comm.allgather(_core.topology()["rank"]))
        return self._ranks

    def size(self) -> int:
        """Number of members."""
        return len(self._members())

    def rank(self) -> int:
        """This process's number among the members; ValueError when it is none."""
        members, own = self._members(), _core.topology()["rank"]
        if own not in members:
            raise ArgumentError(f"rank {own} is not in {self}")
        return members.index(own)

    def included(self) -> bool:
        """Whether this process is a member."""
        return _core.topology()["rank"] in self._members()

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"

    def _members(self) -> list[int]:
        return _core.process_set_ranks(set_id(self))


class _GlobalProcessSet(ProcessSet):
    """All ranks of the job. Always there."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0

    @property
    def ranks(self) -> Optional[list[int]]:
        return list(range(_core.topology()["size"])) if _core.is_initialized() else None

    def _members(self) -> list[int]:
        return list(range(_core.topology()["size"]))

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _GlobalProcessSet()

# The sets that can be used, by id. Belongs to the process's engine: emptied by shutdown().
_live: dict[int, ProcessSet] = {0: global_process_set}


_memories: list[dict[Any, Any]] = []


def engine_memory(memory: Any = None) -> Any:
    """A dict (a new one, or that given) that is emptied when the engine ends, as it is on all ranks."""
    _memories.append({} if memory is None else memory)
    return _memories[-1]


def set_id(process_set: ProcessSet) -> int:
    """The number of a set that can be used, else ArgumentError."""
    if not isinstance(process_set, ProcessSet):
        raise ArgumentError(f"process_set={process_set!r}: give a ProcessSet, as add_process_set() returns it")
    if process_set.process_set_id is None:
        raise ArgumentError(f"{process_set} cannot be used: give it to add_process_set() or init(process_sets=[...])")
    return process_set.process_set_id


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Makes a set usable. Every rank of the job must call it with the same ranks, members or not.

    When there is a set of these ranks already, that one is returned, with a warning.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    size = _core.topology()["size"]
    ranks = added.ranks
    if not ranks or ranks[0] < 0 or ranks[-1] >= size or len(set(ranks)) != len(ranks):
        raise ArgumentError(f"process set {ranks}: needs one or more different ranks from 0 to {size - 1}")
    handle = _core.submit(_core.OPS["add_process_set"], None, (), ranks=ranks)
    handle.wait()
    number = handle.value()
    if handle.existed() and number in _live:
        warnings.warn(f"there is a process set of ranks {ranks} already: {_live[number]}", stacklevel=2)
        added.process_set_id = number
        return _live[number]
    added.process_set_id = number
    _live[number] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; what is pending on it fails. Every rank of the job must call it.

    False: it was not there (any more). The set of all ranks cannot be removed.
    """
    number = process_set.process_set_id
    if number is None:
        return False
    if number == 0:
        raise ArgumentError("the set of all ranks cannot be removed")
    handle = _core.submit(_core.OPS["remove_process_set"], None, (), ranks=(number,))
    handle.wait()
    _live.pop(number, process_set).process_set_id = None
    process_set.process_set_id = None
    return True


def process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The members of every set that can be used, by its number."""
    return {number: _core.process_set_ranks(number) for number in sorted(_live)}


def forget() -> None:
    """The engine ends: no set can be used until it is added again."""
    for number in [number for number in _live if number != 0]:
        _live.pop(number).process_set_id = None
    for memory in _memories:
        memory.clear()
