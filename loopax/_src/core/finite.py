"""Which element of an array broke: became NaN or an infinity, though it was a number at the start."""

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopax._src.jax_internals import spec_of, to_device, vary_like
from loopax._src.settings import calibration

Finite = Literal[True, "nan"]  # what breaks a loop: NaN and infinities, or NaN alone

NONE = np.uint32(2**32 - 1)  # no element; else twice its number, and one more if it is an infinity
_LARGE = 1024  # numbers from which on an array is looked at as a whole before its elements are


def can_break(aval: Any) -> bool:
    """Whether an array of this type may hold NaN."""
    return jnp.issubdtype(aval.dtype, jnp.inexact) and 0 not in aval.shape


def is_large(aval: Any) -> bool:
    """Whether it takes time to look at each element of such an array."""
    return isinstance(size := prod(aval.shape), int) and size >= _LARGE


def broken(x: Any, finite: Finite) -> Any:
    """Which elements are not finite; an array in host memory is looked at on the device."""
    return jnp.isnan(to_device(x)) if finite == "nan" else ~jnp.isfinite(to_device(x))


def any_broken(x: Any) -> Any:
    """Whether an element is not finite: bool[]."""
    return first_broken(x, None, True) != NONE


def _may_be_broken(x: Any, finite: Finite) -> Any:
    """Whether an element may be not finite: bool[]. By the norm, which may overflow, and which XLA computes fast."""
    x = to_device(x).reshape(-1)
    wide = jnp.dtype(jnp.float32) if x.dtype.itemsize < 4 else x.dtype
    x = x if x.dtype.itemsize > 1 else x.astype(wide)
    square = jnp.vdot(x, x, preferred_element_type=wide).real
    return jnp.isnan(square) if finite == "nan" else ~jnp.isfinite(square)


def first_broken(x: Any, allowed: Any, finite: Finite, written: Sequence[Any] | None = None) -> Any:
    """The first element of `x` that is not finite where it is not `allowed` to be so: uint32[], as `NONE` is.

    `written`: all parts of a large array in which a step may have written something else than it read.
    """
    x = jnp.asarray(x)  # of a constant of a jaxpr
    if isinstance(size := jax.typeof(x).size, int) and size > 2**31:
        raise NotImplementedError(f"finite=: an array of {size} elements is larger than what can be looked at.")

    def first() -> Any:
        number = _numbers(x)
        is_broken = broken(x, finite) if allowed is None else broken(x, finite) & ~allowed
        code = 2 * number if finite == "nan" else 2 * number + (~jnp.isnan(to_device(x))).astype(jnp.uint32)
        return jnp.min(jnp.where(is_broken, code, NONE))

    # To look at each element takes XLA's CPU backend long, so that it is worth to know first that all are finite. A
    # condition takes a GPU longer than that, unless it saves to look at all of a large array.
    parts = [x] if written is None else written
    is_slow = is_large(jax.typeof(x)) and calibration().platform == "cpu" and not any(spec_of(jax.typeof(x)))
    if not is_slow and written is None:
        return first()
    may_be = _may_be_broken if is_slow else lambda part, finite: jnp.any(broken(part, finite))
    is_worth = jnp.any(jnp.stack([may_be(part, finite) for part in parts]))
    return lax.cond(is_worth, first, lambda: vary_like(jnp.full((), NONE), jax.typeof(is_worth)))


def _numbers(x: Any) -> Any:
    """The number of each element."""
    number, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        number += stride * lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        stride *= x.shape[axis]
    return number
