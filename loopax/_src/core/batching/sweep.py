"""Batching of reverse sweeps: all lanes on the same rows, in lockstep, or in stages, as loops are."""

from collections.abc import Sequence
from typing import Any

import jax

from loopax._src.core.autodiff.sweep_jvp import sweep_fixpoint
from loopax._src.core.batching.compact.primitive import compact_vmap
from loopax._src.core.batching.compact.sweep import SWEEPS
from loopax._src.core.batching.lockstep_loop import own_limits
from loopax._src.core.batching.lockstep_sweep import lockstep_sweep
from loopax._src.core.batching.masked_step import hull
from loopax._src.core.ir.reverse_sweep import (
    ReverseSweep,
    checkpoint_and_sweep,
    reverse_sweep_p,
    run_sweep,
)
from loopax._src.core.jaxpr.expand import batch_expanded
from loopax._src.core.jaxpr.mapped_axis import (
    Axis,
    axes_of,
    fill_axis,
    is_batched,
    move,
    refuse_sharded_lanes,
    uniform_body,
)
from loopax._src.core.jaxpr.util import Mask, split_list, weakly_cached
from loopax._src.messages import symbolic_lanes_message


@weakly_cached
def _uniform_sweep(
    static: ReverseSweep, axis: Axis, consts: Mask, state: Mask, carry: Mask, xs: Mask, ys: Mask
) -> ReverseSweep:
    forward_inputs = (*consts, *state, *xs[: static.num_forward_xs])
    return static._replace(
        forward=uniform_body(static.forward, axis, forward_inputs, state),
        backward=uniform_body(static.backward, axis, (*consts, *carry, *state, *xs), (*carry, *ys)),
    )


def _without_saved(low: Any, high: Any, _: Any, *operands: Any, **params: Any) -> list[Any]:
    """A sweep that does not rely on what the forward loop saved."""
    static = ReverseSweep(**params)
    consts, init, _, carry, xs = split_list(operands, static.sizes)
    carry, ys = checkpoint_and_sweep(static, low, high, consts, init, carry, xs)
    return [*carry, *ys]


# Lanes whose forward loops ran apart (pullbacks that were stacked) have not saved before the same rows.
_save_again = batch_expanded(reverse_sweep_p, _without_saved)


def batch_sweep(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """One sweep for all lanes where they walk the same rows; else lanes in lockstep, or in stages.

    Operands are `low, high, checkpoint_rows, *consts, *init, *saved, *carry, *xs`.
    """
    static, axis = ReverseSweep(**params), Axis.of(axis_data)
    (low, high, checkpoint_rows), consts, init, saved, carry, xs = split_list(operands, [3, *static.sizes])
    (*window_dims, checkpoint_rows_dim), const_dims, init_dims, saved_dims, carry_dims, x_dims = split_list(
        dims, [3, *static.sizes]
    )
    consts_mask, xs_mask, windows = is_batched(const_dims), is_batched(x_dims), is_batched(window_dims)
    if checkpoint_rows_dim is not None and not (static.stages and any(windows)):
        return _save_again(axis_data, operands, dims, **params)
    started = tuple(a is not None or b is not None for a, b in zip(init_dims, saved_dims, strict=True))
    state_mask, carry_mask, ys_mask = sweep_fixpoint(
        static, consts_mask, started, is_batched(carry_dims), xs_mask, typed=False
    )
    if any(windows):
        refuse_sharded_lanes(axis)
        state_mask, carry_mask, ys_mask = ((True,) * len(m) for m in (state_mask, carry_mask, ys_mask))

    def fill(mask: Mask, values: Sequence[Any], value_dims: Sequence[Any], to: int) -> list[Any]:
        return [fill_axis(axis, x, d, to) if b else x for b, x, d in zip(mask, values, value_dims, strict=True)]

    init, carry = fill(state_mask, init, init_dims, 0), fill(carry_mask, carry, carry_dims, 0)
    consts = [move(x, d, 0) for x, d in zip(consts, const_dims, strict=True)]
    xs = [move(x, d, 1) for x, d in zip(xs, x_dims, strict=True)]
    own = own_limits(windows, low, high)
    if any(windows) and static.stages:
        if not isinstance(axis.size, int):
            raise NotImplementedError(symbolic_lanes_message(axis.size))
        mapped = (*windows, *consts_mask, *state_mask, *carry_mask, *xs_mask)
        results = compact_vmap(SWEEPS, static, axis, mapped, [low, high, *consts, *init, *carry, *xs])
        return results, SWEEPS.result_axes(static)
    if any(windows):
        lanes = lockstep_sweep(static, axis, consts_mask, xs_mask, windows, tuple(map(jax.typeof, own)))
        low, high = hull(low, high)
    else:
        lanes = _uniform_sweep(static, axis, consts_mask, state_mask, carry_mask, xs_mask, ys_mask)
    saved = fill(state_mask, saved, saved_dims, 1)
    new_carry, ys = run_sweep(lanes, low, high, checkpoint_rows, [*own, *consts], init, saved, carry, xs)
    return [*new_carry, *ys], [*axes_of(carry_mask), *axes_of(ys_mask, 1)]
