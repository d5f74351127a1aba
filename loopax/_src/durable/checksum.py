"""Checksums of arrays that do not depend on how they are spread over devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SEED = 0x9E3779B1  # the golden ratio: a number without a pattern


def checksums(arrays: Sequence[Any]) -> list[str]:
    """Sixteen hexadecimal digits for each array.

    Sums of integers modulo 2**32 are the same in whatever order they are taken, so each device adds up what it holds.
    """
    sums = [np.asarray(pair) for pair in _sums(list(arrays))]
    return ["".join(f"{int(word):08x}" for word in pair) for pair in sums]


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_sum(_words(x)) for x in arrays]


def _sum(words: jax.Array) -> jax.Array:
    """Two sums of what each word and where it stands are mixed to; sums of weighted words would miss some swaps."""
    mixed = _mix(words ^ _mix(_positions(words.shape)))
    return jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in (mixed, _mix(mixed ^ jnp.uint32(_SEED)))])


def _positions(shape: Sequence[int]) -> jax.Array:
    """Where each element stands, counted from 1."""
    positions = jnp.ones(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        positions += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return positions


def _mix(x: jax.Array) -> jax.Array:
    """Each bit of a word depends on all of the given one, and no two words give the same (MurmurHash3's last step)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers, small elements one to a word."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    if x.dtype == jnp.bool_ or x.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return x.astype(jnp.int32).astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
