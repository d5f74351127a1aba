"""Rows that do not match float64[2], for buffers and histories, and what the error says of them."""

import jax.numpy as jnp

WRONG_ROWS = [
    (jnp.ones(2, jnp.float32), ["the row itself", "float32[2]", "expected float64[2]", "astype"]),
    (jnp.ones(3), ["got float64[3]", "expected float64[2]"]),
    ((jnp.ones(2),), ["another structure"]),
    ("abc", ["'abc'"]),
]
