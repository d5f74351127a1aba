"""What a finished lane of a batch computes with.

Under `jax.vmap` a lane that has finished still executes the body, and its result is thrown away. From operands of its
own it could spin in an inner loop, or leave the body's domain. Nobody reads what is not a number there, until a
derivative multiplies it by zero and sums over lanes. So the operands of a finished lane are overwritten with those of a
lane that is still active (a batched double-where): always, or only in derivatives where the body is mere arithmetic.

Large constants of each lane (the weights of an ensemble) would be copied in every step. The operation is a primitive,
which stays visible in bodies: `core/lowering/rows.py` finds it there, and fills such constants once for each set of
active lanes.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.access_order import all_computed
from loopax._src.core.jaxpr.dependence import arithmetic, computed
from loopax._src.core.jaxpr.evaluate import batch_expanded
from loopax._src.core.jaxpr.narrow import changed
from loopax._src.core.jaxpr.types import batch_filled, batch_if_mapped, batch_in_front
from loopax._src.core.jaxpr.util import Mask, bind_again, evaluate, rewriting, trace, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, Primitive, ad, map_programs

# Rows that all lanes of a batch walk: no lane is masked there, and none is filled.
#
# Where lanes take similar numbers of steps (in groups), bodies ask which lanes are active with a primitive of their
# own. It stays visible in them whatever derivative is taken, so a loop can be compiled as two: one for rows in which
# all lanes are active, and one for the others.


active_p = jaxi.new_primitive("active_lanes")

_COLUMNS = 256  # in which many lanes are searched


def active_lanes(row: Any, *limits: Any, has_limits: Mask, lanes: int) -> list[Any]:
    """Which lanes have this row within their limits: the one result of the primitive.

    `limits` are those that each lane has of its own, and `has_limits` says whether it has a lower one, and an upper
    one. A bound that all share needs no test.
    """
    starts, stops = limits[: has_limits[0]], limits[has_limits[0] :]
    tests = [*(start <= row for start in starts), *(row < stop for stop in stops)]
    return [reduce(and_, tests)] if tests else [jnp.ones(lanes, bool)]


jaxi.register(
    active_p,
    meaning=active_lanes,
    params=["has_limits", "lanes"],
    batch=batch_if_mapped(active_p, batch_expanded(active_lanes)),
)


# Rows that each lane walks, where its predicate says whether it goes on: only the loop finds out how many.
#
# So a body says with a primitive which lanes are active, and carries the end of each: the row behind the last one that
# it has walked. A lane walks its rows without a gap: after the loop, its end says of every row whether the lane was
# active there. That is a buffer to which rows are appended (`core/buffer_versions.py`), so a derivative reads its last
# version: it stores and evaluates no predicate.


walk_row_p = jaxi.new_primitive("walk_row")


def walk_row(end: Any, active: Any, row: Any, *start: Any, reverse: bool) -> list[Any]:
    """The end of each lane after this row, and which lanes are active in it.

    Before its first row, the end of a lane is its start, which is the first row (in `reverse`, the one above it).
    `end`: int32[lanes]; `active`: bool[lanes]. `start` is that of each lane, if lanes do not start together: `walked`
    reads it, and `row`.
    """
    del row, start
    step = active.astype(end.dtype)
    return [end - step if reverse else end + step, active]


def walked_limits(end: Any, start: Sequence[Any], reverse: bool) -> tuple[Mask, tuple[Any, ...]]:
    """The limits of the rows that lanes have walked: whether each has a low and a high of its own, and these."""
    return ((True, bool(start)), (end, *start)) if reverse else ((bool(start), True), (*start, end))


def walked(end: Any, _: Any, row: Any, *start: Any, reverse: bool) -> Any:
    """Which lanes have walked a row, where `end` is that after the loop: bool[lanes]. Operands are those of a step."""
    has_limits, limits = walked_limits(end, start, reverse)
    return active_lanes(row, *limits, has_limits=has_limits, lanes=end.shape[0])[0]


def one_that_walked(end: Any, active: Any, row: Any, *start: Any, reverse: bool) -> Any:
    """The number of a lane that has walked a row that one of them has, where `end` and `active` are as in `walked`.

    Of lanes that start together, one that walks the most rows has walked each of them: the same one in every step.
    """
    del row
    return an_active(active if start else end == over_lanes(jnp.min if reverse else jnp.max, end))


jaxi.register(
    walk_row_p,
    meaning=walk_row,
    params=["reverse"],
    batch=batch_if_mapped(walk_row_p, batch_expanded(walk_row)),
)


def an_active(active: Any) -> Any:
    """The number of a lane that is active; that of any lane if none is. active: bool[lanes].

    Of many lanes it is found in two steps, each of which XLA computes for many columns at once: a search through all of
    them takes fifteen times as long.
    """
    lanes = active.shape[0]
    if not isinstance(lanes, int) or lanes < 4 * _COLUMNS or any(jaxi.spec_of(jax.typeof(active))):
        return jnp.argmax(active)
    rows = jnp.pad(active, (0, -lanes % _COLUMNS)).reshape(-1, _COLUMNS)
    column = jnp.argmax(rows.any(0))
    return column + _COLUMNS * jnp.argmax(rows[:, column])


# Visible in bodies: where a lane's end says which rows it has walked, a derivative takes `one_that_walked` instead.
an_active_p = jaxi.new_primitive("an_active")
jaxi.register(
    an_active_p,
    meaning=lambda active: [an_active(active)],
    params=[],
    batch=batch_if_mapped(an_active_p, batch_expanded(lambda active: [an_active(active)])),
)


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
    row, *inputs = body.invars[: 1 + len(consts)]
    values = dict(zip(inputs, consts, strict=True))
    for eqn in body.eqns:
        if eqn.primitive is active_p and eqn.invars[0] is row and all(atom in values for atom in eqn.invars[1:]):
            limits, (has_low, has_high) = [values[atom] for atom in eqn.invars[1:]], eqn.params["has_limits"]
            return CommonRows(jnp.max(limits[0]) if has_low else None, jnp.min(limits[-1]) if has_high else None)
    return None


@weakly_cached
def unmasked(body: ClosedJaxpr) -> ClosedJaxpr:
    """The body where all lanes are active; XLA removes what then has no effect."""

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive is not active_p:
            return bind_again(eqn, operands)
        return [jaxi.vary_like(jnp.ones(eqn.params["lanes"], bool), eqn.outvars[0].aval)]

    return trace(lambda *inputs: evaluate(body, inputs, equation), body.in_avals)


# never: derivatives are those of active lanes all the same; effects: only these depend on who is active;
# in_derivatives: this program is none; in_this_derivative: it is one, and parts of it may be none; in_transposes: lanes
# are summed where it walks back, and not where it walks ahead
When = Literal["always", "in_derivatives", "in_this_derivative", "in_transposes", "never", "effects"]


def pick(active: Any, a: Any, b: Any) -> Any:
    """Rows of `a` for active lanes, rows of `b` for the others; lanes may have several axes, or none."""
    if not jaxi.is_number(a.dtype):
        # JAX's transpose of a choice has zeros that are numbers. Those of this primitive are of the dtype.
        a, b = (
            fill_inactive_p.bind(chosen, jnp.int32(0), jnp.broadcast_to(x, a.shape), batch_axes=0, when="never")
            for chosen, x in ((active, a), (~active, b))
        )
    return jaxi.where(active.reshape(*active.shape, *(1,) * (a.ndim - active.ndim)), a, b)


def fill_inactive(active: Any, operands: Sequence[Any], batched: Sequence[bool], when: When = "always") -> list[Any]:
    """Give lanes that are not active the operands of one that is.

    active: bool[lanes]; operands: [lanes, ...] where `batched`, and shared by all lanes where not.
    """
    if active.size == 0:
        return list(operands)
    first = jnp.int32(0) if when == "never" else an_active_p.bind(active)[0]
    pairs = zip(operands, batched, strict=True)
    return [
        fill_inactive_p.bind(active, first, x, batch_axes=0, when=when) if is_batched else x for x, is_batched in pairs
    ]


# ---- programs that are derivatives, or parts of one: sums over lanes meet what finished lanes compute


def _with_fills(becomes: dict[When, When]) -> Callable[[ClosedJaxpr], ClosedJaxpr]:
    """Make a function of programs, in which operands are filled at other times."""

    @rewriting
    def rewritten(eqn: Any) -> Any:
        if eqn.primitive not in (fill_inactive_p, stop_inactive_p):
            return map_programs(eqn, rewritten)
        when = eqn.params["when"]
        return eqn.replace(params={**eqn.params, "when": becomes[when]}) if when in becomes else eqn

    return rewritten


# A program that is differentiated. What an earlier derivative has filled may be summed over lanes, and stays so.
filled_in_derivatives = _with_fills(
    {"in_derivatives": "in_this_derivative", "in_this_derivative": "always", "in_transposes": "always"}
)
# The known part of a derivative, and a step of which a transpose has been made: who walks ahead sums no lanes.
without_derivative = _with_fills({"in_this_derivative": "in_derivatives"})
# A batch may have been made of a derivative (of the rule of a `jax.custom_jvp`), which no other has differentiated.
filled_in_transposes = _with_fills({"in_derivatives": "in_transposes", "in_this_derivative": "in_transposes"})
without_transpose = _with_fills({"in_transposes": "in_derivatives"})
# What computes residuals, and a step in which cotangents are walked ahead.
filled_always = _with_fills(dict.fromkeys(("in_derivatives", "in_this_derivative", "in_transposes"), "always"))


# ---- the primitive: active bool[*batch, lanes], first int[*batch], x [*batch, lanes, ...] -> x, filled `when` it is

fill_inactive_p = Primitive("fill_inactive")
_FILLED = ("always", "in_this_derivative", "in_transposes")


def fills_now(eqn: Any) -> bool:
    """Whether an equation of the primitive fills the lanes of one batch where it stands."""
    return not eqn.params["batch_axes"] and eqn.params["when"] in _FILLED


def filled(active: Any, first: Any, x: Any, *, batch_axes: int, when: When) -> Any:
    """The meaning of the primitive."""
    if when not in _FILLED:
        return x

    def fill(active: Any, first: Any, x: Any) -> Any:
        if not jaxi.spec_of(jax.typeof(x))[0]:
            # XLA would fuse this with what writes the array, which it could not write in place.
            return pick(active, x, *all_computed([x[first][None]], [x]))
        # JAX does not slice an axis that is spread over an `Explicit` mesh: the lane is the sum of itself and zeros.
        is_first = jnp.arange(x.shape[0], dtype=first.dtype) == first
        return pick(active, x, pick(is_first, x, jaxi.zero(x.dtype)).sum(0, dtype=x.dtype, keepdims=True))

    for _ in range(batch_axes):
        fill = jax.vmap(fill)
    return jaxi.on_device(lambda x: fill(active, first, x), x)


def _of_active(active: Any, x: Any) -> Any:
    """The tangents, or cotangents, of active lanes, and zeros.

    What a finished lane computes is thrown away, so nothing depends on what it was given: there is no derivative from
    one lane to another, and a NaN in one lane's derivative reaches no other lane.
    """
    return pick(active, x, jaxi.zero(x.dtype))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Tangents of active lanes are their own; those of the others are zero.

    Operands are `active, first, x`, all with an axis of lanes behind `batch_axes` others; only `x` has a tangent.
    """
    out, tangent = fill_inactive_p.bind(*primals, **params), tangents[2]
    if not jaxi.is_nonzero(tangent):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _of_active(primals[0], tangent)


