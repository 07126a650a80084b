"""Keras in float64, where sums over ranks and over one joined batch differ by rounding of 1e-16 only."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """For layers the global policy, which keeps what an earlier test made of floatx, and floatx for optimizers and fit's
    data."""
    import keras

    def set_all(dtype: str) -> None:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        if keras.backend.backend() == "jax":
            import jax

            jax.config.update("jax_enable_x64", dtype == "float64")

    set_all("float64")
    try:
        yield
    finally:
        set_all("float32")
