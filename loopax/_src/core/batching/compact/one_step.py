"""Lanes of a loop of one step or none (a branch), in batches of those that take the step.

The lanes that take it are counted when the program runs: batches of a fixed size are filled with them, one after
another, as many as it takes. Each batch reads its lanes from the operands of all lanes, and writes their results to
those of all lanes. It reads and writes in place, forward and backward, so lanes that do not take the step cost nothing.
The places that are left over in the last batch repeat its first lane, and write nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core.batching.lockstep_loop import LaneOperands
from loopax._src.core.batching.masked_step import lane_function
from loopax._src.core.ir.lane_stages import Stages
from loopax._src.core.ir.loop import Loop, LoopInputs, Outcome, run
from loopax._src.core.jaxpr.mapped_axis import Axis
from loopax._src.core.jaxpr.operand_groups import flatten
from loopax._src.core.jaxpr.util import INDEX, collective_over, split_list, stacked, trace
from loopax._src.core.row_buffers.primitives import get, put
from loopax._src.jax_internals import keep_bits, zeros
from loopax._src.messages import collective_message

_MOST_BATCHES = 64


def takes_one_step(loop: Loop) -> bool:
    """Whether lanes of this loop can run in such batches."""
    return loop.bound == 1 and not loop.predicated and loop.reporting is None and loop.inverse is None


def in_batches(loop: Loop, axis: Axis, takes: Any, lanes: LaneOperands) -> Outcome:
    """The results of all lanes; takes: bool[lanes]."""
    assert isinstance(loop.stages, Stages)
    if collective_over(loop.body, axis.name):
        raise NotImplementedError(collective_message(axis.name))
    size = min(max(loop.stages.min_group, axis.size // _MOST_BATCHES), axis.size)
    batches = -(-axis.size // size)
    order = jnp.pad(_taking_first(takes), (0, batches * size - axis.size))
    count = jnp.sum(takes, dtype=jnp.int32)
    consts, carry, xs = lanes.inputs
    given = LoopInputs(consts, carry, [keep_bits(lambda x: x[0], x) for x in xs])
    ys = [zeros(stacked(aval, axis.size)) for aval in loop.output_avals.ys]
    batched = loop._replace(
        body=_body_of_batch(loop, axis, size, lanes.mapped, given, [*carry, *ys]),
        num_consts=2 + sum(map(len, given)),
        num_carry=len(carry) + len(ys),
        bound=batches,
        reverse=False,
        saving=None,
        saved=(),
        stages=None,
        debug_info=None,
    )
    num_batches = -(-count // size)
    out = run(batched, jnp.int32(0), num_batches, [order, count, *flatten(given)], [*carry, *ys], [])
    carry, ys = split_list(out.carry, [len(carry)])
    return Outcome(takes.astype(jnp.int32), carry, [y[None] for y in ys], [], [])


def _taking_first(takes: Any) -> Any:
    """The numbers of the lanes that take the step, in order; zeros behind them."""
    place = jnp.cumsum(takes, dtype=jnp.int32) - 1
    lanes = jnp.arange(len(takes), dtype=jnp.int32)
    place = jnp.where(takes, place, len(takes))
    return jnp.zeros_like(lanes).at[place].set(lanes, mode="drop", unique_indices=True)


def _body_of_batch(
    loop: Loop, axis: Axis, size: int, mapped: LoopInputs, given: LoopInputs, results: Sequence[Any]
) -> Any:
    """(number of the batch, order, count, *operands of all lanes, *results of all lanes) -> the results."""
    is_mapped = flatten(mapped)
    function = lane_function(loop.body, is_mapped, axis.resized(size).arguments)

    def body(number: Any, order: Any, count: Any, *operands: Any) -> list[Any]:
        of_lanes, results = split_list(operands, [len(is_mapped)])
        chosen = lax.dynamic_slice(order, (number * size,), (size,))
        is_lane = number * size + jnp.arange(size, dtype=jnp.int32) < count
        reads, writes = jnp.where(is_lane, chosen, chosen[0]), jnp.where(is_lane, chosen, axis.size)
        own = [get(x, reads)[0] if m else x for x, m in zip(of_lanes, is_mapped, strict=True)]
        out = function(is_lane, jnp.zeros((), INDEX.dtype), *own)
        return [put(rows, writes, new) for rows, new in zip(results, out, strict=True)]

    avals = [jax.ShapeDtypeStruct(order_shape, INDEX.dtype) for order_shape in ((-(-axis.size // size) * size,), ())]
    return trace(body, [INDEX, *avals, *map(jax.typeof, flatten(given)), *map(jax.typeof, results)])
