"""The conformance suite on every frontend that is installed."""

from importlib.util import find_spec
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


def tensorflow_face() -> Face:
    import tensorflow as tf

    import ronde.tensorflow as hvd

    def make(array: np.ndarray, dtype: str) -> Any:
        return tf.cast(tf.constant(np.array(array)), dtype)

    def read(tensor: Any) -> np.ndarray:
        return tf.cast(tensor, tf.complex128 if tensor.dtype.is_complex else tf.float64).numpy()

    return Face(hvd, DTYPES, make, read, lambda tensor: tensor.dtype.name, has_handles=False, in_place=False)


def mxnet_face() -> Face:
    import mxnet as mx

    import ronde.mxnet as hvd

    bfloat16 = np.dtype([("bfloat16", np.uint16)])

    def cast(array: Any, dtype: Any) -> Any:  # MXNet has none of scalars and of nothing
        if array.size == 0:
            return mx.nd.empty(array.shape, dtype=dtype)
        return mx.nd.amp_cast(array.reshape((array.size,)), dtype=dtype).reshape(array.shape)

    def make(array: np.ndarray, dtype: str) -> Any:
        wide = mx.nd.array(array, dtype="float64")
        return cast(wide.astype("float32"), bfloat16) if dtype == "bfloat16" else wide.astype(dtype)

    def read(array: Any) -> np.ndarray:
        return (cast(array, "float32") if array.dtype == bfloat16 else array).asnumpy().astype(np.float64)

    def dtype_of(array: Any) -> str:
        return "bfloat16" if array.dtype == bfloat16 else np.dtype(array.dtype).name

    names = "uint8 int8 int32 int64 float16 bfloat16 float32 float64 bool".split()
    # With NumPy's shapes, since MXNet's own have no scalars and no empty arrays.
    return Face(hvd, names, make, read, dtype_of, has_handles=False, scope=lambda: mx.util.np_shape(True))


class InFunctions:
    """A module whose collectives run inside tf.function."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        import tensorflow as tf

        found = getattr(self._module, name)
        if isinstance(found, int) or name in ("rank", "size", "Compression"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            return tf.function(lambda: found(*args, **kwargs))()

        return call


def tensorflow_function_face() -> Face:
    face = tensorflow_face()
    face.dtypes = ["int32", "bfloat16", "float64", "bool", "complex64"]  # each call is traced, which takes time
    face.module = InFunctions(face.module)  # type: ignore[assignment]
    return face


FACES = {
    "numpy": numpy_face,
    "torch": torch_face,
    "tensorflow": tensorflow_face,
    "tensorflow-function": tensorflow_function_face,
}
if find_spec("mxnet"):  # in an environment of its own, see requirements/mxnet.txt
    FACES["mxnet"] = mxnet_face
SUITE = [
    conformance.allreduce,
    conformance.product_and_scales,
    conformance.adasum,
    conformance.grouped_allreduce,
    conformance.allgather,
    conformance.broadcast,
    conformance.alltoall,
    conformance.reducescatter,
    conformance.many_at_once,
    conformance.average_argument,
    conformance.wrong_calls,
]


# Errors and warnings are the eager calls' business.
IN_FUNCTIONS = {
    "allreduce",
    "product_and_scales",
    "adasum",
    "grouped_allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
}


def rows() -> list[Any]:
    """Frontend, number of ranks, function of the suite."""
    found = [(frontend, size, function.__name__) for frontend in FACES for size in (1, 2, 3) for function in SUITE]
    return [
        (frontend, size, row)
        for frontend, size, row in found
        if frontend != "tensorflow-function" or (size == 2 and row in IN_FUNCTIONS)
    ]


@pytest.mark.parametrize(("frontend", "size", "row"), rows())
@pytest.mark.ranks()
def test_row(frontend: str, size: int, row: str) -> None:
    if frontend != "numpy":
        pytest.importorskip(frontend.split("-")[0])
    face = FACES[frontend]()
    with face.scope():
        getattr(conformance, row)(face)


@pytest.mark.parametrize("frontend", FACES)
@pytest.mark.ranks(2)
def test_compression(frontend: str) -> None:
    if frontend != "numpy":
        pytest.importorskip(frontend.split("-")[0])
    face = FACES[frontend]()
    with face.scope():
        conformance.compression(face, ["none", "fp16"] if frontend == "numpy" else ["none", "fp16", "bf16"])
