"""What both ways to compile a reverse sweep have in common."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopax._compat import jaxpr_as_fun
from loopax.core.jaxprs import split
from loopax.core.lending import Lent, in_stretches
from loopax.core.loop import UNUSED
from loopax.core.replay import Replay
from loopax.core.walk import Walk, read


class Track(NamedTuple):
    """The rows of the forward loop, by the number of steps from the first one."""

    origin: Any  # the first row
    num_steps: Any
    ahead: Walk  # how the forward loop walked

    @classmethod
    def of(cls, static: Replay, low: Any, high: Any, marks: Any) -> "Track":
        """From the window of rows, and where the forward loop saved."""
        ahead = Walk(static.reverse, static.unroll)
        origin = marks[0]
        num_steps = jnp.maximum(ahead.distance(origin, low - 1 if static.reverse else high), 0)
        return cls(origin, jnp.where(origin == UNUSED, 0, num_steps), ahead)

    def row(self, step: Any) -> Any:
        """The row of a step."""
        return self.ahead.advance(self.origin, step)

    def step(self, row: Any) -> Any:
        """The step of a row."""
        return self.ahead.distance(self.origin, row)


class Bodies(NamedTuple):
    """Both bodies as functions of row, constants and state; the rows of xs are inside."""

    forward: Any  # (row, consts, state) -> state
    backward: Any  # (row, consts, carry, state) -> (carry, y)
    consts: list[Any]
    lent: Lent | None

    def lend_at(self, row_of: Any) -> Any:
        """How constants are lent, if they are; which lanes are active depends on the row alone."""
        if self.lent is None:
            return None
        activity = jaxpr_as_fun(self.lent.activity)
        return in_stretches(self.lent, self.consts, lambda p: activity(row_of(p.position), *self.consts)[0])


def bodies_of(static: Replay, consts: list[Any], xs: list[Any]) -> Bodies:
    """The bodies of a sweep."""
    forward_body, backward_body = jaxpr_as_fun(static.forward), jaxpr_as_fun(static.backward)
    forward_xs = xs[: static.num_forward_xs]

    def forward(row: Any, consts: Sequence[Any], state: list[Any]) -> list[Any]:
        return forward_body(row, *consts, *state, *(read(x, row) for x in forward_xs))

    def backward(row: Any, consts: Sequence[Any], carry: list[Any], state: list[Any]) -> Any:
        out = backward_body(row, *consts, *carry, *state, *(read(x, row) for x in xs))
        carry, y = split(out, [static.num_carry])
        return carry, y

    return Bodies(forward, backward, consts, static.lent)
