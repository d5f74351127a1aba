"""Large constants of lanes, filled once for each set of active lanes instead of once in each step.

What a finished lane reads of constants (`masking/substitute.py`) changes only when a lane finishes. So a loop whose
body fills large constants is compiled as two nested loops: the outer one fills them for the lanes that are active now,
and the inner one takes steps while the active lanes are still these.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from loopax._src.core.jaxpr.util import num_bytes, weakly_cached
from loopax._src.core.masking.substitute import fill_inactive, fill_inactive_p, fills_now
from loopax._src.jax_internals import ClosedJaxpr, dce, jaxpr_as_fun, replace_jaxpr

# Constants of all lanes together from which on this pays (measured in docs/benchmark.md); below it the additional loop
# costs more than the copies.
LARGE_CONSTANTS_BYTES = 64 * 1024


class FilledOutside(NamedTuple):
    """A body whose large constants are filled before it."""

    body: ClosedJaxpr  # (row, *consts, *filled consts, *carry, *x) -> (*carry, *y)
    activity: ClosedJaxpr  # (row, *consts, *carry) -> bool[lanes]: which lanes are active at this step
    which: tuple[int, ...]  # of the constants, in the order of the filled ones

    def at(self, consts: Sequence[Any], active_at: Callable[[Any], Any], state: Any) -> tuple[list[Any], Any]:
        """The constants and the filled ones in this state; and whether a later state has the same active lanes."""
        active = active_at(state)
        filled = fill_inactive(active, [consts[i] for i in self.which], [True] * len(self.which))
        return [*consts, *filled], lambda later: jnp.all(active_at(later) == active)


@weakly_cached
def filled_outside(body: ClosedJaxpr, num_consts: int, num_carry: int) -> FilledOutside | None:
    """The body with its large constants filled outside; None where it fills none, or what is active is not known there.

    A body is (row, *consts, *carry, *x) -> ...; which lanes are active must follow from row, consts and the first
    `num_carry` operands behind them.
    """
    jaxpr = body.jaxpr
    row, consts = jaxpr.invars[0], list(jaxpr.invars[1 : 1 + num_consts])
    rest = jaxpr.invars[1 + num_consts :]
    fills = [eqn for eqn in jaxpr.eqns if eqn.primitive is fill_inactive_p and fills_now(eqn)]
    fills = [eqn for eqn in fills if any(eqn.invars[2] is const for const in consts)]
    fills = [eqn for eqn in fills if eqn.invars[0] is fills[0].invars[0]]
    if num_bytes(eqn.outvars[0].aval for eqn in fills) < LARGE_CONSTANTS_BYTES or not fills:
        return None
    activity = replace_jaxpr(body, jaxpr.invars, [fills[0].invars[0]])
    activity, used = dce(activity, [True], [True] * (1 + num_consts + num_carry) + [False] * (len(rest) - num_carry))
    if any(used[1 + num_consts + num_carry :]):
        return None
    inputs = [row, *consts, *(eqn.outvars[0] for eqn in fills), *rest]
    others = [eqn for eqn in jaxpr.eqns if all(eqn is not fill for fill in fills)]
    filled = dce(replace_jaxpr(body, inputs, jaxpr.outvars, others), [True] * len(jaxpr.outvars), True)[0]
    return FilledOutside(filled, activity, tuple(consts.index(eqn.invars[2]) for eqn in fills))


def active_of(outside: FilledOutside, consts: Sequence[Any], row: Any, carry: Sequence[Any]) -> Any:
    """Which lanes are active at this row and carry."""
    return jaxpr_as_fun(outside.activity)(row, *consts, *carry)[0]
