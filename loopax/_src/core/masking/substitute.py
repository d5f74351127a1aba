"""Borrowing: what finished lanes of a batch read instead of their own.

A finished lane computes something harmless when it reads everything from a lane that is still active.
For states that is one `where` in each step. Large constants of each lane's own (the weights of an
ensemble) would be copied in each step, though what is lent changes only when a lane finishes. So a
loop can say which constants its body expects to be lent already; it is then compiled as stretches of
steps in which the same lanes are active.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src.core.jaxpr.util import Mask, num_bytes, select, split_list, trace
from loopax._src.jax_internals import ClosedJaxpr, Primitive, ad, batching, jaxpr_as_fun, mlir

# Constants of all lanes together from which on lending them in stretches pays (measured in
# docs/benchmark.md); below it the additional loop costs more than the copies.
LARGE_CONSTANTS_BYTES = 64 * 1024


class Lent(NamedTuple):
    """Constants that a body expects to be lent already."""

    activity: ClosedJaxpr  # (row, *consts, *carry) -> bool[lanes]: which lanes are active at this step
    consts: Mask


# The identity on what a finished lane borrows. Nothing of its results is kept, so there is no derivative: as
# `lax.stop_gradient`, but also where what is lent is a tangent and JAX transposes.
borrowed_p = Primitive("borrowed")
borrowed_p.def_impl(lambda x: x)
borrowed_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(borrowed_p, lambda _, x: [x])
batching.primitive_batchers[borrowed_p] = lambda operands, dims: (borrowed_p.bind(*operands), dims[0])
ad.primitive_jvps[borrowed_p] = lambda primals, _: (
    borrowed_p.bind(*primals),
    ad.Zero(jax.typeof(primals[0]).to_tangent_aval()),
)
ad.primitive_transposes[borrowed_p] = lambda _, __: [None]


def pick(active: Any, a: Any, b: Any) -> Any:
    """Rows of `a` for active lanes, rows of `b` for the others; lanes may have several axes, or none."""
    return jnp.where(active.reshape(*active.shape, *(1,) * (a.ndim - active.ndim)), a, b)


def borrow(active: Any, operands: Sequence[Any], batched: Sequence[bool]) -> list[Any]:
    """Give finished lanes what the first active lane reads."""
    if active.size == 0:
        return list(operands)
    lender = jnp.argmax(active)
    return [
        pick(active, x, borrowed_p.bind(x[lender])[None]) if is_batched else x
        for x, is_batched in zip(operands, batched, strict=True)
    ]


def large_constants(avals: Sequence[Any], batched: Sequence[bool]) -> Mask:
    """The constants to lend in stretches: all that lanes have of their own, if that is much."""
    large = num_bytes(select(batched, avals)) >= LARGE_CONSTANTS_BYTES
    return tuple(b and large for b in batched)


def lend_in_body(body: ClosedJaxpr, lent: Lent) -> ClosedJaxpr:
    """A body that does its own lending, as every rule but the lowering has it."""
    function, activity = jaxpr_as_fun(body), jaxpr_as_fun(lent.activity)
    num_consts, num_carry = len(lent.consts), len(lent.activity.in_avals) - 1 - len(lent.consts)

    def lending(row: Any, *operands: Any) -> list[Any]:
        consts, carry, rest = split_list(operands, [num_consts, num_carry])
        (active,) = activity(row, *consts, *carry)
        return function(row, *borrow(active, consts, lent.consts), *carry, *rest)

    return trace(lending, body.in_avals)


def in_stretches(
    lent: Lent, consts: Sequence[Any], active_at: Callable[[Any], Any]
) -> Callable[[Any], tuple[list[Any], Callable[[Any], Any]]]:
    """At the start of a stretch: the constants as lent, and whether a later state still belongs to it."""

    def start(state: Any) -> tuple[list[Any], Callable[[Any], Any]]:
        active = active_at(state)
        return borrow(active, consts, lent.consts), lambda later: jnp.all(active_at(later) == active)

    return start
