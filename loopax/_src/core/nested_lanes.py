"""Free lanes: a loop with one loop in its body as a single loop, in which lanes need not wait for each other.

In lockstep a batch of nested loops waits at every outer step for the lane with the most inner steps. Here one step of
the single loop is, for each lane, whatever that lane is at::

    if it is to begin an outer step:  what stands before the inner loop
    if the inner loop goes on:        one step of it
    if the inner loop has ended:      what stands after it; on to the next outer step

Each of the three is a loop of at most one step, which in a batch runs if any lane needs it, and in which the other
lanes are filled. So this is an ordinary loop to every transformation. (Dance et al. 2025, docs/references.md.)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.batching.groups import run_function
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.loop import NO_STOP, NOT_STARTED, Loop, Outcome, asked_as, loop_p, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.jaxpr.types import trace_carrying
from loopax._src.core.jaxpr.util import (
    INDEX,
    MOST_STEPS,
    bind_again,
    evaluate,
    split_list,
    stacked,
    trace,
    weakly_cached,
)
from loopax._src.core.lowering.rows import RowLoop, read, write
from loopax._src.jax_internals import ClosedJaxpr, Literal, jaxpr_as_fun

# In a batch, lanes write rows of their own, which XLA's CPU backend does lane by lane. Up to so many rows it is faster
# to select in all of them.
FEW_ROWS = 128


class LaneState(NamedTuple):
    """Where a lane is in the loop."""

    row: Any  # of the next step
    end: Any  # the first row that is not walked
    num_steps: Any
    carry: list[Any]
    ys: list[Any]
    kept: list[Any]


class SplitProgram(NamedTuple):
    """A program, cut at the only loop in it, for lanes of which each is at another step of the loop.

    `inputs()` gives the inputs of the program for a lane, where they are needed.
    """

    before: ClosedJaxpr  # (*inputs) -> (low, high, *carry, *kept)
    operands: ClosedJaxpr  # (*inputs, *kept) -> (*consts, *xs) of the loop
    after: ClosedJaxpr  # (*inputs, *kept, *results of the loop) -> outputs
    loop: Loop

    def start(self) -> LaneState:
        """A place in the state of a lane that has not begun."""
        carry, ys = self.loop.output_avals
        rows = [jaxi.zeros(stacked(aval, self.loop.bound or 0)) for aval in ys]
        nothing, kept = jnp.int32(0), self.before.out_avals[2 + self.loop.num_carry :]
        return LaneState(nothing, nothing, nothing, list(map(jaxi.zeros, carry)), rows, list(map(jaxi.zeros, kept)))

    def goes_on(self, at: LaneState) -> Any:
        """Whether a lane takes a step."""
        if self.loop.bound is None and self.loop.predicated:
            return _may_go_on(self.loop, at.carry)
        ahead = at.row > at.end if self.loop.reverse else at.row < at.end
        return ahead & _may_go_on(self.loop, at.carry) if self.loop.predicated else ahead

    def begin(self, needed: Any, inputs: Callable[[], list[Any]], at: LaneState) -> LaneState:
        """What stands before the loop, where it is needed."""

        def before(*_: Any) -> list[Any]:
            # Before: [low, high, *carry, *kept] -> After: [first row, the first that is not walked, *carry, *kept]
            low, high, *rest = jaxpr_as_fun(self.before)(*inputs())
            return [*((high - 1, low - 1) if self.loop.reverse else (low, high)), *rest]

        row, end, *rest = at_most_once(needed, before, [at.row, at.end, *at.carry, *at.kept])
        carry, kept = split_list(rest, [self.loop.num_carry])
        ys = [jaxi.where(needed, jaxi.zeros(jax.typeof(y)), y) for y in at.ys]
        return LaneState(row, end, jnp.where(needed, 0, at.num_steps), carry, ys, kept)

    def step(self, needed: Any, inputs: Callable[[], list[Any]], at: LaneState) -> LaneState:
        """One step, where it is needed."""
        loop = self.loop
        if loop.bound == 0:
            return at

        def step(*values: Any) -> list[Any]:
            consts, xs = split_list(jaxpr_as_fun(self.operands)(*inputs(), *at.kept), [loop.num_consts])
            return jaxpr_as_fun(loop.body)(at.row, *consts, *values[: loop.num_carry], *(read(x, at.row) for x in xs))

        return after_step(loop, at, needed, needed & (at.num_steps < MOST_STEPS), step)

    def end(self, inputs: list[Any], at: LaneState) -> list[Any]:
        """What stands after the loop."""
        return jaxpr_as_fun(self.after)(*inputs, *at.kept, at.num_steps, *at.carry, *at.ys)


_ONE_INNER_LOOP = (
    "lanes='free' is for a loop whose body holds one inner loop, and this body holds",
    ", or leave lanes='lockstep'. The inner loop may not be batched itself (`jax.vmap` in the body).",
)
_TAKES_NO_INVERSE = (
    "does not take a kind that brings an inverse. Choose another kind, such as `Checkpointed()`, or write the loop as "
    "a while_loop, fori_loop or scan of its own."
)


@weakly_cached
def split_at_loop(program: ClosedJaxpr, holds: str, otherwise: str) -> SplitProgram:
    """Cut a program at the only loop in it. Where there is not one, the error begins and ends with these words."""
    flat = trace(lambda *inputs: evaluate(program, inputs, bind_again, inlined=_jit_with_loop), program.in_avals)
    loops = [eqn for eqn in flat.eqns if eqn.primitive is loop_p]
    for eqn in loops:
        # What is around a loop gives it another derivative than its own, and a split program has it elsewhere.
        if derivative := Loop(**eqn.params).derivative:
            raise NotImplementedError(
                f"a loop of which one is made with others does not take derivative={derivative!r}. Leave the "
                "derivative out, or leave the lanes in lockstep or compact."
            )
    if len(loops) != 1:
        # A loop that nobody uses has been removed by now.
        found = f"{len(loops)}." if loops else "none. (A loop does not count if its results are not used: return them.)"
        raise ValueError(
            f"{holds} {found} The form it needs: outside of `cond`, `scan`, `jax.checkpoint` and other loops, one call "
            "of `loopax.while_loop`, `loopax.fori_loop` or `loopax.scan`; before and after it, anything. Make one loop "
            f"of several{otherwise}"
        )
    (at,) = loops
    loop = Loop(**at.params)
    if loop.reporting is not None:
        raise NotImplementedError(
            "a loop with progress= stands in the body of a loop with lanes='free', or in the function of `lanes_map`. "
            "It is taken apart there, step by step, and cannot show how far it is. Leave its progress= out; a loop "
            "with lanes='free' can show its own."
        )
    if loop.inverse is not None:
        raise NotImplementedError(f"a loop inside of another, of which one is made (lanes='free') {_TAKES_NO_INVERSE}")
    # Before: the equations in their order -> After: those that do not need the loop's results, and those that do
    results, front, behind = set(at.outvars), [], []
    for eqn in flat.eqns:
        if any(not isinstance(atom, Literal) and atom in results for atom in eqn.invars):
            results.update(eqn.outvars)
            behind.append(eqn)
        elif eqn is not at:
            front.append(eqn)
    low, high, *operands = at.invars
    consts, carry, xs = loop.inputs(operands)
    # Kept is what is computed before the loop for use in it or after it.
    made = {variable for eqn in front for variable in eqn.outvars}
    used = [*consts, *xs, *(atom for eqn in behind for atom in eqn.invars), *flat.outvars]
    kept = list(dict.fromkeys(atom for atom in used if not isinstance(atom, Literal) and atom in made))
    inputs = flat.invars
    return SplitProgram(
        before=jaxi.replace_jaxpr(flat, inputs, [low, high, *carry, *kept], front),
        operands=jaxi.replace_jaxpr(flat, [*inputs, *kept], [*consts, *xs], []),
        after=jaxi.replace_jaxpr(flat, [*inputs, *kept, *at.outvars], flat.outvars, behind),
        loop=loop,
    )


def _jit_with_loop(eqn: Any) -> ClosedJaxpr | None:
    """The program of a `jit` with a loop in it. A `jax.checkpoint` is left alone: it says what a gradient stores."""
    program = jaxi.inlinable(eqn) if jaxi.is_jit(eqn) else None
    has_loop = program and any(inner.primitive is loop_p or _jit_with_loop(inner) for inner in program.eqns)
    return program if has_loop else None


def _may_go_on(loop: Loop, carry: Sequence[Any]) -> Any:
    """Whether a loop goes on by its predicate, and no step has broken (in each of its own lanes, if it is a batch)."""
    return carry[0] if loop.stop is None else carry[0] & jnp.any(carry[loop.stop] == NO_STOP[0])


def at_most_once(needed: Any, function: Callable[..., list[Any]], values: Sequence[Any]) -> list[Any]:
    """`function(*values)` where it is needed, else the values as they are: a loop of one step or none."""
    return _one_step(needed, function, values).carry[1:]


def _one_step(
    needed: Any, function: Callable[..., list[Any]], values: Sequence[Any], stop: int | None = None
) -> Outcome:
    """Such a loop; `stop`: where the `stop` of its step is among the values."""

    def once(_: Any, __: Any, *values: Any) -> list[Any]:
        return [jnp.zeros((), bool), *function(*values)]

    kind, stop = Decided(EveryResidual(reason="one step or none")), None if stop is None else 1 + stop
    return run_function(once, [needed, *values], bound=1, predicated=True, kind=kind, stop=stop)


def _step_that_may_break(
    needed: Any, step: Callable[..., list[Any]], values: list[Any], stop: int, row: Any
) -> tuple[Any, list[Any]]:
    """Whether a step was needed and did not break, and its results: else the values, and in their `stop` this row."""

    def numbered(*values: Any) -> list[Any]:
        results = step(*values)
        results[stop] = jnp.where(results[stop] == values[stop], values[stop], 0)  # the row of the only step
        return results

    before = values[stop]
    begun = jnp.where(before == NO_STOP[0], before, NOT_STARTED)  # what has broken takes no step
    out = _one_step(needed, numbered, [*values[:stop], begun, *values[stop + 1 :]], stop)
    results = out.carry[1:]
    results[stop] = jnp.where(results[stop] == 0, row, before)
    return out.num_steps > 0, results


def after_step(loop: Loop, at: Any, needed: Any, counts: Any, step: Callable[..., list[Any]]) -> Any:
    """Where a lane is after a step of the inner or the outer loop, where it is needed; `counts`: where it is counted.

    `step(*carry, *zeros) -> (*carry, *y)`, with zeros in the place of each y.
    """
    values = [*at.carry, *map(jaxi.zeros, loop.output_avals.ys)]
    if loop.stop is None:
        results = at_most_once(needed, step, values)
    else:
        needed, results = _step_that_may_break(needed, step, values, loop.stop, at.row)
        counts &= needed
    (carry, values), ys = loop.outputs(results), []
    for y, value in zip(at.ys, values, strict=True):
        if (rows := y.shape[0]) > FEW_ROWS:
            ys.append(write(y, at.row, jaxi.where(needed, value, read(y, at.row))))
        else:
            here = (jnp.arange(rows, dtype=jnp.int32) == at.row) & needed
            ys.append(jaxi.where(here.reshape(-1, *(1,) * value.ndim), value, y))
    counted = counts.astype(jnp.int32)
    row = RowLoop(loop.reverse).advance(at.row, counted)
    return at._replace(row=row, num_steps=at.num_steps + counted, carry=list(carry), ys=ys)


class NestedState(NamedTuple):
    """Where a lane is."""

    goes_on: Any  # it takes this outer step, or is in it
    inside: Any  # it has begun the outer step
    row: Any  # of the outer step
    num_steps: Any  # outer steps that are done
    carry: list[Any]
    ys: list[Any]
    inner: LaneState


class Machine(NamedTuple):
    """One step of a lane."""

    loop: Loop
    inner: SplitProgram  # its body
    low: Any
    high: Any
    consts: Sequence[Any]
    xs: Sequence[Any]

    def start(self, carry: Sequence[Any]) -> NestedState:
        """Before the first step."""
        row = RowLoop(self.loop.reverse).first(self.low, self.high)
        ys = [jaxi.zeros(stacked(aval, self.loop.bound or 0)) for aval in self.loop.output_avals.ys]
        no = jnp.zeros((), bool)
        return NestedState(self.goes_on(row, carry), no, row, jnp.int32(0), list(carry), ys, self.inner.start())

    def goes_on(self, row: Any, carry: Sequence[Any]) -> Any:
        """Whether a lane takes an outer step at this row."""
        ahead = (self.low <= row) & (row < self.high)
        return ahead & _may_go_on(self.loop, carry) if self.loop.predicated else ahead

    def step(self, state: NestedState) -> NestedState:
        """Begin an outer step, take an inner step, end the outer one: whatever the lane is at."""

        def inputs() -> list[Any]:
            return [state.row, *self.consts, *state.carry, *(read(x, state.row) for x in self.xs)]

        begins = state.goes_on & ~state.inside
        inside = state.inside | begins
        at = self.inner.begin(begins, inputs, state.inner)
        at = self.inner.step(inside & self.inner.goes_on(at), inputs, at)
        ends = inside & ~self.inner.goes_on(at)
        after = after_step(self.loop, state, ends, ends, lambda *_: self.inner.end(inputs(), at))
        return after._replace(goes_on=self.goes_on(after.row, after.carry), inside=inside & ~ends, inner=at)


@weakly_cached
def _as_one(loop: Loop, state: tuple[Any, ...], treedef: Any) -> Loop:
    """The single loop of states of these types, its consts being low, high, *consts, *xs."""
    inner = split_at_loop(loop.body, *_ONE_INNER_LOOP)
    consts, _, rows = loop.input_avals
    operands = [INDEX, INDEX, *consts, *(stacked(aval, loop.bound or 0) for aval in rows)]

    def step(_: Any, *values: Any) -> list[Any]:
        leaves, (low, high), own_consts, xs = split_list(values, [len(state), 2, len(consts)])
        return jax.tree.leaves(Machine(loop, inner, low, high, own_consts, xs).step(treedef.unflatten(leaves)))

    body = trace_carrying(step, INDEX, state, operands)
    # Before: [row, *state, *operands] -> After: [row, *operands, *state]
    row, *inputs = body.invars
    inner_bound = inner.loop.bound
    most = None if loop.bound is None or inner_bound is None else loop.bound * max(inner_bound, 1)
    return Loop(
        jaxi.replace_jaxpr(body, [row, *inputs[len(state) :], *inputs[: len(state)]], body.outvars),
        num_consts=len(operands),
        num_carry=len(state),
        bound=None if most is None or most >= MOST_STEPS else most,
        reverse=False,
        predicated=True,
        unroll=1,
        **asked_as(loop),
        reporting=loop.reporting,
        debug_info=loop.debug_info,
        watch=loop.watch and loop.watch.of_part(),
    )


def run_free(
    loop: Loop, low: Any, high: Any, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]
) -> Outcome:
    """Run the loop as a single one."""
    if loop.inverse is not None:
        raise NotImplementedError(f"lanes='free' {_TAKES_NO_INVERSE}")
    inner = split_at_loop(loop.body, *_ONE_INNER_LOOP)
    if loop.bound == 0:
        return run(loop, low, high, consts, carry, xs)
    carry = list(map(jaxi.vary_like, carry, loop.input_avals.carry))
    start, treedef = jax.tree.flatten(Machine(loop, inner, low, high, consts, xs).start(carry))
    single = _as_one(loop, tuple(map(jax.typeof, start)), treedef)
    if single.bound is None and loop.kind.needs_bound:
        raise ValueError(
            "lanes='free' makes one loop of two, and this kind needs a static bound on its steps, which are those of "
            "both. Give `max_steps=` to both loops, or choose `Checkpointed()`, which needs none."
        )
    start = list(map(jaxi.vary_like, start, single.body.out_avals))
    end = jnp.int32(MOST_STEPS if single.bound is None else single.bound)
    out = run(single, jnp.int32(0), end, [low, high, *consts, *xs], start, [])
    last: NestedState = treedef.unflatten(out.carry)
    return Outcome(last.num_steps, last.carry, last.ys, [], [])
