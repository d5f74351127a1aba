"""NaN for what is not valid."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.jax_internals import convert


def nan_if(failed: Any, x: jax.Array) -> jax.Array:
    """NaN in the place of numbers, and of their derivatives, where `failed` is True: one bool, or one for each lane.

    No other NaN is computed on the way: under `jax_debug_nans` that would be an error, though it were not selected.
    """
    failed = jnp.asarray(failed)
    failed = failed.reshape(*failed.shape, *(1,) * (x.ndim - failed.ndim)) if failed.ndim else failed
    nan_or_one = convert(lax.sqrt(1 - 2 * failed.astype(jnp.float32)), x.dtype)
    return jnp.where(failed, nan_or_one * x, x)
