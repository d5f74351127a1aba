"""The tape of a loop whose inverse reads a row that its step has recorded.

The inverse of such a loop has more inputs than the body: behind the others, a row of the tape. The body returns the row
as its last ys. The tape is a buffer in the carry: a step appends its row, and the inverse reads it.
"""

from typing import Any

from loopax._src.core.ir.call import LoopOperands
from loopax._src.core.ir.inverse import num_recorded
from loopax._src.core.ir.loop import Loop, Outcome, run
from loopax._src.core.jaxpr.util import split_list, stacked, trace, weakly_cached
from loopax._src.core.row_buffers.primitives import get, put
from loopax._src.jax_internals import dce, jaxpr_as_fun, zeros


def run_with_tape(loop: Loop, operands: LoopOperands) -> Outcome:
    """Run a loop that may have a tape. Rows of the tape are not among the results.

    The tape is as long as the loop's bound. Without a bound there is none, and the loop has no inverse.
    """
    num_rows = num_recorded(loop.body, loop.inverse)
    if not num_rows:
        return run(loop, *operands)
    if loop.bound is None:
        num_outputs = len(loop.body.out_avals)
        body = dce(loop.body, [i < num_outputs - num_rows for i in range(num_outputs)], True)[0]
        return run(loop._replace(body=body, inverse=None), *operands)
    tape = [zeros(stacked(aval, loop.bound)) for aval in loop.body.out_avals[-num_rows:]]
    out = run(_taped(loop), *operands._replace(carry=[*operands.carry, *tape]))
    return out._replace(carry=out.carry[: loop.num_carry])


@weakly_cached
def _taped(loop: Loop) -> Loop:
    """The loop with its tape as last leaves of the carry."""
    assert loop.inverse is not None
    body, inverse = jaxpr_as_fun(loop.body), jaxpr_as_fun(loop.inverse)
    num_rows = num_recorded(loop.body, loop.inverse)
    (row, *_), (consts, carry, xs) = loop.body.in_avals, loop.input_avals
    tape = [stacked(aval, loop.bound or 0) for aval in loop.body.out_avals[-num_rows:]]
    sizes = [loop.num_consts, loop.num_carry, num_rows]

    def forward(row: Any, *operands: Any) -> list[Any]:
        consts, carry, tape, x = split_list(operands, sizes)
        out = body(row, *consts, *carry, *x)
        carry, ys, recorded = split_list(out, [loop.num_carry, len(out) - loop.num_carry - num_rows])
        tape = [put(rows, row, new, appends=True) for rows, new in zip(tape, recorded, strict=True)]
        return [*carry, *tape, *ys]

    def back(row: Any, *operands: Any) -> list[Any]:
        consts, carry, tape, x = split_list(operands, sizes)
        recorded, tape = zip(*(get(rows, row) for rows in tape), strict=True)
        return [*inverse(row, *consts, *carry, *x, *recorded), *tape]

    types = [row, *consts, *carry, *tape, *xs]
    num_carry = loop.num_carry + num_rows
    return loop._replace(body=trace(forward, types), inverse=trace(back, types), num_carry=num_carry)
