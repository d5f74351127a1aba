"""A loop that XLA does not run in place."""

import jax.numpy as jnp
from jax import lax


def swapped(capacity, x, n):
    """Two rows are read, and written in each other's place: XLA copies the array for that in every step."""

    def body(i, rows):
        first, second = rows[i], rows[(7 * i) % capacity]
        return rows.at[(7 * i) % capacity].set(first + 1).at[i].set(second)

    return lax.fori_loop(0, n, body, jnp.outer(jnp.arange(capacity, dtype=x.dtype), x)).sum()