def _transpose(ct: Any, active: Any, _first: Any, x: Any, **_: Any) -> list[Any]:
    """The cotangent of `x`: that of the result for active lanes, and zeros.

    Operands are `active, first, x`; `x` is the linear one. It is a tangent where a batch of linear loops fills its
    operands, and a filled tangent is one that nothing reads.
    """
    ct = ad.Zero(x.aval) if isinstance(ct, ad.Zero) else _of_active(active, ct)
    return [None, None, ct]


jaxi.register(
    fill_inactive_p,
    meaning=filled,
    params=["batch_axes", "when"],
    jvp=_jvp,
    transpose=_transpose,
    batch=batch_in_front(fill_inactive_p, "batch_axes"),  # each batch fills its lanes with one of its own
)
computed[fill_inactive_p] = lambda _: []  # it is fused with what reads it
changed[fill_inactive_p] = 2


# ---- what keeps lanes out of a loop that are not active: where they are filled, they take the steps of an active one.
# Operands are `active, x, other`, each [*lanes]: `x`, but for lanes that are not active and not filled, which have
# `other`.


def _stopped(active: Any, x: Any, other: Any, *, when: When) -> list[Any]:
    return [x if when in _FILLED else jnp.where(active, x, other)]


stop_inactive_p: Primitive = jaxi.new_primitive("stop_inactive")
jaxi.register(
    stop_inactive_p,
    meaning=_stopped,
    params=["when"],
    batch=batch_filled(stop_inactive_p),
)


# ---- of one lane: x, where a lane that is not active is given an active one's. Operands are `active, x`.
#
# It stands in the body of a lane, and becomes the primitive above where lanes are batched.


def _batch_own(_: Any, operands: Sequence[Any], dims: Sequence[Any], when: When) -> Any:
    """A lane that is not active has what an active one has; what lanes share stays as it is."""
    (active, x), (active_dim, dim) = operands, dims
    if dim is None:
        return x, None
    x = jnp.moveaxis(x, int(dim), 0)
    if active_dim is None:
        return own_if_active_p.bind(active, x, when=when), 0
    return fill_inactive(active, [x], [True], when)[0], 0


own_if_active_p = Primitive("own_if_active")
jaxi.register(
    own_if_active_p,
    meaning=lambda _, x, **__: x,
    params=["when"],
    batch=batch_if_mapped(own_if_active_p, _batch_own),
)
arithmetic |= {active_p, walk_row_p, an_active_p, fill_inactive_p, stop_inactive_p, own_if_active_p}
