"""A loop that a user has called, with its operands: what a kind runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from loopax._src.core.ir.loop import Loop, LoopOutputs, Outcome
from loopax._src.jax_internals import jaxpr_as_fun


class LoopOperands(NamedTuple):
    """The operands of a loop, a pytree of arrays: it walks the rows from `low` to `high`, `high` excluded."""

    low: Any  # int32[]
    high: Any  # int32[]
    consts: Sequence[Any]  # what the body closes over
    carry: Sequence[Any]  # before the first step; where the loop has a condition, its first leaf says whether to go on
    xs: Sequence[Any]  # rows of a scan, `(bound, ...)`


@dataclass(frozen=True, eq=False)
class LoopCall:
    """A loop that a user has called, with its operands. `Kind.run` gets it, and returns its results.

    Everything is flat lists of arrays; `unpack` makes the user's pytree of a carry.
    """

    loop: Loop
    operands: LoopOperands
    is_fixed: bool  # it always takes as many steps as its bound
    where: str  # the user's function, for errors
    unpack: Callable[[Sequence[Any]], Any]  # from the arrays of a carry to the pytree that the user's body is given
    # (results, failed (bool[]), message, amount) -> results: raises where it failed. In the message, "{amount}" becomes
    # the number, in parentheses, or nothing where that is not known. With `throw=False`, results are NaN there.
    checked: Callable[[Any, Any, str, Any], Any]
    run_loop: Callable[[Loop, LoopOperands], Outcome]  # runs this loop, or a part of it, with a tape if it has one

    def run(self) -> Outcome:
        """The results of the loop, and the derivative that its kind's plan gives them."""
        return self.run_loop(self.loop, self.operands)

    def step(self, row: Any, carry: Sequence[Any], x: Sequence[Any] = ()) -> LoopOutputs:
        """Evaluate the body once: the carry after this step, and its rows of ys."""
        return self.loop.outputs(jaxpr_as_fun(self.loop.body)(row, *self.operands.consts, *carry, *x))

    def at(self, operands: LoopOperands) -> "LoopCall":
        """The same loop with other operands."""
        return replace(self, operands=operands)

    def stored_by(self, kind: Any) -> "LoopCall":
        """The same loop, whose gradients store what this kind says."""
        return replace(self, loop=self.loop._replace(storage=self.loop.storage.stored_by(kind)))
