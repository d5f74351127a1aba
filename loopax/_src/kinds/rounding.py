"""How far two carries are from each other, and whether rounding errors explain it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopax._src.jax_internals import to_device

EXPONENT = 2 / 3  # the rounding errors of a step, there and back, are less than this power of the dtype's eps


class Difference(NamedTuple):
    """The largest of all leaves: float32[]."""

    ratio: Any  # to what rounding may do: more than 1 is too much
    amount: Any  # relative to the largest element of the leaf


def largest_difference(given: Sequence[Any], found: Sequence[Any], after: Sequence[Any]) -> Difference:
    """Between two carries before a step; `after` is the carry after it.

    Rounding errors are relative to the largest element of a leaf, before or after. Those of the largest element of all
    leaves may be in each of them: one that holds zeros is computed from the others.
    """
    given, found, after = (list(map(to_device, leaves)) for leaves in (given, found, after))
    pairs = zip(given, after, strict=True)
    sizes = [jnp.maximum(largest(a), largest(c)) if is_real(a) else jnp.float32(0) for a, c in pairs]
    widest = max((size.dtype for size in sizes), key=lambda dtype: dtype.itemsize, default=jnp.float32)
    of_all = jnp.stack([jnp.zeros((), widest), *(size.astype(widest) for size in sizes)]).max()
    none = Difference(jnp.float32(0), jnp.float32(0))
    leaves = [none, *(_difference(*each, of_all) for each in zip(given, found, sizes, strict=True))]
    ratios, amounts = map(jnp.stack, zip(*leaves, strict=True))
    return Difference(ratios.max(), amounts[ratios.argmax()])


def _difference(given: Any, found: Any, size: Any, of_all: Any) -> Difference:
    """Of one leaf; infinite for integers that differ."""
    if not is_real(given):
        wrong = jnp.where((given != found).any(), jnp.float32(jnp.inf), jnp.float32(0))
        return Difference(wrong, wrong)
    eps = float(jnp.finfo(given.dtype).eps)
    amount = largest(given - found)
    ratio = relative(amount, jnp.maximum(eps**EXPONENT * size, (eps * of_all).astype(size.dtype)))
    return Difference(ratio.astype(jnp.float32), relative(amount, size).astype(jnp.float32))


def is_real(x: Any) -> bool:
    """Whether rounding errors are in it, complex numbers included."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def largest(x: Any) -> Any:
    """The absolute value of the largest element; 0 where there is none."""
    return jnp.abs(x).max(initial=0)


def relative(amount: Any, size: Any) -> Any:
    """Their ratio: 0 where there is no amount, infinite where there is no size alone."""
    return jnp.where(amount == 0, 0, jnp.where(size == 0, jnp.inf, amount / jnp.where(size == 0, 1, size)))
