"""The conformance suite on every frontend that is installed."""

from typing import Any

import conformance
import numpy as np
import pytest
from conformance import Face

DTYPES = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 bool complex64 complex128".split()


def numpy_face() -> Face:
    import ronde

    def read(array: np.ndarray) -> np.ndarray:
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)

    return Face(
        ronde,
        [name for name in DTYPES if name != "bfloat16"],
        lambda array, dtype: np.array(array, dtype),
        read,
        lambda array: array.dtype.name,
    )


def torch_face() -> Face:
    import torch

    import ronde.torch as hvd

    def make(array: np.ndarray, dtype: str) -> Any:
        return torch.from_numpy(np.array(array)).to(getattr(torch, dtype))

    def read(tensor: Any) -> np.ndarray:
        return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()

    names = [name for name in DTYPES if hasattr(torch, name)]
    return Face(hvd, names, make, read, lambda tensor: str(tensor.dtype).replace("torch.", ""))


FACES = {"numpy": numpy_face, "torch": torch_face}
SUITE = [
    conformance.allreduce,
    conformance.product_and_scales,
    conformance.grouped_allreduce,
    conformance.allgather,
    conformance.broadcast,
    conformance.alltoall,
    conformance.reducescatter,
    conformance.many_at_once,
    conformance.average_argument,
    conformance.wrong_calls,
]


@pytest.mark.parametrize("row", [function.__name__ for function in SUITE])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("frontend", FACES)
@pytest.mark.ranks()
def test_row(frontend: str, size: int, row: str) -> None:
    if frontend != "numpy":
        pytest.importorskip(frontend)
    getattr(conformance, row)(FACES[frontend]())


@pytest.mark.parametrize("frontend", FACES)
@pytest.mark.ranks(2)
def test_compression(frontend: str) -> None:
    conformance.compression(FACES[frontend](), ["none", "fp16", "bf16"] if frontend == "torch" else ["none", "fp16"])
