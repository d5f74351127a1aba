"""A loop that a user has called, with its operands: what a kind runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from loopax._src.core.ir.loop import Loop, LoopOutputs, Outcome
from loopax._src.core.ir.without_effects import without_effects
from loopax._src.jax_internals import jaxpr_as_fun


class LoopOperands(NamedTuple):
    """The operands of a loop: a pytree of arrays. The loop takes the rows low, ..., high - 1.

    Attributes
    ----------
    low, high : int32[]
        The first row, and the row after the last.
    consts
        The arrays that the body closes over.
    carry
        The arrays of the first carry. If the loop has a condition, the first array says whether to take a step.
    xs
        The rows of a scan: arrays `(bound, ...)`.

    """

    low: Any  # int32[]
    high: Any  # int32[]
    consts: Sequence[Any]  # what the body closes over
    carry: Sequence[Any]  # before the first step; where the loop has a condition, its first leaf says whether to go on
    xs: Sequence[Any]  # rows of a scan, `(bound, ...)`


@dataclass(frozen=True, eq=False)
class LoopCall:
    """A loop that a user has called, with its operands.

    `Kind.run` gets a `LoopCall` and returns the results of the loop.

    Carries, rows and constants are flat lists of arrays.

    Attributes
    ----------
    loop
        The static description of the loop. `loop.bound` is the most steps, or None.
    operands : LoopOperands
        The operands of the loop.
    is_fixed : bool
        Whether the loop always takes as many steps as its bound.
    where : str
        The function of the user, for messages.
    unpack : callable
        `unpack(carry)` returns the pytree that the user's body gets, from the arrays of a carry.
    checked : callable
        `checked(results, failed, message, amount, throw=None)` returns the results, and raises at run time where
        `failed` (bool[]) is True. The error begins with the call of the loop and its line. `{amount}` in the message
        becomes the number `amount`, and its lane. With `throw=False`, the results are NaN instead; None is the `throw`
        of the loop.

    """

    loop: Loop
    operands: LoopOperands
    is_fixed: bool  # it always takes as many steps as its bound
    where: str  # the user's function, for errors
    unpack: Callable[[Sequence[Any]], Any]  # from the arrays of a carry to the pytree that the user's body is given
    # (results, failed (bool[]), message, amount) -> results: raises where it failed. In the message, "{amount}" becomes
    # the number, in parentheses, or nothing where that is not known. With `throw=False`, results are NaN there.
    checked: Callable[..., Any]
    run_loop: Callable[[Loop, LoopOperands], Outcome]  # runs this loop, or a part of it, with a tape if it has one

    def run(self) -> Outcome:
        """Run the loop, with the derivative that the plan of its kind gives."""
        return self.run_loop(self.loop, self.operands)

    def step(self, row: Any, carry: Sequence[Any], x: Sequence[Any] = ()) -> LoopOutputs:
        """Evaluate the body once, and return the next carry and a row of `ys` as the pair `(carry, ys)`.

        Prints and callbacks of the body belong to the steps of the loop, and do not happen here.
        """
        body = without_effects(self.loop.body)
        return self.loop.outputs(jaxpr_as_fun(body)(row, *self.operands.consts, *carry, *x))

    def at(self, operands: LoopOperands) -> "LoopCall":
        """Return the same loop with other operands."""
        return replace(self, operands=operands)

    def stored_by(self, kind: Any) -> "LoopCall":
        """Return the same loop; its gradients store what this kind says."""
        return replace(self, loop=self.loop._replace(storage=self.loop.storage.stored_by(kind)))
