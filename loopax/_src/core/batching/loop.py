"""Batching: `jax.vmap` of loops.

Where all lanes take the same steps, the batch is one loop on larger arrays. Else it runs in lockstep
(`core/batching/lockstep_loop.py`) or in stages (`core/batching/compact/loop.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from loopax._src.core.batching.compact.loop import LOOPS
from loopax._src.core.batching.compact.primitive import compact_vmap
from loopax._src.core.batching.lockstep_loop import LaneOperands, own_limits, run_lanes
from loopax._src.core.batching.masked_step import hull
from loopax._src.core.ir.loop import Loop, run
from loopax._src.core.jaxpr.dataflow import dependence_fixpoint
from loopax._src.core.jaxpr.mapped_axis import (
    Axis,
    axes_of,
    fill_axis,
    is_batched,
    move,
    refuse_sharded_lanes,
    uniform_body,
)
from loopax._src.core.jaxpr.util import Mask, collective_over, either, select, split_list, weakly_cached
from loopax._src.jax_internals import axis_arguments, batched_outputs
from loopax._src.messages import symbolic_lanes_message


@weakly_cached
def _uniform_loop(loop: Loop, axis: Axis, consts: Mask, carry: Mask, xs: Mask, ys: Mask) -> Loop:
    return loop._replace(body=uniform_body(loop.body, axis, (*consts, *carry, *xs), (*carry, *ys)))


def batch_loop(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """One loop for all lanes where they take the same steps; else lanes in lockstep, or in stages.

    Operands are `low, high, *consts, *carry, *xs`. Lanes take different steps where they have limits of their own, or
    where the predicate is batched.
    """
    loop, axis = Loop(**params), Axis.of(axis_data)
    (low, high), *groups = split_list(operands, [2, *loop.sizes])
    window_dims, *group_dims = split_list(dims, [2, *loop.sizes])
    consts, carry, xs = groups
    const_dims, carry_dims, x_dims = group_dims
    consts = [move(x, d, 0) for x, d in zip(consts, const_dims, strict=True)]
    xs = [move(x, d, 1) for x, d in zip(xs, x_dims, strict=True)]
    consts_mask, xs_mask, windows = is_batched(const_dims), is_batched(x_dims), is_batched(window_dims)
    carry_mask, ys_mask = _batched_results(loop, axis_data, consts_mask, is_batched(carry_dims), xs_mask)
    if any(windows) or (loop.predicated and carry_mask[0]):
        refuse_sharded_lanes(axis)
        carry = [fill_axis(axis, x, d) for x, d in zip(carry, carry_dims, strict=True)]
        own = own_limits(windows, low, high)
        return _batch_lanes(loop, axis, low, high, LaneOperands(windows, own, consts_mask, xs_mask, consts, carry, xs))

    uniform = _uniform_loop(loop, axis, consts_mask, carry_mask, xs_mask, ys_mask)
    carry = [fill_axis(axis, x, d) if b else x for x, d, b in zip(carry, carry_dims, carry_mask, strict=True)]
    out = run(uniform, low, high, consts, carry, xs)
    out_dims = [
        None,
        *axes_of(carry_mask),
        *axes_of(ys_mask, 1),
        *axes_of(select(loop.saved_mask, carry_mask), 1),
        *(None for _ in out.checkpoint_rows),
    ]
    return [out.num_steps, *out.carry, *out.ys, *out.saved, *out.checkpoint_rows], out_dims


def _batched_results(loop: Loop, axis_data: Any, consts: Mask, carry: Mask, xs: Mask) -> tuple[Mask, Mask]:
    """Which leaves of the carry and which ys are batched."""
    if not collective_over(loop.body, axis_arguments(axis_data)["axis_name"]):
        flags = dependence_fixpoint(loop.body, (False, *consts, *carry, *xs), loop.carry_range)
        reached, ys = split_list(flags, [loop.num_carry])
        return tuple(reached), tuple(ys)
    while True:  # what has passed through a collective may be the same in all lanes again
        flags = batched_outputs(loop.body, axis_data, [False, *consts, *carry, *xs])
        new, ys = split_list(flags, [loop.num_carry])
        if either(carry, new) == carry:
            return carry, tuple(ys)
        carry = either(carry, new)


def _batch_lanes(loop: Loop, axis: Axis, low: Any, high: Any, lanes: LaneOperands) -> Any:
    """Lanes that stop at different steps."""
    if loop.stages:
        if not isinstance(axis.size, int):
            raise NotImplementedError(symbolic_lanes_message(axis.size))
        operands = [low, high, *lanes.consts, *lanes.carry, *lanes.xs]
        mapped = (*lanes.windows, *lanes.mapped_consts, *(True,) * loop.num_carry, *lanes.mapped_xs)
        return compact_vmap(LOOPS, loop, axis, mapped, operands), LOOPS.result_axes(loop)
    out, num_steps = run_lanes(loop, axis, *hull(low, high), lanes)
    if num_steps is None:
        num_steps = jnp.broadcast_to(jnp.maximum(high - low, 0), (axis.size,))
    dims = [
        0,
        *(0 for _ in out.carry),
        *(1 for _ in out.ys),
        *(1 for _ in out.saved),
        *(None for _ in out.checkpoint_rows),
    ]
    return [num_steps, *out.carry, *out.ys, *out.saved, *out.checkpoint_rows], dims
