"""Rows that all lanes of a batch walk: no lane is masked there, and none is filled.

Where lanes take similar numbers of steps (in groups), bodies ask which lanes are active with a primitive of their own.
It stays visible in them whatever derivative is taken, so a loop can be compiled as two: one for rows in which all lanes
are active, and one for the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src.core.jaxpr.expand import batch_expanded
from loopax._src.core.jaxpr.mapped_axis import batch_if_mapped
from loopax._src.core.jaxpr.util import Mask, bind_again, evaluate
from loopax._src.jax_internals import ClosedJaxpr, new_primitive, register, spec_of, vary_like

active_p = new_primitive("active_lanes")

_COLUMNS = 256  # in which many lanes are searched


class ActiveLanes(NamedTuple):
    """The parameters of the primitive. Operands are `row, *window`: the limits that each lane has of its own."""

    windows: Mask  # whether lanes have lower limits of their own, and upper ones
    lanes: int


def active_lanes(row: Any, window: Sequence[Any], windows: Mask, lanes: int) -> Any:
    """Which lanes have this row in their window; a bound that all share needs no test."""
    active = jnp.ones(lanes, bool)
    if windows[0]:
        active &= window[0] <= row
    if windows[1]:
        active &= row < window[-1]
    return active


def _active(row: Any, *window: Any, windows: Mask, lanes: int) -> list[Any]:
    return [active_lanes(row, window, windows, lanes)]


def _abstract(*avals: Any, **params: Any) -> list[Any]:
    return jax.make_jaxpr(lambda *xs: _active(*xs, **params))(*avals).out_avals


register(
    active_p,
    meaning=_active,
    params=ActiveLanes._fields,
    abstract_eval=_abstract,
    batch=batch_if_mapped(active_p, batch_expanded(_active)),
)


def visibly_active(row: Any, window: Sequence[Any], windows: Mask, lanes: int) -> Any:
    """Which lanes are active (`active_lanes`), as a primitive that stays visible in a body."""
    (active,) = active_p.bind(row, *window, windows=windows, lanes=lanes)
    return active


def an_active(active: Any) -> Any:
    """The number of a lane that is active; that of any lane if none is. active: bool[lanes].

    Of many lanes it is found in two steps, each of which XLA computes for many columns at once: a search through all of
    them takes fifteen times as long.
    """
    lanes = active.shape[0]
    if not isinstance(lanes, int) or lanes < 4 * _COLUMNS or any(spec_of(jax.typeof(active))):
        return jnp.argmax(active)
    rows = jnp.pad(active, (0, -lanes % _COLUMNS)).reshape(-1, _COLUMNS)
    column = jnp.argmax(rows.any(0))
    return column + _COLUMNS * jnp.argmax(rows[:, column])


def over_lanes(reduce: Callable[..., Any], values: Any) -> Any:
    """`reduce` of what each lane has, such as the largest, for many lanes in two steps, too. values: [lanes]."""
    lanes = values.shape[0] if values.ndim else 0
    if not isinstance(lanes, int) or lanes < 4 * _COLUMNS:
        return reduce(values)
    whole = lanes - lanes % _COLUMNS
    columns = reduce(values[:whole].reshape(-1, _COLUMNS), axis=0)
    return reduce(jnp.concatenate([columns, values[whole:]]))


class CommonRows(NamedTuple):
    """The rows `low ... high - 1` are walked by all lanes; None: no limit but the loop's."""

    low: Any
    high: Any


def common_rows(body: ClosedJaxpr, consts: Sequence[Any]) -> CommonRows | None:
    """Of a body (row, *consts, ...) that asks which lanes are active; None if it does not."""
    row, *inputs = body.jaxpr.invars[: 1 + len(consts)]
    values = dict(zip(inputs, consts, strict=True))
    for eqn in body.jaxpr.eqns:
        if eqn.primitive is active_p and eqn.invars[0] is row and all(atom in values for atom in eqn.invars[1:]):
            window, windows = [values[atom] for atom in eqn.invars[1:]], ActiveLanes(**eqn.params).windows
            return CommonRows(
                jnp.max(window[0]) if windows[0] else None,
                jnp.min(window[-1]) if windows[1] else None,
            )
    return None


def asks_for_active(body: ClosedJaxpr) -> bool:
    """Whether a body asks which lanes are active."""
    return any(eqn.primitive is active_p for eqn in body.jaxpr.eqns)


def unmasked(body: ClosedJaxpr) -> Callable[..., list[Any]]:
    """The body where all lanes are active; XLA removes what then has no effect."""

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive is not active_p:
            return bind_again(eqn, operands)
        return [vary_like(jnp.ones(ActiveLanes(**eqn.params).lanes, bool), eqn.outvars[0].aval)]

    return lambda *inputs: evaluate(body, inputs, equation)
