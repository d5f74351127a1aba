"""Leaves of a carry that get no cotangent, such as a sum that nobody reads: the transposed loop does without them."""

from typing import Any

from loopax._src.core.ir.linear_loop import LinearLoop
from loopax._src.core.jaxpr.dataflow import needed_inputs
from loopax._src.core.jaxpr.util import Mask, merge_lists, reject, select, split_list, trace, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, dce, jaxpr_as_fun, zeros


@weakly_cached
def carry_with_cotangents(linear: LinearLoop, nonzero_carry: Mask, nonzero_ys: Mask) -> Mask:
    """Which leaves of the carry the transpose needs: the known ones, and the linear ones that get a cotangent."""
    of_linear = iter(nonzero_carry)
    nonzero = [not is_linear or next(of_linear) for is_linear in linear.linear_carry]
    start = 1 + len(linear.linear_consts)
    carry = range(start, start + len(nonzero))
    used = needed_inputs(linear.body, carry, [*nonzero, *nonzero_ys])
    return used[carry.start : carry.stop]


@weakly_cached
def without_others(linear: LinearLoop, needed: Mask) -> LinearLoop:
    """The loop with these leaves of the carry alone: the others get no cotangent."""
    avals = linear.inputs(linear.body.in_avals[1:])

    def with_zeros(body: ClosedJaxpr) -> ClosedJaxpr:
        function = jaxpr_as_fun(body)

        def slim(row: Any, *operands: Any) -> list[Any]:
            consts, kept, xs = split_list(operands, [len(avals.consts), sum(needed)])
            carry = merge_lists(needed, list(map(zeros, reject(needed, avals.carry))), kept)
            carry, ys = linear.outputs(function(row, *consts, *carry, *xs))
            return [*select(needed, carry), *ys]

        closed = trace(slim, [body.in_avals[0], *avals.consts, *select(needed, avals.carry), *avals.xs])
        return dce(closed, [True] * len(closed.out_avals), True)[0]

    return linear._replace(
        body=with_zeros(linear.body),
        linear_carry=tuple(select(needed, linear.linear_carry)),
        saved=linear.saved and tuple(select(select(linear.linear_carry, needed), linear.saved)),
        inverse=linear.inverse and with_zeros(linear.inverse),
    )
