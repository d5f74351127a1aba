"""The inverse of a small matrix by elimination, in products that XLA computes itself.

LAPACK's triangular solve, which `jnp.linalg.inv` calls, divides 32 columns among OpenBLAS's threads. They find the
cores taken by those of XLA and wait for the scheduler: milliseconds for what takes one thread twenty microseconds.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

_product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def inverse_by_elimination(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse; where there is none, something that is not finite."""
    factors, _, order = jax.lax.linalg.lu(matrix)
    lower = jnp.tril(factors, -1) + jnp.eye(len(matrix), dtype=matrix.dtype)
    upper = jnp.triu(factors)
    return _product(inverse_of_lower(upper.T).T, inverse_of_lower(lower))[:, jnp.argsort(order)]


def inverse_of_lower(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse of a lower triangular matrix, from those of its diagonal blocks, which become twice as large in turn.

    Before: blocks [k, s, s], after: [k / 2, 2 s, 2 s]; the inverse of [[a, 0], [c, b]] is
    [[a^-1, 0], [-b^-1 c a^-1, b^-1]].
    """
    rows = matrix.shape[0]
    size = 1 << (rows - 1).bit_length()
    padded = jnp.eye(size, dtype=matrix.dtype).at[:rows, :rows].set(matrix)
    blocks = (1 / jnp.diag(padded))[:, None, None]
    while len(blocks) > 1:
        first, second = blocks[::2], blocks[1::2]
        pairs, side = first.shape[:2]
        by_blocks = padded.reshape(pairs, 2, side, pairs, 2, side)
        number = jnp.arange(pairs)
        below = by_blocks[number, 1, :, number, 0]
        corner = -_product(second, _product(below, first))
        blocks = jnp.block([[first, jnp.zeros_like(first)], [corner, second]])
    return blocks[0, :rows, :rows]
