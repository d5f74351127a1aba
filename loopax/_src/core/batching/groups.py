"""Lanes whose numbers of steps are known, in groups of lanes that take similar numbers, one after another.

`core/ir/lanes.py` says how many groups there are. Also lanes that run one after another, and a function as a loop.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.kind import Decided, Kind
from loopax._src.core.ir.lanes import Compact, group_sizes
from loopax._src.core.ir.loop import Loop, Outcome, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.jaxpr.types import Axis, axes_of, is_batched, refuse_gathering, trace_carrying
from loopax._src.core.jaxpr.util import (
    INDEX,
    MOST_STEPS,
    Mask,
    of_selected,
    refuse_collectives,
    split_list,
)
from loopax._src.jax_internals import ClosedJaxpr, keep_bits, on_device, open_constants, replace_jaxpr, vary_like


def run_function(
    function: Callable[..., list[Any]],
    carry: Sequence[Any],
    xs: Sequence[Any] = (),
    *,
    bound: int | None,
    predicated: bool = False,
    low: Any = 0,
    high: Any = None,
    kind: Kind,
    **asked: Any,
) -> Outcome:
    """A loop of `function(row, *carry, *x) -> (*carry, *y)` over rows, or until its predicate stops it.

    The rows are low, ..., high - 1; None: to the last. What the function closes over are constants of the loop.
    `asked`: the kind, and what else is as in `asked_as`.
    """
    rows = [jaxi.mapped_aval(x.shape[0], 0, jax.typeof(x)) for x in xs]
    opened, closed_over = open_constants(trace_carrying(function, INDEX, list(map(jax.typeof, carry)), rows))
    # Before: [*closed over, row, *carry, *x] -> After: [row, *closed over, *carry, *x]
    consts, (row, *rest) = split_list(opened.invars, [len(closed_over)])
    carry = list(map(vary_like, carry, opened.out_avals))
    loop = Loop(
        replace_jaxpr(opened, [row, *consts, *rest], opened.outvars),
        num_consts=len(consts),
        num_carry=len(carry),
        bound=bound,
        reverse=False,
        predicated=predicated,
        unroll=1,
        kind=kind,
        **asked,
    )
    if high is None:
        high = jnp.int32(MOST_STEPS if bound is None else bound)
    return run(loop, jnp.int32(low), high, closed_over, carry, xs)


def run_sequentially(
    alone: Callable[..., Sequence[Any]],
    body: ClosedJaxpr,
    axis: Axis,
    operands: Sequence[Any],
    dims: Sequence[Any],
    batched_results: Mask,
) -> tuple[list[Any], list[int | None]]:
    """A loop over lanes around the loop of one lane: the results of all lanes, and at which axis they have their lanes.

    No lane waits for another, and none is masked. Each takes the time that it takes without a batch, which is less than
    its share of a batch where a step is costly, and the numbers of steps differ much.

    `alone` takes the operands of one lane; `dims` says where operands have their lanes, None where all share one.
    `body` is what one lane evaluates: it may not communicate with others. `batched_results` says
    which of the results lanes have of their own; all share the others.
    """
    refuse_gathering(axis)
    why = (
        "its lanes run one after another: the others have nothing to contribute yet. Give all lanes the same number of "
        'steps and write lanes="lockstep"'
    )
    refuse_collectives(body, axis.name, why)
    rows = [jnp.moveaxis(x, int(d), 0) for x, d in zip(operands, dims, strict=True) if d is not None]
    of_lane = of_selected(alone, is_batched(dims), operands)
    kind = Decided(EveryResidual(reason="a loop over lanes"))
    ys = run_function(lambda _, *own: of_lane(*own), [], rows, bound=axis.size, kind=kind).ys
    results = [y if own else keep_bits(lambda y: y[0], y) for own, y in zip(batched_results, ys, strict=True)]
    return results, axes_of(batched_results)


# Take lanes out of a batch.


def take(x: Any, axis: int, order: Any, unique: bool = True) -> Any:
    """These lanes of an array, in this order; none twice, if `unique`. They stand along the axis."""

    def lanes(x: Any, order: Any) -> Any:
        at = x.at[(*(slice(None),) * axis, order)]
        return at.get(mode="promise_in_bounds", unique_indices=unique, wrap_negative_indices=False)

    return on_device(lambda x: keep_bits(lanes, x, order), x)


def put_back(x: Any, axis: int, new: Any, order: Any) -> Any:
    """The array with these lanes, none twice, replaced by others. They stand along the axis."""

    def lanes(x: Any, new: Any, order: Any) -> Any:
        at = x.at[(*(slice(None),) * axis, order)]
        return at.set(new, mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False)

    return on_device(lambda x, new: keep_bits(lanes, x, new, order), x, new)


def active_first(active: Any, last: Any = False) -> Any:
    """The numbers of active lanes, and then those of the others, of which some come last.

    Sorting numbers is three times as fast as `argsort`.
    """
    size = len(active)
    place = jnp.where(active, 0, jnp.where(last, 2 * size, size)).astype(jnp.int32)
    return jnp.sort(place + jnp.arange(size, dtype=jnp.int32), stable=False) % max(size, 1)


def in_groups(
    run_group: Callable[[int, Sequence[Any]], list[Any]],
    how: Compact,
    num_steps: Any,
    operands: Sequence[Any],
    operand_axes: Sequence[int | None],
    result_axes: Sequence[int],
) -> list[Any]:
    """The results of all lanes; `run_group(lanes, operands)` gives those of some. Operands are low, high, and others.

    The axes say where operands and results have their lanes; None: lanes share the operand.
    """
    lanes, given = len(num_steps), list(zip(operands, operand_axes, strict=True))
    parts = group_sizes(how, lanes)
    if parts == [(1, lanes)]:
        return run_group(lanes, operands)
    # Before: lanes in their order -> After: those with the most steps first, so that lanes of a group take similar
    # numbers. Groups may have a few places more than there are lanes: these repeat a lane, which has no rows there.
    places = sum(number * size for number, size in parts)
    order = jnp.argsort(-num_steps).astype(jnp.int32)
    chosen = order if places == lanes else order[jnp.minimum(jnp.arange(places), lanes - 1)]
    own = [take(jnp.moveaxis(x, at, 0), 0, chosen, places == lanes) for x, at in given if at is not None]
    is_lane = jnp.arange(places) < lanes

    def group(size: int, _: Any, is_lane: Any, *own: Any) -> list[Any]:
        of_group = iter(own)
        low, high, *rest = (x if at is None else jnp.moveaxis(next(of_group), 0, at) for x, at in given)
        if operand_axes[1] is None:
            low = jnp.where(is_lane, low, high)
        else:
            high = jnp.where(is_lane, high, low)
        results = run_group(size, [low, high, *rest])
        return [jnp.moveaxis(y, at, 0) for y, at in zip(results, result_axes, strict=True)]

    start, found, kind = 0, [], Decided(EveryResidual(reason="a map over groups of lanes"))
    for number, size in parts:
        # Before: [lanes, ...] -> After: [groups, lanes of a group, ...]
        cut = partial(lax.slice_in_dim, start_index=start, limit_index=start + number * size)
        rows = [keep_bits(cut, x).reshape(number, size, *x.shape[1:]) for x in (is_lane, *own)]
        ys = run_function(partial(group, size), [], rows, bound=number, kind=kind).ys
        found.append([y.reshape(number * size, *y.shape[2:]) for y in ys])
        start += number * size
    back = jnp.argsort(order).astype(jnp.int32)
    results = [keep_bits(lambda *parts: jnp.concatenate(parts)[:lanes], *parts) for parts in zip(*found, strict=True)]
    return [jnp.moveaxis(take(y, 0, back), 0, at) for y, at in zip(results, result_axes, strict=True)]
