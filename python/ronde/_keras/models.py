"""Reads and writes the state of models, by way of NumPy: for Keras 3 on each of its backends, and Keras 2."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import numpy as np

from ronde import _numpy, _objects
from ronde._core import ArgumentError
from ronde.basics import Min
from ronde.process_sets import ProcessSet

Variable = Any
Model = Any


def settle(model: Model) -> None:
    """After it, the model's variables are its state: Keras on JAX keeps that elsewhere during fit."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def optimizer_variables(optimizer: Any) -> list[Variable]:
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)  # a method in early releases


def build(optimizer: Any, variables: Sequence[Variable]) -> None:
    """The optimizer makes its variables, if it has not made them yet."""
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", False):
            optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):  # Keras 2, legacy
        optimizer._create_all_weights(variables)


def value(variable: Variable) -> Any:
    """As a NumPy array."""
    return np.asarray(variable.numpy() if hasattr(variable, "numpy") else variable)


def name_of(variable: Variable) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def without(variables: Iterable[Variable], left_out: Iterable[Variable]) -> list[Variable]:
    """Compares by identity; `==` compares values."""
    out = {id(variable) for variable in left_out}
    return [variable for variable in variables if id(variable) not in out]


def broadcast(variables: Sequence[Variable], root_rank: int, name: str, process_set: ProcessSet) -> None:
    """Gives every rank the root's values of variables: the same number, in the same order, on all ranks.

    Raises:
        ArgumentError: on all ranks, if their variables have other shapes or dtypes.
    """
    values = [value(variable) for variable in variables]
    _check_alike(
        [(name_of(each), array.shape, str(array.dtype)) for each, array in zip(variables, values)], process_set
    )
    handles = [
        _numpy.broadcast_async(array, root_rank, f"{name}.{number}", process_set) for number, array in enumerate(values)
    ]
    for variable, handle in zip(variables, handles):
        variable.assign(handle.wait())


def first_difference(variables: Sequence[Variable], name: str, process_set: ProcessSet) -> Optional[Variable]:
    """The first variable whose value is not the same on all ranks, bit by bit. One small allreduce.

    Raises:
        ArgumentError: on all ranks, if they have other numbers of variables.
    """
    hashes = [zlib.crc32(np.ascontiguousarray(value(variable)).tobytes()) for variable in variables]
    numbers = np.array([len(hashes), *hashes], np.int64)
    padded = np.zeros(2 * max(1, len(numbers)), np.int64)
    padded[: len(numbers)], padded[len(numbers) :] = numbers, -numbers
    lowest = _numpy.allreduce(padded, name=name, op=Min, process_set=process_set)
    differs = np.flatnonzero(lowest[: len(numbers)] != -lowest[len(numbers) :])
    return variables[int(differs[0]) - 1] if len(differs) else None


def _check_alike(own: list[tuple[str, tuple[int, ...], str]], process_set: ProcessSet) -> None:
    everywhere = _objects.allgather_object(own, None, process_set)
    ranks = process_set.ranks
    assert ranks is not None
    for rank, other in zip(ranks, everywhere):
        for number in range(max(len(other), len(everywhere[0]))):
            here, there = [each[number] if number < len(each) else None for each in (everywhere[0], other)]
            if here is None or there is None or here[1:] != there[1:]:
                raise ArgumentError(
                    f"ranks have different models: variable {number} is {_text(here)} on rank {ranks[0]} and "
                    f"{_text(there)} on rank {rank}"
                )


def _text(variable: Optional[tuple[str, tuple[int, ...], str]]) -> str:
    return "missing" if variable is None else f"'{variable[0]}', {list(variable[1])} of {variable[2]},"
