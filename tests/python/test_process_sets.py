"""Process sets."""

import numpy as np
import pytest

import ronde


@pytest.mark.ranks(3)
def test_add_use_remove() -> None:
    rank = ronde.rank()
    ends = ronde.add_process_set([2, 0])
    assert (ends.ranks, ends.size(), ends.included()) == ([0, 2], 2, rank != 1)
    assert ends.process_set_id and ends.process_set_id > 0
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            ends.rank()
        with pytest.raises(ValueError, match="rank 1 is not in process set"):
            ronde.allreduce(np.ones(3), process_set=ends)
    else:
        assert ends.rank() == (0 if rank == 0 else 1)
        assert ronde.allreduce(np.array([1.0 + rank]), process_set=ends) == [2]  # the mean over the set
        assert ronde.broadcast(np.array([rank]), root_rank=2, process_set=ends) == [2]  # a rank of the job
        assert ronde.allgather(np.array([rank]), process_set=ends).tolist() == [0, 2]
        assert ronde.alltoall(np.array([rank, rank + 10]), process_set=ends).tolist() == (
            [0, 2] if rank == 0 else [10, 12]
        )
        assert ronde.reducescatter(np.array([1, 2, 3]), op=ronde.Sum, process_set=ends).tolist() == (
            [2, 4] if rank == 0 else [6]
        )
        assert ronde.allgather_object(rank, process_set=ends) == [0, 2]
        ronde.barrier(process_set=ends)
        with pytest.raises(ValueError, match="root rank 1"):
            ronde.broadcast(np.ones(1), root_rank=1, process_set=ends)
    assert ronde.allreduce(np.array([rank]), op=ronde.Sum) == [3]
    assert ronde.remove_process_set(ends)
    assert not ronde.remove_process_set(ends)
    with pytest.raises(ValueError, match="add_process_set"):
        ronde.allreduce(np.ones(3), process_set=ends)
    with pytest.raises(ValueError, match="cannot be removed"):
        ronde.remove_process_set(ronde.global_process_set)
    again = ronde.add_process_set([0, 2])
    assert again.process_set_id != ends.process_set_id


@pytest.mark.ranks(2)
def test_existing_set() -> None:
    first = ronde.add_process_set([1])
    with pytest.warns(UserWarning, match=r"ranks \[1\]"):
        assert ronde.add_process_set(ronde.ProcessSet([1])) is first
    with pytest.warns(UserWarning, match=r"ranks \[0, 1\]"):
        assert ronde.add_process_set([0, 1]) is ronde.global_process_set
    for wrong in ([], [0, 0], [0, 2], [-1]):
        with pytest.raises(ValueError, match="different ranks from 0 to 1"):
            ronde.add_process_set(wrong)
    assert ronde.global_process_set.ranks == [0, 1]
    assert ronde.global_process_set.rank() == ronde.rank()


@pytest.mark.ranks(2)
def test_ranks_that_disagree() -> None:
    with pytest.raises(ronde.MismatchError, match=r"\[0\] on rank 0; \[1\] on rank 1"):
        ronde.add_process_set([ronde.rank()])
    assert ronde.allreduce(np.array([1]), op=ronde.Sum) == [2]


@pytest.mark.ranks(3, init=False)
def test_static_sets() -> None:
    sets = [ronde.ProcessSet([0, 1]), ronde.ProcessSet([2])]
    for _ in range(2):
        ronde.init(process_sets=sets)
        own = sets[ronde.rank() // 2]
        assert ronde.allreduce(np.array([ronde.rank()]), op=ronde.Sum, process_set=own) == ([1, 1, 2][ronde.rank()])
        ronde.shutdown()
        assert own.process_set_id is None
    ronde.init(process_sets="dynamic")
    ronde.shutdown()
    with pytest.raises(ValueError, match="sometimes"):
        ronde.init(process_sets="sometimes")
    assert not ronde.is_initialized()


@pytest.mark.ranks(4)
def test_sets_in_parallel() -> None:
    """The same name in two sets at once, with different numbers of operations in each."""
    rank = ronde.rank()
    even, odd = ronde.add_process_set([0, 2]), ronde.add_process_set([1, 3])
    own, others = (even, [0, 2]) if rank % 2 == 0 else (odd, [1, 3])
    for step in range(30 if rank % 2 == 0 else 50):
        data = np.arange(1000.0) + 1000 * rank + step
        result = ronde.allreduce(data, op=ronde.Sum, name="x", process_set=own)
        np.testing.assert_array_equal(result, sum(np.arange(1000.0) + 1000 * r + step for r in others))
    assert ronde.allreduce(np.array([rank]), op=ronde.Sum, name="x") == [6]


@pytest.mark.ranks(3)
def test_unnamed_operations_count_per_set() -> None:
    pair = ronde.add_process_set([0, 1])
    if pair.included():
        assert ronde.allreduce(np.array([5]), op=ronde.Sum, process_set=pair) == [10]
    assert ronde.allreduce(np.array([1]), op=ronde.Sum) == [3]


@pytest.mark.ranks(3)
def test_removal_fails_what_pends() -> None:
    pair = ronde.add_process_set([0, 1])
    handle = ronde.allreduce_async(np.ones(3), name="half", process_set=pair) if ronde.rank() == 0 else None
    assert ronde.remove_process_set(pair)
    if handle is not None:
        with pytest.raises(ronde.RondeError, match="removed"):
            ronde.synchronize(handle)
    assert ronde.allreduce(np.array([1]), op=ronde.Sum) == [3]
