"""Small helpers that scripts import."""

from ronde.common.util import is_iterable, num_rank_is_power_2, split_list
from ronde.tensorflow._run import translated

__all__ = ["is_iterable", "num_rank_is_power_2", "split_list", "translated"]
