"""What the condition of a `jax.lax.while_loop` says of its number of steps: loops often count them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import forwarded_from, makers
from loopax._src.jax_internals import ClosedJaxpr, Literal, dce


def fori_counter(loop: jaxi.LaxLoop) -> tuple[int, int] | None:
    """Where the carry of a `fori_loop` has its index and its upper limit; None: it is another loop.

    JAX makes a `while_loop` of it whose condition is `index < upper`. Known as what it is, its number of steps is
    known at the start. Lanes of a `jax.vmap` inside the function have no one number.
    """
    cond, body = loop.cond, loop.body
    if cond.out_avals[0].shape or len(cond.eqns) != 1 or not jaxi.is_less_than(cond.eqns[0]):
        return None
    (eqn,), carry = cond.eqns, cond.invars[loop.num_cond_consts :]
    index, upper = (next((i for i, var in enumerate(carry) if var is atom), None) for atom in eqn.invars)
    if index is None or upper is None or cond.outvars[0] is not eqn.outvars[0]:
        return None
    inputs, outputs = body.invars[loop.num_consts :], body.outvars
    if forwarded_from(body, outputs[upper]) is not inputs[upper]:
        return None
    return (index, upper) if _counts(loop, index) else None


def most_steps(loop: jaxi.LaxLoop, init: Sequence[Any]) -> int | None:
    """The steps after which a loop that only counts ends at the latest: its limit is known, as in `i < 7`.

    None: its condition looks at other things than integers. It may then end long before a limit that it has as well,
    and room for all steps would cost more than it spares.
    """
    used = dce(loop.cond, [True], False)[1]
    looks_at = [aval for aval, is_used in zip(loop.cond.in_avals, used, strict=True) if is_used]
    if not all(aval.shape == () and jnp.issubdtype(aval.dtype, jnp.integer) for aval in looks_at):
        return None
    carry = loop.cond.invars[loop.num_cond_consts :]
    place = {variable: i for i, variable in enumerate(carry)}
    found = [
        end - int(init[place[counter]])
        for counter, end in _limits(loop.cond, loop.cond.outvars[0], True)
        if counter in place and not isinstance(init[place[counter]], Tracer) and _counts(loop, place[counter])
    ]
    return max(min(found), 0) if found else None


def _counts(loop: jaxi.LaxLoop, index: int) -> bool:
    """Whether each step adds one to this integer of the carry."""
    old, new = loop.body.invars[loop.num_consts + index], loop.body.outvars[index]
    if isinstance(new, Literal) or new not in makers(loop.body) or not jnp.issubdtype(old.aval.dtype, jnp.integer):
        return False
    eqn, _ = makers(loop.body)[new]
    one = isinstance(eqn.invars[-1], Literal) and eqn.invars[-1].val == 1
    return jaxi.is_addition(eqn) and eqn.invars[0] is old and one


def _limits(closed: ClosedJaxpr, condition: Any, holds: bool) -> Iterator[tuple[Any, int]]:
    """Variables of a jaxpr, each with a number that it is below where a condition holds, or where it does not."""
    if isinstance(condition, Literal) or condition not in makers(closed):
        return
    eqn, position = makers(closed)[condition]
    if (inner := jaxi.inlinable(eqn)) is not None:
        outer = {x: y for x, y in zip(inner.invars, eqn.invars, strict=True) if not isinstance(y, Literal)}
        yield from ((outer[x], end) for x, end in _limits(inner, inner.outvars[position], holds) if x in outer)
    elif jaxi.is_not(eqn):
        yield from _limits(closed, eqn.invars[0], not holds)
    elif (jaxi.is_and if holds else jaxi.is_or)(eqn) or jaxi.hands_on(eqn):
        for part in eqn.invars:
            yield from _limits(closed, part, holds)
    elif (order := jaxi.order_of(eqn, holds)) is not None:
        smaller, larger, may_be_equal = order
        dtype: Any = smaller.aval.dtype
        is_constant = isinstance(larger, Literal) and not isinstance(smaller, Literal)
        if is_constant and jnp.issubdtype(dtype, jnp.integer):
            end = int(larger.val) + may_be_equal
            if end <= jnp.iinfo(dtype).max:  # which a counter reaches
                yield smaller, end
