"""What both ways to compile a reverse sweep have in common."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopax._src.core.ir.loop import EMPTY_SLOT
from loopax._src.core.ir.reverse_sweep import ReverseSweep
from loopax._src.core.jaxpr.util import split_list
from loopax._src.core.lowering.while_loop import Common, RowLoop, Step, Steps, read
from loopax._src.core.masking.all_active import CommonRows, common_rows, unmasked
from loopax._src.core.masking.substitute import Lent, in_stretches
from loopax._src.jax_internals import jaxpr_as_fun


class Track(NamedTuple):
    """The rows of the forward loop, by the number of steps from the first one."""

    first_row: Any  # the first row
    num_steps: Any
    ahead: RowLoop  # how the forward loop walked

    @classmethod
    def of(cls, static: ReverseSweep, low: Any, high: Any, checkpoint_rows: Any) -> "Track":
        """From the window of rows, and where the forward loop saved."""
        ahead = RowLoop(static.reverse, static.unroll)
        first_row = checkpoint_rows[0]
        num_steps = jnp.maximum(ahead.distance(first_row, low - 1 if static.reverse else high), 0)
        return cls(first_row, jnp.where(first_row == EMPTY_SLOT, 0, num_steps), ahead)

    def row(self, step: Any) -> Any:
        """The row of a step."""
        return self.ahead.advance(self.first_row, step)

    def step(self, row: Any) -> Any:
        """The step of a row."""
        return self.ahead.distance(self.first_row, row)


RowOf = Callable[[Any], Any]  # position -> row


class Functions(NamedTuple):
    """Both bodies of a sweep; the rows of xs are inside."""

    forward: Callable[..., list[Any]]  # (row, consts, state) -> state
    backward: Callable[..., tuple[list[Any], list[Any]]]  # (row, consts, carry, state) -> (carry, y)


class Bodies(NamedTuple):
    """What the steps of a sweep need."""

    functions: Functions
    consts: list[Any]
    lent: Lent | None
    common: tuple[CommonRows, Functions] | None  # rows that all lanes walk, and the bodies there

    def steps(
        self,
        make: Callable[[Functions, RowOf], Callable[[Sequence[Any]], Step]],
        ahead: RowLoop,
        start: Any,
        written: RowOf | None = None,
    ) -> Steps:
        """Steps whose positions count from the row `start`; `make` is told the row of a position.

        A position writes its row of ys, or the one `written` says.
        """

        def row_of(position: Any) -> Any:
            return ahead.advance(start, position)

        common = None
        if self.common is not None:
            rows, functions = self.common
            common = Common(make(functions, row_of), *_positions(rows, ahead, start))
        steps = Steps(make(self.functions, row_of), self.consts, written or row_of, common)
        if self.lent is None:
            return steps
        activity = jaxpr_as_fun(self.lent.activity)  # which lanes are active depends on the row alone
        lend = in_stretches(self.lent, self.consts, lambda p: activity(row_of(p.position), *self.consts)[0])
        return steps._replace(lend=lend)


def _positions(rows: CommonRows, ahead: RowLoop, start: Any) -> tuple[Any, Any]:
    """The first position and the one behind the last."""

    def position(row: Any) -> Any:
        return None if row is None else ahead.distance(start, row) + int(ahead.reverse)

    low, high = position(rows.low), position(rows.high)
    return (high, low) if ahead.reverse else (low, high)


def bodies_of(static: ReverseSweep, consts: list[Any], xs: list[Any]) -> Bodies:
    """The bodies of a sweep."""
    plain = _functions(static, jaxpr_as_fun(static.forward), jaxpr_as_fun(static.backward), xs)
    rows, common = common_rows(static.backward, consts), None
    if rows is not None:
        common = rows, _functions(static, unmasked(static.forward), unmasked(static.backward), xs)
    return Bodies(plain, consts, static.lent, common)


def _functions(static: ReverseSweep, forward_body: Any, backward_body: Any, xs: list[Any]) -> Functions:
    def forward(row: Any, consts: Sequence[Any], state: list[Any]) -> list[Any]:
        return forward_body(row, *consts, *state, *(read(x, row) for x in xs[: static.num_forward_xs]))

    def backward(row: Any, consts: Sequence[Any], carry: list[Any], state: list[Any]) -> tuple[list[Any], list[Any]]:
        out = backward_body(row, *consts, *carry, *state, *(read(x, row) for x in xs))
        carry, y = split_list(out, [static.num_carry])
        return carry, y

    return Functions(forward, backward)
