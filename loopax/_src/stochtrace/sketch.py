"""What estimators with a basis know of an operator.

All matrices are stored by rows, `(capacity, n)`, with zeros from `num_rows` on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int

Rows = Inexact[Array, "m n"]
Square = Inexact[Array, "m m"]


class Sketch(NamedTuple):
    """Products of an operator A with random probes, and a basis of them. Each row belongs to a sample.

    A sample has a probe w, a direction q of the basis, and so on.
    """

    probes: Rows
    basis: Rows
    coordinates: Square  # R[i, j]: A w_j = sum of R[i, j] q_i
    images: Rows | None = None  # A q
    others: tuple[Rows, Rows] | None = None  # further probes g, and A g


class Counted(NamedTuple):
    """A sketch, and how many of its rows there are."""

    sketch: Sketch
    num_rows: Int[Array, ""]

    @property
    def is_counted(self) -> Bool[Array, " m"]:
        """Which rows there are."""
        return jnp.arange(self.sketch.probes.shape[0], dtype=jnp.int32) < self.num_rows


def filled(square: Square, is_counted: Bool[Array, " m"]) -> Square:
    """The matrix with its rows and columns that do not count replaced by those of an identity of its scale."""
    scale = jax.lax.stop_gradient(jnp.abs(square).max())
    identity = jnp.eye(square.shape[0], dtype=square.dtype) * jnp.where(scale > 0, scale, 1).astype(square.dtype)
    return jnp.where(is_counted[:, None] & is_counted[None], square, identity)


def at_least_rounding(x: Square) -> Square:
    """What is not a rounding error of one; one where it is."""
    return jnp.where(x > x.shape[0] * jnp.finfo(x.dtype).eps, x, 1)


def dots(a: Inexact[Array, "m k"], b: Inexact[Array, "m k"]) -> Inexact[Array, " k"]:
    """The inner product a^H b of each pair of columns."""
    return (a.conj() * b).sum(0)
