"""Small helpers that scripts import."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def split_list(items: Sequence[Item], num_parts: int) -> list[list[Item]]:
    """Cuts a list into at most `num_parts` parts of equal length, the first ones one item longer."""
    num_parts = max(1, min(num_parts, len(items)))
    short, longer = divmod(len(items), num_parts)
    parts, start = [], 0
    for part in range(num_parts):
        end = start + short + (part < longer)
        parts.append(list(items[start:end]))
        start = end
    return parts


def is_iterable(value: Any) -> bool:
    """Whether one can loop over the value."""
    return isinstance(value, Iterable)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether the number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
