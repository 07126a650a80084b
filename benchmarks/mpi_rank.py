"""A rank of the bare MPI_Allreduce through mpi4py: started by the benchmarks with an MPI's own mpirun."""

from typing import Any

import turns
from checks import check_sum, values
from mpi4py import MPI

_world = MPI.COMM_WORLD
_call: Any = None


def prepare(case: dict[str, Any]) -> dict[str, Any]:
    """Makes and checks what the next blocks call."""
    global _call
    _call = None
    if case["kind"] != "tensor":
        return {"peers": [], "missing": {}}
    count = case["bytes"] // 4
    tensor = values(count, _world.rank)
    _world.Allreduce(MPI.IN_PLACE, tensor)
    check_sum(tensor, _world.size, "MPI_Allreduce")
    tensor[:] = 0  # stays finite however often it is summed

    def call() -> None:
        _world.Allreduce(MPI.IN_PLACE, tensor)

    _call = call
    return {"peers": ["mpi"], "missing": {}}


def block(peer: str, calls: int) -> list[float]:
    assert peer == "mpi"
    return turns.time_block(_call, _world.Barrier, calls)


if __name__ == "__main__":
    turns.serve(_world.rank, {"prepare": prepare, "block": block})
