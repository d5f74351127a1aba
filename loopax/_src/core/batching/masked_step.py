"""One step of a batch of loops that stop at different times.

A finished lane keeps its carry. What it computes meanwhile is thrown away, so it computes something harmless: its
operands are filled with those of a lane that is still active (`masking/substitute.py`), so a loop inside the body never
spins for a lane that is done, and no derivative meets what lies outside of the body's domain.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.effects.guard import acts, guarded
from loopax._src.core.ir.loop import Loop, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.jaxpr.mapped_axis import Axis, lane_avals
from loopax._src.core.jaxpr.mixed_lanes import mixed_inputs
from loopax._src.core.jaxpr.operand_groups import flatten
from loopax._src.core.jaxpr.properties import is_arithmetic
from loopax._src.core.jaxpr.util import INDEX, Mask, either, invert, split_list, stacked, trace
from loopax._src.core.masking.all_active import active_lanes, over_lanes, visibly_active
from loopax._src.core.masking.substitute import When, fill_inactive, pick
from loopax._src.core.row_buffers.versions import buffers, read_only
from loopax._src.jax_internals import ClosedJaxpr, is_sum, jaxpr_as_fun, undifferentiable_effects, zero, zeros


def lane_function(body: ClosedJaxpr, batched: Sequence[bool], axis: dict[str, Any]) -> Callable[..., list[Any]]:
    """`f(active, row, *operands)`: the body for all lanes; effects of finished lanes are suppressed."""
    if acts(body):
        function = guarded(body)
        in_axes = (0, None, *(0 if b else None for b in batched))
        return jax.vmap(function, in_axes=in_axes, out_axes=0, **axis)
    plain = jax.vmap(jaxpr_as_fun(body), in_axes=(None, *(0 if b else None for b in batched)), out_axes=0, **axis)
    return lambda _, *operands: plain(*operands)


def accumulators(body: ClosedJaxpr, carry: range) -> Mask:
    """Which leaves of the carry are only added to: a lane may keep its own, for sums have no domain to leave.

    Such are the cotangents of a lane's own weights, which are as large as the weights.
    """
    uses = Counter(id(atom) for eqn in body.jaxpr.eqns for atom in eqn.invars)
    uses.update(id(atom) for atom in body.jaxpr.outvars)
    sums = {id(eqn.outvars[0]): eqn for eqn in body.jaxpr.eqns if is_sum(eqn)}

    def only_added_to(leaf: Any, out: Any) -> bool:
        total = sums.get(id(out))
        return total is not None and uses[id(leaf)] == 1 and any(atom is leaf for atom in total.invars)

    leaves = [body.jaxpr.invars[i] for i in carry]
    return tuple(only_added_to(leaf, out) for leaf, out in zip(leaves, body.jaxpr.outvars, strict=False))


def step_lanes(
    function: Callable[..., list[Any]],
    active: Any,
    row: Any,
    consts: Sequence[Any],
    others: Sequence[Any],
    filled: Sequence[bool],
    carry: Sequence[Any],
    in_place: Mask,
    when: When,
) -> list[Any]:
    """New carry and rows of ys for all lanes; those of finished lanes are the old carry, and zeros.

    Constants are filled already; `filled` says which of the other operands are to be. In leaves of the carry that are
    changed `in_place`, finished lanes do not write.
    """
    out = function(active, row, *consts, *fill_inactive(active, others, filled, when))
    new_carry, ys = split_list(out, [len(carry)])
    leaves = zip(in_place, new_carry, carry, strict=True)
    return [
        *(new if changed else pick(active, new, old) for changed, new, old in leaves),
        *(pick(active, y, zero(y.dtype)) for y in ys),
    ]


def skip_idle_rows(
    body: ClosedJaxpr, step: Callable[..., list[Any]], active: Any, carry: Sequence[Any], y_avals: Sequence[Any]
) -> list[Any]:
    """One step where the windows of lanes may leave rows in which no lane is active: those are passed over.

    `step` is a function of the carry, and evaluates the body of one lane for all.
    """
    if undifferentiable_effects(body):
        return _at_most_one_step(jax.make_jaxpr(step)(carry), jnp.any(active), carry)
    idle = [*carry, *map(zeros, y_avals)]
    return lax.cond(jnp.any(active), lambda: step(carry), lambda: idle)


def _at_most_one_step(step: ClosedJaxpr, taken: Any, carry: Sequence[Any]) -> list[Any]:
    """The step as a loop: JAX maps no `lax.cond` with such effects."""

    def body(_: Any, *values: Any) -> list[Any]:
        consts, carry = split_list(values, [len(step.consts)])
        return jaxpr_as_fun(ClosedJaxpr(step.jaxpr, consts))(*carry)

    avals = [INDEX, *map(jax.typeof, (*step.consts, *carry))]
    loop = Loop(
        trace(body, avals),
        num_consts=len(step.consts),
        num_carry=len(carry),
        bound=1,
        reverse=False,
        predicated=False,
        unroll=1,
        storage=EveryResidual(reason="a step that a batch may pass over"),
    )
    out = run(loop, jnp.int32(0), taken.astype(jnp.int32), step.consts, carry, [])
    return [*out.carry, *(y[0] for y in out.ys)]


def in_window(row: Any, window: Sequence[Any], windows: Mask, axis: Axis) -> Any:
    """Which lanes have this row in their window."""
    which = visibly_active if axis.similar else active_lanes
    return which(row, window, windows, axis.size)


def hull(low: Any, high: Any) -> tuple[Any, Any]:
    """The window that holds those of all lanes; empty where there are no lanes."""
    empty = jnp.zeros((), jnp.int32)
    lowest = over_lanes(jnp.min, low) if jnp.size(low) else empty
    return lowest, over_lanes(jnp.max, high) if jnp.size(high) else empty


def any_row(low: Any, high: Any) -> tuple[Any, Any]:
    """The window that holds those of all lanes, where there is one row at most; bools are searched faster."""
    return jnp.zeros((), jnp.int32), over_lanes(jnp.any, low < high).astype(jnp.int32)


def when_filled(body: ClosedJaxpr) -> When:
    """When finished lanes need the operands of others: mere arithmetic on their own is harmless until it is summed."""
    return "in_derivatives" if is_arithmetic(body.jaxpr) else "always"


def filled_operands(
    body: ClosedJaxpr, consts: Sequence[bool], num_carry: int, rest: Sequence[bool]
) -> tuple[Mask, Mask]:
    """Which constants, and which other operands, of a body finished lanes do not read of their own.

    What other lanes see of a lane is its own: the key from which JAX draws for all lanes (`jaxpr/mixed_lanes.py`).
    """
    carry = range(1 + len(consts), 1 + len(consts) + num_carry)
    own = either(accumulators(body, carry), buffers(body, carry))
    own_consts = read_only(body, range(1, carry.start))
    own = either((*own_consts, *own, *invert(rest)), mixed_inputs(body)[1:])
    filled = zip((*consts, *(True,) * num_carry, *rest), own, strict=True)
    filled_consts, others = split_list((is_batched and not is_own for is_batched, is_own in filled), [len(consts)])
    return tuple(filled_consts), tuple(others)


def lanes_body(
    closed: ClosedJaxpr, axis: Axis, windows: Mask, window_avals: tuple[Any, ...], mapped: Sequence[Mask]
) -> ClosedJaxpr:
    """A body (row, *consts, *carry, *others) -> (*carry, *y) for lanes with windows of their own.

    mapped: which consts, carry leaves and others have an axis of lanes.
    """
    function = lane_function(closed, flatten(mapped), axis.arguments)
    consts_mapped, carry_mapped, others_mapped = mapped
    num_consts, num_carry = len(consts_mapped), len(carry_mapped)
    filled_consts, filled = filled_operands(closed, consts_mapped, num_carry, others_mapped)
    in_place = buffers(closed, range(1 + num_consts, 1 + num_consts + num_carry))
    y_avals = [stacked(a, axis.size) for a in closed.out_avals[num_carry:]]
    when = when_filled(closed)

    def body(row: Any, *operands: Any) -> list[Any]:
        window, consts, carry, others = split_list(operands, [sum(windows), num_consts, num_carry])
        active = in_window(row, window, windows, axis)
        consts = fill_inactive(active, consts, filled_consts, when)

        def step(carry: Sequence[Any]) -> list[Any]:
            return step_lanes(function, active, row, consts, [*carry, *others], filled, carry, in_place, when)

        return skip_idle_rows(closed, step, active, carry, y_avals) if all(windows) else step(carry)

    lanes = lane_avals(closed.in_avals[1:], flatten(mapped), axis)
    return trace(body, [closed.in_avals[0], *window_avals, *lanes])
