"""A batch whose lanes run one after another, each alone: a loop over lanes around the loop of one lane.

No lane waits for another, and none is masked. Each takes the time that it takes without a batch, which is less than its
share of a batch where a step is costly, and the numbers of steps differ much.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.ir.loop import Loop, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.jaxpr.mapped_axis import Axis, axes_of, is_batched, refuse_sharded_lanes
from loopax._src.core.jaxpr.util import INDEX, Mask, collective_over, merge_lists, reject, select, split_list, trace
from loopax._src.jax_internals import ClosedJaxpr, keep_bits
from loopax._src.messages import sequential_collective_message, symbolic_lanes_message


def run_sequentially(
    alone: Callable[..., Sequence[Any]],
    body: ClosedJaxpr,
    axis: Axis,
    operands: Sequence[Any],
    dims: Sequence[Any],
    results: Mask,
) -> tuple[list[Any], list[int | None]]:
    """The results of all lanes, and at which axis they have their lanes.

    `alone` takes the operands of one lane; `dims` says where operands have their lanes, None where all share one.
    `body` is what one lane evaluates: it may not communicate with others. `results` says which of the results lanes
    have of their own; all share the others.
    """
    refuse_sharded_lanes(axis)
    if collective_over(body, axis.name):
        raise NotImplementedError(sequential_collective_message(axis.name))
    if not isinstance(axis.size, int):
        raise NotImplementedError(symbolic_lanes_message(axis.size))
    mapped = is_batched(dims)
    shared = reject(mapped, operands)
    rows = [jnp.moveaxis(x, int(d), 0) for x, d in zip(select(mapped, operands), select(mapped, dims), strict=True)]
    ys = over_rows(lambda shared, own: alone(*merge_lists(mapped, shared, own)), shared, rows, "a loop over lanes")
    return [y if own else keep_bits(lambda y: y[0], y) for own, y in zip(results, ys, strict=True)], axes_of(results)


def over_rows(
    function: Callable[[list[Any], list[Any]], Sequence[Any]], shared: Sequence[Any], rows: Sequence[Any], reason: str
) -> list[Any]:
    """`function(shared, row)` of one row after another; the results have rows in front.

    There is one row at least; `reason` says why a gradient stores what all of them need.
    """

    def body(_: Any, *values: Any) -> Sequence[Any]:
        return function(*split_list(values, [len(shared)]))

    number = len(rows[0])
    loop = Loop(
        trace(body, [INDEX, *map(jax.typeof, shared), *(jax.typeof(x[0]) for x in rows)]),
        num_consts=len(shared),
        num_carry=0,
        bound=number,
        reverse=False,
        predicated=False,
        unroll=1,
        storage=EveryResidual(reason=reason),
    )
    return list(run(loop, jnp.int32(0), jnp.int32(number), shared, [], rows).ys)
