"""Free lanes: a loop with one loop in its body as a single loop, in which lanes need not wait for each other.

In lockstep a batch of nested loops waits at every outer step for the lane with the most inner steps. Here one step of
the single loop is, for each lane, whatever that lane is at::

    if it is to begin an outer step:  what stands before the inner loop
    if the inner loop goes on:        one step of it
    if the inner loop has ended:      what stands after it; on to the next outer step

Each of the three is a loop of at most one step, which in a batch runs if any lane needs it, and in which the other
lanes borrow. So this is an ordinary loop to every transformation. (Dance et al. 2025, docs/references.md.)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._compat import ClosedJaxpr, Literal, jaxpr_as_fun, open_constants, replace_jaxpr, zeros
from loopax._errors import FREE_NEEDS_BOUNDS, free_form_message
from loopax.core.jaxprs import INDEX, MOST_STEPS, split, stacked, trace, weakly_cached
from loopax.core.loop import Loop, Outcome, lending, loop_p, run
from loopax.core.storage import EveryCarry, EveryResidual
from loopax.core.walk import Walk, read, write


class Parts(NamedTuple):
    """The body of a loop, cut at the loop in it."""

    before: ClosedJaxpr  # (row, *consts, *carry, *x) -> (low, high, *inner carry, *kept)
    operands: ClosedJaxpr  # (row, *consts, *carry, *x, *kept) -> (*inner consts, *inner xs)
    after: ClosedJaxpr  # (row, *consts, *carry, *x, *kept, *inner results) -> (*carry, *y)
    inner: Loop
    num_kept: int

    @property
    def kept_avals(self) -> list[Any]:
        """The types of what is computed before the inner loop for use in or after it."""
        return self.before.out_avals[2 + self.inner.num_carry :]


class State(NamedTuple):
    """Where a lane is."""

    goes_on: Any  # it takes this outer step, or is in it
    inside: Any  # it has begun the outer step
    row: Any  # of the outer step
    num_steps: Any  # outer steps that are done
    carry: list[Any]
    ys: list[Any]
    inner_row: Any  # of the next inner step
    inner_end: Any  # the first inner row that is not walked
    inner_steps: Any
    inner_carry: list[Any]
    inner_ys: list[Any]
    kept: list[Any]


@weakly_cached
def _parts(loop: Loop) -> Parts:
    body = trace(lambda *inputs: _inlined(loop.body, inputs), loop.body.in_avals)
    loops = [eqn for eqn in body.jaxpr.eqns if eqn.primitive is loop_p]
    if len(loops) != 1:
        raise ValueError(free_form_message(len(loops)))
    (at,) = loops
    front, behind = _around(body.jaxpr.eqns, at)
    made = {variable for eqn in front for variable in eqn.outvars}
    inner = lending(Loop(**at.params))
    (low, high), consts, carry, xs = split(at.invars, [2, *inner.sizes])
    used = [*consts, *xs, *(atom for eqn in behind for atom in eqn.invars), *body.jaxpr.outvars]
    kept = list(dict.fromkeys(atom for atom in used if not isinstance(atom, Literal) and atom in made))
    inputs = body.jaxpr.invars
    return Parts(
        before=replace_jaxpr(body, inputs, [low, high, *carry, *kept], front),
        operands=replace_jaxpr(body, [*inputs, *kept], [*consts, *xs], []),
        after=replace_jaxpr(body, [*inputs, *kept, *at.outvars], body.jaxpr.outvars, behind),
        inner=inner,
        num_kept=len(kept),
    )


def _around(eqns: Sequence[Any], at: Any) -> tuple[list[Any], list[Any]]:
    """The equations that do not need this one's results, and those that do."""
    results, front, behind = set(at.outvars), [], []
    for eqn in eqns:
        if any(not isinstance(atom, Literal) and atom in results for atom in eqn.invars):
            results.update(eqn.outvars)
            behind.append(eqn)
        elif eqn is not at:
            front.append(eqn)
    return front, behind


