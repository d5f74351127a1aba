"""Inverses of small matrices that may be singular, with derivatives that leave out what rounding has made.

Where the operator has a low rank, some directions of a basis hold nothing but rounding errors. They must neither
become infinite nor, in a derivative, be blown up: there they are constant.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from loopax._src.stochtrace.elimination import inverse_by_elimination
from loopax._src.stochtrace.lapack import lane_by_lane


@jax.custom_jvp
def inverse(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse, from singular values of at least the rounding error of the largest."""
    return _inverse_or(lambda values, least: 1 / _at_least(values, least), matrix)


@inverse.defjvp
def _inverse_jvp(primals, tangents):
    (matrix,), (rate,) = primals, tangents
    known = pseudo_inverse(matrix)
    return inverse(matrix), -known @ rate @ known


@jax.custom_jvp
def pseudo_inverse(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse on the directions whose singular values are above the rounding error of the largest."""
    return _inverse_or(lambda values, least: jnp.where(values > least, 1 / _at_least(values, least), 0), matrix)


@pseudo_inverse.defjvp
def _pseudo_inverse_jvp(primals, tangents):
    (matrix,), (rate,) = primals, tangents
    known = pseudo_inverse(matrix)
    return known, -known @ rate @ known


def _inverse_or(inverted: Callable[[Array, Array], Array], matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse; where it is beyond rounding errors, that of the singular values as `inverted` has them."""

    def by_singular_values(matrix: Array) -> Array:
        left, values, right = jnp.linalg.svd(matrix)
        return (right.conj().T * inverted(values, _rounding(values))[None].astype(matrix.dtype)) @ left.conj().T

    def direct_or_not(matrix: Array) -> Array:
        direct = inverse_by_elimination(matrix)
        condition = jnp.linalg.norm(direct) * jnp.linalg.norm(matrix)
        is_regular = condition * (matrix.shape[0] * jnp.finfo(matrix.dtype).eps) < 1  # not where it is NaN
        return jax.lax.cond(is_regular, lambda _: direct, by_singular_values, matrix)

    return lane_by_lane(direct_or_not)(matrix)


@jax.custom_jvp
def inverse_root(matrix: Inexact[Array, "m m"]) -> tuple[Inexact[Array, "m m"], Inexact[Array, "m m"]]:
    """L with L L^H the inverse of a positive semidefinite matrix, as the sum of two matrices.

    The first has the columns of eigenvalues above the rounding error of the largest, the second those of the others,
    which are raised to it, and whose derivative is zero.

    L is determined up to a unitary factor on its right, and its derivative too: use it in ways which do not ask.
    """
    values, vectors = lane_by_lane(lambda matrix: tuple(jnp.linalg.eigh(matrix)))(matrix)
    least = _rounding(values)
    columns = vectors / jnp.sqrt(_at_least(values, least))[None].astype(vectors.dtype)
    is_known = (values > least)[None]
    return jnp.where(is_known, columns, 0), jnp.where(is_known, 0, columns)


@inverse_root.defjvp
def _inverse_root_jvp(primals, tangents):
    (matrix,), (rate,) = primals, tangents
    known, rest = inverse_root(matrix)
    return (known, rest), (-0.5 * known @ (known.conj().T @ rate @ known), jnp.zeros_like(rest))


def _rounding(values: Float[Array, " m"]) -> Float[Array, ""]:
    """What rounding may make of a value that is zero."""
    return values.shape[0] * jnp.finfo(values.dtype).eps * jnp.abs(values).max()


def _at_least(values: Float[Array, " m"], least: Float[Array, ""]) -> Float[Array, " m"]:
    """The values, none of them smaller; ones where all are zero."""
    return jnp.where(least > 0, jnp.maximum(values, least), 1)
