"""A loop by the numbers of its steps: parts of it, and a ring of the carries before its last steps."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core import Asked, BoundLoop, Kind, Loop, LoopCall, LoopInputs, LoopOperands, Outcome, run
from loopax._src.core.ir.inverse import num_recorded
from loopax._src.core.ir.without_effects import without_effects
from loopax._src.core.jaxpr.util import INDEX, split_list, trace, weakly_cached
from loopax._src.core.row_buffers.primitives import put
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun, keep_bits, on_device


@dataclass(frozen=True, eq=False)
class Steps:
    """A loop that walks forward from row 0, so that a row is the number of a step."""

    loop: Loop
    operands: LoopOperands
    whole: LoopCall
    bound_loop: BoundLoop  # without leaves of the carry that do not change

    @classmethod
    def of(cls, call: LoopCall) -> "Steps":
        """Of a loop as it was called."""
        low, high, *inputs = call.operands
        bound = BoundLoop.of(call.loop, low, high, LoopInputs(*inputs))
        consts, carry, xs = bound.inputs(LoopInputs(*inputs))
        loop = bound.loop
        if loop.reverse:
            body, inverse = _by_step(loop.body), loop.inverse and _by_step(loop.inverse)
            loop = loop._replace(body=body, inverse=inverse, num_consts=loop.num_consts + 1, reverse=False)
            consts, xs = [high - 1, *consts], [_turned(x, high) for x in xs]
        return cls(loop, LoopOperands(jnp.int32(0), high - low, consts, carry, xs), call, bound)

    def results(self, out: Outcome) -> Outcome:
        """The results of the loop as it was called."""
        out = self.bound_loop.outcome(out, self.whole.operands.carry)
        if not self.whole.loop.reverse:
            return out
        return out._replace(ys=[_turned(y, self.whole.operands.high) for y in out.ys])

    def unconditional(self) -> "Steps":
        """The steps without their condition and effects: they have been taken, and are only evaluated again."""
        return replace(self, loop=self.loop._replace(body=without_effects(self.loop.body), predicated=False))

    def part(
        self,
        first: Any,
        operands: LoopOperands,
        bound: int,
        kind: Kind,
        is_fixed: bool = False,
        is_shown: bool = False,
    ) -> Outcome:
        """Run at most `bound` steps, from number `first` on; the window and the rows of `operands` are theirs.

        `explain` shows the part that is the loop to its user.
        """
        loop = self.loop._replace(
            body=_from_step(self.loop.body),
            inverse=self.loop.inverse and _from_step(self.loop.inverse),
            num_consts=self.loop.num_consts + 1,
            bound=bound,
            storage=Asked.of(kind, bound, is_fixed, bound_is_loose=False),
            reporting=None,
            debug_info=self.loop.debug_info if is_shown else None,
        )
        return self.whole.run_loop(loop, operands._replace(consts=[first, *operands.consts]))

    def with_ring(self, operands: LoopOperands, size: int) -> tuple[Outcome, list[Any]]:
        """Run all steps, and keep the carries before the last: that before step i is in row i modulo `size`."""
        loop, num_carry = self.loop, self.loop.num_carry
        function, num_ys = jaxpr_as_fun(loop.body), len(loop.output_avals.ys) - num_recorded(loop.body, loop.inverse)

        def body(step: Any, *inputs: Any) -> list[Any]:
            consts, carry, rings, x = split_list(inputs, [loop.num_consts, num_carry, num_carry])
            out = loop.outputs(function(step, *consts, *carry, *x))
            rings = [put(ring, step % size, leaf) for ring, leaf in zip(rings, carry, strict=True)]
            return [*out.carry, *rings, *out.ys[:num_ys]]

        rings = [jnp.broadcast_to(leaf, (size, *leaf.shape)) for leaf in operands.carry]
        consts, carry, xs = loop.input_avals
        types = [INDEX, *consts, *carry, *map(jax.typeof, rings), *xs]
        ringed = loop._replace(body=trace(body, types), inverse=None, num_carry=2 * num_carry)
        out = run(ringed, *operands._replace(carry=[*operands.carry, *rings]))
        carry, rings = split_list(out.carry, [num_carry])
        return out._replace(carry=carry), rings


@weakly_cached
def _from_step(body: ClosedJaxpr) -> ClosedJaxpr:
    """The body of a part of the steps, whose first constant is the number of its first step."""
    function = jaxpr_as_fun(body)
    return trace(lambda step, first, *inputs: function(first + step, *inputs), [INDEX, *body.in_avals])


@weakly_cached
def _by_step(body: ClosedJaxpr) -> ClosedJaxpr:
    """The body of a loop that walks backward, whose first constant is the row of the first step."""
    function = jaxpr_as_fun(body)
    return trace(lambda step, last, *inputs: function(last - step, *inputs), [INDEX, *body.in_avals])


def _turned(rows: Any, high: Any) -> Any:
    """From rows as they are to rows in the order of steps, which go from row high - 1 to row 0; and back."""
    return on_device(lambda rows: keep_bits(_rolled, jnp.flip(rows, 0), high - rows.shape[0]), rows)


def _rolled(rows: Any, shift: Any) -> Any:
    return jnp.roll(rows, shift, 0)
