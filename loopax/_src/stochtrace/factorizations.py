"""Inverses of small matrices that may be singular, with derivatives that leave out what rounding has made.

Where the operator has a low rank, some directions of a basis hold nothing but rounding errors. They must neither
become infinite nor, in a derivative, be blown up: there they are constant.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Inexact

from loopax._src.core.jaxpr.types import differing, retyped

# Singular values are raised to this part of the rounding error of the largest. As measured for XNysTrace, eigenvalues
# 0.7^i, 48 products and float32: the estimate is 200 times the rounding error of one number too large. With 1 in place
# of 0.01 it is 1700 times, with 0.001 it is 600 times.
LEAST = 0.01


def product(*matrices: Array) -> Array:
    """The product, from left to right, rounded as numbers of its type are."""
    # By default, GPUs and TPUs round the operands to eleven bits and less.
    return reduce(partial(jnp.matmul, precision="highest"), matrices)


@jax.custom_jvp
def inverse(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse, from singular values of at least a part of the rounding error of the largest."""
    return _inverse_or(lambda values, least: 1 / _at_least(values, LEAST * least), matrix)


@jax.custom_jvp
def pseudo_inverse(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse on the directions whose singular values are above the rounding error of the largest."""
    return _inverse_or(lambda values, least: jnp.where(values > least, 1 / _at_least(values, least), 0), matrix)


pseudo_inverse.defjvps(lambda rate, known, _: -product(known, rate, known))
inverse.defjvps(lambda rate, _, matrix: -product(known := pseudo_inverse(matrix), rate, known))


def _inverse_or(inverted: Callable[[Array, Array], Array], matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse; where it is beyond rounding errors, that of the singular values as `inverted` has them."""

    def by_singular_values(matrix: Array) -> Array:
        left, values, right = jnp.linalg.svd(matrix)
        scaled = right.conj().T * inverted(values, _rounding(values))[None].astype(matrix.dtype)
        return product(scaled, left.conj().T)

    def direct_or_not(matrix: Array) -> Array:
        direct = inverse_by_elimination(matrix)
        condition = jnp.linalg.norm(direct) * jnp.linalg.norm(matrix)
        is_regular = condition * (matrix.shape[0] * jnp.finfo(matrix.dtype).eps) < 1  # not where it is NaN
        return jax.lax.cond(is_regular, lambda _: direct, by_singular_values, matrix)

    return lane_by_lane(direct_or_not)(matrix)


@jax.custom_jvp
def inverse_root(matrix: Inexact[Array, "m m"]) -> tuple[Inexact[Array, "m m"], Inexact[Array, "m m"]]:
    """L with L L^H the inverse of a positive semidefinite matrix, as the sum of two matrices.

    The first has the columns of eigenvalues above the rounding error of the largest. The second has those of others,
    which are raised to a part of it, and whose derivative is zero.

    L is determined up to a unitary factor on its right, and its derivative too: use it in ways which do not ask.
    """
    values, vectors = lane_by_lane(lambda matrix: tuple(jnp.linalg.eigh(matrix)))(matrix)
    least = _rounding(values)
    columns = vectors / jnp.sqrt(_at_least(values, LEAST * least))[None].astype(vectors.dtype)
    is_known = (values > least)[None]
    return jnp.where(is_known, columns, 0), jnp.where(is_known, 0, columns)


@inverse_root.defjvp
def _inverse_root_jvp(primals, tangents):
    (matrix,), (rate,) = primals, tangents
    known, rest = inverse_root(matrix)
    return (known, rest), (-0.5 * product(known, product(known.conj().T, rate, known)), jnp.zeros_like(rest))


def _rounding(values: Float[Array, " m"]) -> Float[Array, ""]:
    """What rounding may make of a value that is zero."""
    return values.shape[0] * jnp.finfo(values.dtype).eps * jnp.abs(values).max()


def _at_least(values: Float[Array, " m"], least: Float[Array, ""]) -> Float[Array, " m"]:
    """The values, none of them smaller; ones where all are zero."""
    return jnp.where(least > 0, jnp.maximum(values, least), 1)


# ---- the inverse by elimination
# LAPACK's triangular solve, which `jnp.linalg.inv` calls, divides 32 columns among OpenBLAS's threads. They find the
# cores taken by those of XLA and wait for the scheduler: milliseconds for what takes one thread twenty microseconds.
# So it is made of products that XLA computes itself.


def inverse_by_elimination(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """The inverse; where there is none, something that is not finite."""
    factors, _, order = jax.lax.linalg.lu(matrix)
    lower = jnp.tril(factors, -1) + jnp.eye(len(matrix), dtype=matrix.dtype)
    upper = jnp.triu(factors)
    return product(inverse_of_lower(upper.T).T, inverse_of_lower(lower))[:, jnp.argsort(order)]


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
        corner = -product(second, product(below, first))
        blocks = jnp.block([[first, jnp.zeros_like(first)], [corner, second]])
    return blocks[0, :rows, :rows]


# ---- factorizations under `jax.vmap`


def lane_by_lane(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which `jax.vmap` evaluates for one lane after another on a CPU, without derivatives.

    A call of LAPACK for a batch takes a thread of XLA's pool, and waits in it for parts that need threads too. Where a
    program has two such calls that do not depend on each other, both can wait for ever (jaxlib 0.10 on two cores).

    `jax.custom_batching` forgets that operands vary over the devices of a `jax.shard_map`: so they are typed as if they
    did not, and nothing here communicates.
    """
    in_turn = sequential_vmap(function)

    def on_any_platform(*operands: Any) -> Any:
        axes, operands = differing(operands), tuple(retyped(x, frozenset()) for x in operands)
        result = jax.lax.platform_dependent(*operands, cpu=in_turn, default=function)
        return jax.tree.map(lambda x: retyped(x, axes), result)

    return on_any_platform