def _inlined(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr without the `jit`s around loops."""
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, inputs, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [value(atom) for atom in eqn.invars]
        if eqn.primitive.name == "jit" and _has_loop(eqn.params["jaxpr"]):
            outputs = _inlined(eqn.params["jaxpr"], operands)
        else:
            outputs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [value(atom) for atom in closed.jaxpr.outvars]


def _has_loop(closed: ClosedJaxpr) -> bool:
    eqns = closed.jaxpr.eqns
    return any(e.primitive is loop_p or (e.primitive.name == "jit" and _has_loop(e.params["jaxpr"])) for e in eqns)


def _at_most_once(needed: Any, function: Callable[..., list[Any]], values: Sequence[Any]) -> list[Any]:
    """`function(*values)` where it is needed, else the values as they are: a loop of one step or none."""

    def body(_: Any, __: Any, *values: Any) -> list[Any]:
        return [jnp.zeros((), bool), *function(*values)]

    raw = jax.make_jaxpr(body)(INDEX, jax.typeof(needed), *map(jax.typeof, values))
    opened, closed_over = open_constants(raw)
    (*consts, row), rest = split(opened.jaxpr.invars, [len(closed_over) + 1])
    loop = Loop(
        replace_jaxpr(opened, [row, *consts, *rest], opened.jaxpr.outvars),
        num_consts=len(consts),
        num_carry=len(rest),
        bound=1,
        reverse=False,
        predicated=True,
        unroll=1,
        storage=EveryResidual(reason="one step or none"),
    )
    out = run(loop, jnp.int32(0), jnp.int32(1), closed_over, [needed, *values], [])
    return out.carry[1:]


class Machine:
    """One step of a lane."""

    def __init__(self, loop: Loop, parts: Parts, low: Any, high: Any, consts: Sequence[Any], xs: Sequence[Any]) -> None:
        """The operands that do not change."""
        self.loop, self.parts, self.inner = loop, parts, parts.inner
        self.low, self.high, self.consts, self.xs = low, high, consts, xs
        self.walk, self.inner_walk = Walk(loop.reverse), Walk(self.inner.reverse)

    def start(self, carry: Sequence[Any]) -> State:
        """Before the first step."""
        inner_carry = [zeros(aval) for aval in self.inner.output_avals[0]]
        inner_ys = [zeros(stacked(aval, self.inner.bound or 0)) for aval in self.inner.output_avals[1]]
        nothing = jnp.int32(0)
        return State(
            goes_on=self.goes_on(self.walk.first(self.low, self.high), carry),
            inside=jnp.zeros((), bool),
            row=self.walk.first(self.low, self.high),
            num_steps=nothing,
            carry=list(carry),
            ys=[zeros(stacked(aval, self.loop.bound or 0)) for aval in self.loop.output_avals[1]],
            inner_row=nothing,
            inner_end=nothing,
            inner_steps=nothing,
            inner_carry=inner_carry,
            inner_ys=inner_ys,
            kept=[zeros(aval) for aval in self.parts.kept_avals],
        )

    def goes_on(self, row: Any, carry: Sequence[Any]) -> Any:
        """Whether a lane takes an outer step at this row."""
        ahead = (self.low <= row) & (row < self.high)
        return ahead & carry[0] if self.loop.predicated else ahead

    def inner_goes_on(self, state: State) -> Any:
        """Whether a lane that is inside takes an inner step."""
        row, end = state.inner_row, state.inner_end
        if self.inner.bound is None and self.inner.predicated:
            return state.inner_carry[0]
        ahead = row > end if self.inner.reverse else row < end
        return ahead & state.inner_carry[0] if self.inner.predicated else ahead

    def inputs(self, state: State) -> list[Any]:
        """Of the outer body."""
        return [state.row, *self.consts, *state.carry, *(read(x, state.row) for x in self.xs)]

    def step(self, state: State) -> State:
        """Begin, take an inner step, end: what the lane is at."""
        state = self.begin(state)
        if self.inner.bound != 0:
            state = self.inner_step(state)
        return self.end(state)

    def begin(self, state: State) -> State:
        """What stands before the inner loop."""
        sizes = [2, self.inner.num_carry]

        def begin(*_: Any) -> list[Any]:
            (low, high), carry, kept = split(jaxpr_as_fun(self.parts.before)(*self.inputs(state)), sizes)
            first, end = (high - 1, low - 1) if self.inner.reverse else (low, high)
            return [first, end, *carry, *kept]

        values = [state.inner_row, state.inner_end, *state.inner_carry, *state.kept]
        needed = state.goes_on & ~state.inside
        (first, end), carry, kept = split(_at_most_once(needed, begin, values), sizes)
        ys = [jnp.where(needed, jnp.zeros((), y.dtype), y) for y in state.inner_ys]
        return state._replace(
            inside=state.inside | needed,
            inner_row=first,
            inner_end=end,
            inner_steps=jnp.where(needed, 0, state.inner_steps),
            inner_carry=carry,
            inner_ys=ys,
            kept=kept,
        )

    def inner_step(self, state: State) -> State:
        """One step of the inner loop."""
        needed = state.inside & self.inner_goes_on(state)
        y_avals = self.inner.output_avals[1]

        def step(*values: Any) -> list[Any]:
            carry = values[: self.inner.num_carry]
            operands = jaxpr_as_fun(self.parts.operands)(*self.inputs(state), *state.kept)
            consts, xs = split(operands, [self.inner.num_consts])
            rows = [read(x, state.inner_row) for x in xs]
            return jaxpr_as_fun(self.inner.body)(state.inner_row, *consts, *carry, *rows)

        values = [*state.inner_carry, *map(zeros, y_avals)]
        carry, rows = split(_at_most_once(needed, step, values), [self.inner.num_carry])
        counted = (needed & (state.inner_steps < MOST_STEPS)).astype(jnp.int32)
        return state._replace(
            inner_row=self.inner_walk.advance(state.inner_row, counted),
            inner_steps=state.inner_steps + counted,
            inner_carry=carry,
            inner_ys=_written(state.inner_ys, state.inner_row, rows, needed),
        )

    def end(self, state: State) -> State:
        """What stands after the inner loop."""
        needed = state.inside & ~self.inner_goes_on(state)
        y_avals = self.loop.output_avals[1]

        def end(*_: Any) -> list[Any]:
            results = [state.inner_steps, *state.inner_carry, *state.inner_ys]
            return jaxpr_as_fun(self.parts.after)(*self.inputs(state), *state.kept, *results)

        values = [*state.carry, *map(zeros, y_avals)]
        carry, rows = split(_at_most_once(needed, end, values), [self.loop.num_carry])
        row = jnp.where(needed, self.walk.advance(state.row, 1), state.row)
        return state._replace(
            goes_on=self.goes_on(row, carry),
            inside=state.inside & ~needed,
            row=row,
            num_steps=state.num_steps + needed.astype(jnp.int32),
            carry=carry,
            ys=_written(state.ys, state.row, rows, needed),
        )


def _written(buffers: Sequence[Any], row: Any, values: Sequence[Any], needed: Any) -> list[Any]:
    """The buffers with a row written, where that is needed."""
    pairs = zip(buffers, values, strict=True)
    return [write(buffer, row, jnp.where(needed, value, read(buffer, row))) for buffer, value in pairs]


def run_free(
    loop: Loop, low: Any, high: Any, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]
) -> Outcome:
    """Run the loop as a single one."""
    parts = _parts(loop)
    if loop.bound == 0:
        return run(loop, low, high, consts, carry, xs)
    bound, sizes = _bound(loop, parts.inner), [2, len(consts), len(xs)]
    if bound is None and isinstance(loop.storage, EveryCarry | EveryResidual):
        raise ValueError(FREE_NEEDS_BOUNDS)
    start, treedef = jax.tree.flatten(Machine(loop, parts, low, high, consts, xs).start(carry))
    operands = [low, high, *consts, *xs]

    def body(_: Any, *values: Any) -> list[Any]:
        (low, high), consts, xs, leaves = split(values, sizes)
        state = Machine(loop, parts, low, high, consts, xs).step(treedef.unflatten(leaves))
        return jax.tree.leaves(state)

    flat = Loop(
        trace(body, [INDEX, *map(jax.typeof, operands), *map(jax.typeof, start)]),
        num_consts=len(operands),
        num_carry=len(start),
        bound=bound,
        reverse=False,
        predicated=True,
        unroll=1,
        storage=loop.storage,
    )
    out = run(flat, jnp.int32(0), jnp.int32(MOST_STEPS if bound is None else bound), operands, start, [])
    last = treedef.unflatten(out.carry)
    return Outcome(last.num_steps, last.carry, last.ys, [], [])


def _bound(loop: Loop, inner: Loop) -> int | None:
    """The most steps of the single loop."""
    if loop.bound is None or inner.bound is None:
        return None
    bound = loop.bound * max(inner.bound, 1)
    return bound if bound < MOST_STEPS else None
