"""Values by which a benchmark sees that an allreduce summed the right things: different on every rank and index."""

from typing import Any

import numpy as np

EXACT = 997  # sums of float32 stay exact: below 2**24 for any number of ranks one host runs
EXACT_16_BIT = 31  # float16 and bfloat16: every sum of up to 8 ranks is an integer up to 256


class WrongSum(Exception):
    """An allreduce gave something else than the sum."""


def values(count: int, rank: int, period: int = EXACT) -> Any:
    """float32 [count]: what a rank puts in."""
    return (np.arange(count) % period + (1000 if period == EXACT else 1) * rank).astype(np.float32)


def check_sum(got: Any, ranks: int, who: str, period: int = EXACT) -> None:
    """Raises WrongSum unless `got`, float32 [count], is the sum of all ranks' values."""
    got = np.asarray(got).reshape(-1)
    index = np.arange(got.size) % period
    expected = index * ranks + (1000 if period == EXACT else 1) * (ranks * (ranks - 1) // 2)
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        at = int(wrong[0])
        raise WrongSum(f"{who}: {wrong.size} of {got.size} sums are wrong; [{at}] is {got[at]}, not {expected[at]}")
