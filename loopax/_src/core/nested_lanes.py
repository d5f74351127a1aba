"""Free lanes: a nest of loops as a single loop, in which lanes need not wait for each other.

In lockstep, a batch of nested loops waits at every outer step for the lane with the most inner steps. Here, one step of
a single loop goes through the nest once, and a lane does what it has come to there::

    a step of the first inner loop             if the lane is in that loop
    what stands between it and the next one    if it has ended
    ...
    what stands behind the last inner loop     if that has ended: the step of the outer loop is done
    what stands before the first inner loop    if the lane is to begin a step of the outer loop

A step of an inner loop is its body, or, if loops stand in that, this again. What stands between loops is a loop of at
most one step: in a batch it runs if any lane needs it, and the other lanes are filled. So this is an ordinary loop to
every transformation. (Dance et al. 2025, docs/references.md.) Lanes may wait at such a block for others
(`core/waiting.py`). A dear one runs for the lanes that need it alone, in batches (`IfGathered`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.batching.groups import run_function
from loopax._src.core.ir.annotations import BlockInfo
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lane_choice import IfGathered
from loopax._src.core.ir.loop import NO_STOP, NOT_STARTED, Loop, Outcome, asked_as, run
from loopax._src.core.ir.plan import EveryResidual
from loopax._src.core.jaxpr.cost import overhead
from loopax._src.core.jaxpr.types import retyped, trace_carrying
from loopax._src.core.jaxpr.util import INDEX, MOST_STEPS, split_list, stacked, weakly_cached
from loopax._src.core.lowering.rows import RowLoop, read, write
from loopax._src.core.nest import TAKES_NO_INVERSE, Inner, Nest, block_cost, cut, holds_loop, refuse_other_kinds
from loopax._src.core.waiting import blocks_to_run, lanes_wait
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun

# In a batch, lanes write rows of their own, which XLA's CPU backend does lane by lane. Up to so many rows it is faster
# to select in all of them, for an innermost loop, which writes one in most iterations.
FEW_ROWS = 128

# Where a lane is.


class LoopState(NamedTuple):
    """Where a lane is in a loop."""

    row: Any  # of the step that it is in, or of the next one
    end: Any  # the first row that is not walked
    num_steps: Any
    carry: list[Any]
    ys: list[Any]
    inside: "Inside | None"


class Inside(NamedTuple):
    """Where a lane is in a program that is cut."""

    begun: Any  # int32: so many of its loops
    kept: list[list[Any]]  # of each block but the last
    loops: list[LoopState]


def nowhere(nest: Nest) -> Inside:
    """A place in the state of a lane that has not begun a program."""
    kept = [list(map(jaxi.zeros, avals)) for avals in nest.kept_avals]
    return Inside(jnp.int32(0), kept, list(map(_unbegun, nest.loops)))


def _unbegun(inner: Inner) -> LoopState:
    carry, ys = inner.loop.output_avals
    rows, nothing = [jaxi.zeros(stacked(aval, inner.loop.bound or 0)) for aval in ys], jnp.int32(0)
    inside = inner.body and nowhere(inner.body)
    return LoopState(nothing, nothing, nothing, list(map(jaxi.zeros, carry)), rows, inside)


def goes_on(loop: Loop, at: LoopState) -> Any:
    """Whether a lane is in a step of a loop, or takes another."""
    ahead = at.row > at.end if loop.reverse else at.row < at.end
    if loop.predicated:
        may = _may_go_on(loop, at.carry)
        ahead = may if loop.bound is None else ahead & may
    return ahead if at.inside is None else ahead | (at.inside.begun > 0)


def _may_go_on(loop: Loop, carry: Sequence[Any]) -> Any:
    """Whether a loop goes on by its predicate, and no step has broken (in each of its own lanes, if it is a batch)."""
    return carry[0] if loop.stop is None else carry[0] & jnp.any(carry[loop.stop] == NO_STOP[0])


# What a lane does in one step of the single loop.


class Program(NamedTuple):
    """A program that a lane is in."""

    nest: Nest
    inputs: Callable[[], list[Any]]  # for a lane, where they are needed
    at: Inside
    runs: Callable[..., Any] = lambda *_: True  # whether a block runs in this step of the single loop, by its number
    carry: Sequence[Any] = ()  # of the loop around the program

    def begin(self, needed: Any) -> "Program":
        """What stands before the first loop, where it is needed."""
        return self._enter(0, needed)

    def advance(self, here: Any) -> "Program":
        """Once through the loops, for lanes that are here: a step of the one that a lane is in, and what follows."""
        now, ended = self, None
        for place, inner in enumerate(self.nest.loops):
            if ended is not None:
                now = now._enter(place, ended)
            is_in = here & (now.at.begun == place + 1)
            stepped = _advance(inner, now.at.loops[place], now._operands(place), is_in, partial(self.runs, place))
            now = now._with_loop(place, stepped)
            ended = is_in & ~goes_on(inner.loop, stepped) & self.runs(place + 1)
        return now

    def begin_inside(self, here: Any) -> "Program":
        """What stands before the first loop in the steps of loops, where such a step is next."""
        now = self
        for place, inner in enumerate(self.nest.loops):
            is_in = here & (now.at.begun == place + 1)
            begun = _begin(inner, now.at.loops[place], now._operands(place), is_in, partial(self.runs, place))
            now = now._with_loop(place, begun)
        return now

    @property
    def has_ended(self) -> Any:
        """Whether a lane is behind the last loop."""
        last = len(self.nest.loops)
        return (self.at.begun == last) & ~goes_on(self.nest.loops[-1].loop, self.at.loops[-1])

    def outputs(self) -> list[Any]:
        """What stands behind the last loop."""
        return _evaluated(self.nest.blocks[-1], self._known(len(self.nest.loops), len(self.nest.loops)))

    def _known(self, place: int, blocks: int) -> list[Any]:
        results = [x for at in self.at.loops[:place] for x in (at.num_steps, *at.carry, *at.ys)]
        return [*self.inputs(), *(x for kept in self.at.kept[:blocks] for x in kept), *results]

    def _operands(self, place: int) -> Callable[[], list[Any]]:
        return lambda: _evaluated(self.nest.operands[place], self._known(place, place + 1))

    def _enter(self, place: int, needed: Any) -> "Program":
        """A block, and into the loop behind it."""
        loop, old = self.nest.loops[place].loop, self.at.loops[place]
        is_own = [home is None for home in self.nest.homes[place]]

        def block(*_: Any) -> list[Any]:
            # Before: [low, high, *carry, *kept] -> After: the values, where the lane is in the loop
            low, high, *rest = _evaluated(self.nest.blocks[place], self._known(place, place))
            ys = [jaxi.zeros(jax.typeof(y)) for y in old.ys]
            carry, kept = split_list(rest, [loop.num_carry])
            return [
                jnp.int32(place + 1),
                *_rows_of(loop, low, high),
                jnp.int32(0),
                *ys,
                *compress(carry, is_own),
                *kept,
            ]

        values = [self.at.begun, *old[:3], *old.ys, *compress(old.carry, is_own), *self.at.kept[place]]
        begun, row, end, num_steps, *rest = at_most_once(needed, block, values)
        ys, carry, kept = split_list(rest, [len(old.ys), sum(is_own)])
        carry = _put(old.carry, is_own, carry)
        at = self.at._replace(begun=begun, kept=_with(self.at.kept, place, kept))
        return self._replace(at=at)._with_loop(place, LoopState(row, end, num_steps, carry, ys, old.inside))

    def _with_loop(self, place: int, state: LoopState) -> "Program":
        """With another state of a loop, whose carry has changed what has its home in others."""
        loops = _with(self.at.loops, place, state)
        *carries, outside = [*(list(state.carry) for state in loops), list(self.carry)]
        for home, value in zip(self.nest.homes[place], state.carry, strict=True):
            if home is not None:
                [*carries, outside][home.loop][home.leaf] = value
        loops = [state._replace(carry=carry) for state, carry in zip(loops, carries, strict=True)]
        return self._replace(at=_spread(self.nest, outside, self.at._replace(loops=loops)), carry=outside)


def _evaluated(program: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Its results, where inputs vary over other axes of a `jax.shard_map` than it was traced for: rows of a lane do."""
    pairs = zip(inputs, program.in_avals, strict=True)
    return jaxpr_as_fun(program)(*(retyped(x, jaxi.varying_axes(aval)) for x, aval in pairs))


def _with(values: list[Any], place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]


def _put(values: Sequence[Any], where: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """The values, with new ones where it is True."""
    ahead = iter(new)
    return [next(ahead) if is_new else value for value, is_new in zip(values, where, strict=True)]


# Where a loop begins with what the loop around it carries, or one before it, and that is needed no more, a lane has one
# value for both, whose *home* is the carry of the other (`Nest.homes`). Here it stands in both. The single loop carries
# it once.


def _spread(nest: Nest, carry: Sequence[Any], at: Inside) -> Inside:
    """With values that have their home elsewhere as they are there. `carry`: that of the loop around."""
    loops = list(at.loops)
    for place, (inner, homes) in enumerate(zip(nest.loops, nest.homes, strict=True)):
        carries = [*(state.carry for state in loops), carry]
        pairs = zip(homes, loops[place].carry, strict=True)
        now = [carries[home.loop][home.leaf] if home else x for home, x in pairs]
        loops[place] = _spread_in(inner, loops[place]._replace(carry=now))
    return at._replace(loops=loops)


def _spread_in(inner: Inner, at: LoopState) -> LoopState:
    if inner.body is None or at.inside is None:
        return at
    return at._replace(inside=_spread(inner.body, at.carry, at.inside))


def _once(inner: Inner, at: LoopState) -> LoopState:
    """With None for values that have their home elsewhere."""
    nest, inside = inner.body, at.inside
    if nest is None or inside is None:
        return at
    of_loops = [
        _once(inner, state._replace(carry=[None if home else x for home, x in zip(homes, state.carry, strict=True)]))
        for inner, homes, state in zip(nest.loops, nest.homes, inside.loops, strict=True)
    ]
    return at._replace(inside=inside._replace(loops=of_loops))


def _rows_of(loop: Loop, low: Any, high: Any) -> tuple[Any, Any]:
    """The first row, and the first that is not walked."""
    return RowLoop(loop.reverse).first(low, high), low - 1 if loop.reverse else high


def _program_of_step(
    inner: Inner, at: LoopState, operands: Callable[[], list[Any]], runs: Callable[..., Any]
) -> Program:
    """The step that a lane is in."""
    assert inner.body is not None
    assert at.inside is not None
    return Program(inner.body, lambda: _inputs(inner.loop, operands, at.row, at.carry), at.inside, runs, at.carry)


def _inputs(loop: Loop, operands: Callable[[], list[Any]], row: Any, carry: Sequence[Any]) -> list[Any]:
    """Those of a loop's body."""
    consts, xs = split_list(operands(), [loop.num_consts])
    return [row, *consts, *carry, *(read(x, row) for x in xs)]


def _advance(
    inner: Inner, at: LoopState, operands: Callable[[], list[Any]], here: Any, runs: Callable[..., Any]
) -> LoopState:
    """A step of a loop, or of one in it, for lanes that are here."""
    loop = inner.loop
    if loop.bound == 0:
        return at
    if inner.body is None:
        needed = here & goes_on(loop, at) & runs(0)
        return _after_step(inner, at, needed, lambda *now: _evaluated(loop.body, _inputs(loop, operands, *now)))
    program = _program_of_step(inner, at, operands, runs).advance(here)
    ended = here & program.has_ended & runs(0)

    def outputs(row: Any, carry: Sequence[Any]) -> list[Any]:
        return program._replace(inputs=lambda: _inputs(loop, operands, row, carry)).outputs()

    return _after_step(inner, at._replace(inside=program.at, carry=list(program.carry)), ended, outputs)


def _begin(
    inner: Inner, at: LoopState, operands: Callable[[], list[Any]], here: Any, runs: Callable[..., Any]
) -> LoopState:
    """What stands before the loops in a step, for lanes that are here and take one."""
    if inner.loop.bound == 0 or inner.body is None or at.inside is None:
        return at
    next_one = here & goes_on(inner.loop, at) & (at.inside.begun == 0) & runs(0)
    program = _program_of_step(inner, at, operands, runs).begin(next_one).begin_inside(here)
    return at._replace(inside=program.at)


_ONCE: Any = {"bound": 1, "kind": Decided(EveryResidual(reason="one step or none"))}


def at_most_once(needed: Any, function: Callable[..., list[Any]], values: Sequence[Any]) -> list[Any]:
    """`function(*values)` where it is needed, else the values as they are: a loop of one step or none."""
    high = jnp.asarray(needed).astype(jnp.int32)
    return run_function(lambda _, *values: function(*values), values, high=high, lanes=IfGathered(), **_ONCE).carry


def _unless_it_breaks(needed: Any, step: Callable[..., list[Any]], values: list[Any], stop: int, row: Any) -> list[Any]:
    """The results of a step that is needed and does not break: else the values, and in their `stop` this row."""

    def numbered(*values: Any) -> list[Any]:
        results = step(*values)
        results[stop] = jnp.where(results[stop] == values[stop], values[stop], 0)  # the row of the only step
        return results

    before = values[stop]
    begun = jnp.where(before == NO_STOP[0], before, NOT_STARTED)  # what has broken takes no step
    given = [needed, *values[:stop], begun, *values[stop + 1 :]]
    once = lambda _, __, *values: [jnp.zeros((), bool), *numbered(*values)]  # noqa: E731
    results = run_function(once, given, predicated=True, stop=1 + stop, **_ONCE).carry[1:]
    results[stop] = jnp.where(results[stop] == 0, row, before)
    return results


def _after_step(inner: Inner, at: LoopState, needed: Any, step: Callable[..., list[Any]]) -> LoopState:
    """Where a lane is after a step of a loop, where it is needed: step(row, carry) -> (*carry, *y)."""
    loop, nest = inner.loop, inner.body
    changes = [not (nest and nest.returned[leaf]) for leaf in range(loop.num_carry)]

    def stepped(*values: Any) -> list[Any]:
        carry, (row, num_steps), begun, ys = split_list(values, [sum(changes), 2, int(at.inside is not None)])
        carry, y = loop.outputs(step(row, _put(at.carry, changes, carry)))
        carry = list(compress(carry, changes))
        one = jnp.int32(1) if begun else (num_steps < MOST_STEPS).astype(jnp.int32)
        ys = [_with_row(old, row, value, not begun) for old, value in zip(ys, y, strict=True)]
        return [*carry, RowLoop(loop.reverse).advance(row, one), num_steps + one, *map(jnp.zeros_like, begun), *ys]

    begun = [] if at.inside is None else [at.inside.begun]
    values = [*compress(at.carry, changes), at.row, at.num_steps, *begun, *at.ys]
    if loop.stop is None:
        results = at_most_once(needed, stepped, values)
    else:
        results = _unless_it_breaks(needed, stepped, values, sum(changes[: loop.stop]), at.row)
    carry, (row, num_steps), begun, ys = split_list(results, [sum(changes), 2, len(begun)])
    if at.inside is not None and loop.stop is not None:  # a step that has broken is over, too
        begun = [jnp.where(needed, 0, *begun)]
    inside = at.inside and at.inside._replace(begun=begun[0])
    carry = _put(at.carry, changes, carry)
    return _spread_in(inner, at._replace(row=row, num_steps=num_steps, carry=carry, ys=ys, inside=inside))


def _with_row(y: Any, row: Any, value: Any, is_innermost: bool) -> Any:
    if (rows := y.shape[0]) > FEW_ROWS or not is_innermost:
        return write(y, row, value)
    return jaxi.where((jnp.arange(rows, dtype=jnp.int32) == row).reshape(-1, *(1,) * value.ndim), value, y)


# Blocks, by the numbers of the loops that they stand in, and their own: the blocks behind the last loop in a step, and
# before the first one in the next, are one, since a lane that has come to the one comes to the other.


class Block(NamedTuple):
    """A block of a nest."""

    number: tuple[int, ...]
    words: str
    cost: float
    is_innermost: bool = False  # a step of an innermost loop


def _blocks(inner: Inner, number: tuple[int, ...] = ()) -> Iterator[Block]:
    """Those of a loop, in their order."""
    loop, where, nest = inner
    if loop.bound == 0:
        return
    if nest is None:
        yield Block((*number, 0), f"a step of the {where}", block_cost(loop.body), True)
        return
    last, step = len(nest.loops), f"loops in a step of the {where}"
    for place, inside in enumerate(nest.loops, 1):
        yield from _blocks(inside, (*number, place - 1))
        if place < last:
            yield Block((*number, place), f"between {step}", block_cost(nest.blocks[place]))
    around = block_cost(nest.blocks[0]) + block_cost(nest.blocks[-1])
    yield Block((*number, 0), f"around {step}", around)


def _at_blocks(inner: Inner, at: LoopState, here: Any) -> Iterator[Any]:
    """Whether a lane is at each of them."""
    loop, _, nest = inner
    if loop.bound == 0:
        return
    steps = here & goes_on(loop, at)
    if nest is None or at.inside is None:
        yield steps
        return
    for place, (inside, state) in enumerate(zip(nest.loops, at.inside.loops, strict=True), 1):
        is_in = here & (at.inside.begun == place)
        yield from _at_blocks(inside, state, is_in)
        ended = is_in & ~goes_on(inside.loop, state)
        yield ended if place < len(nest.loops) else ended | (steps & (at.inside.begun == 0))


# The single loop.


def most_steps(inner: Inner) -> int | None:
    """The most steps of the single loop of a nest. None: it has no bound."""
    loop, _, body = inner
    if loop.bound is None or body is None:
        return loop.bound
    of_loops = list(map(most_steps, body.loops))
    return None if None in of_loops else loop.bound * sum(max(most or 0, 1) for most in of_loops)


@weakly_cached
def _as_one(loop: Loop, state: tuple[Any, ...], treedef: Any) -> Loop:
    """The single loop of states of these types, its consts being *consts, *xs."""
    where = f"outer {loop.debug_info.function}" if loop.debug_info else "outer loop"
    inner, (consts, _, rows) = Inner(loop, where, cut(loop)), loop.input_avals
    blocks = list(_blocks(inner))
    costs = [block.cost for block in blocks]
    waits = lanes_wait(costs, [block.is_innermost for block in blocks])
    operands = [*consts, *(stacked(aval, loop.bound or 0) for aval in rows)]

    def step(_: Any, is_on: Any, lost: Any, *values: Any) -> list[Any]:
        leaves, given = split_list(values, [len(state) - 2])
        at = _spread_in(inner, treedef.unflatten(leaves))
        which, lost = blocks_to_run(list(_at_blocks(inner, at, is_on)), lost, [*costs, overhead(False, False)], waits)
        found = {block.number: runs for block, runs in zip(blocks, which, strict=True)}
        runs = lambda *number: found.get(number, found[(*number[:-1], 0)])  # noqa: E731 - the last block is the first
        at = _begin(inner, _advance(inner, at, lambda: given, is_on, runs), lambda: given, is_on, runs)
        return [goes_on(loop, at), lost, *jax.tree.leaves(_once(inner, at))]

    body = trace_carrying(step, INDEX, state, operands)
    # Before: [row, *state, *operands] -> After: [row, *operands, *state]
    row, *inputs = body.invars
    most = most_steps(inner)
    most = most and most + 1  # what stands before the first step has one of its own
    return Loop(
        jaxi.replace_jaxpr(body, [row, *inputs[len(state) :], *inputs[: len(state)]], body.outvars),
        num_consts=len(operands),
        num_carry=len(state),
        bound=None if most is None or most >= MOST_STEPS else most,
        reverse=False,
        predicated=True,
        unroll=1,
        idles=True,
        **asked_as(loop),
        reporting=loop.reporting,
        debug_info=loop.debug_info and replace(loop.debug_info, blocks=_in_words(blocks, waits)),
        watch=loop.watch and loop.watch.of_part(),
    )


def _in_words(blocks: Sequence[Block], waits: Sequence[bool]) -> tuple[BlockInfo, ...]:
    return tuple(BlockInfo(block.words, block.cost, wait) for block, wait in zip(blocks, waits, strict=True))


def run_free(
    loop: Loop, low: Any, high: Any, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]
) -> Outcome:
    """Run the loop as a single one."""
    if loop.inverse is not None:
        raise NotImplementedError(f"lanes='free' {TAKES_NO_INVERSE}")
    if not holds_loop(loop.body):
        # A loop that nobody uses has been removed by now.
        raise ValueError(
            "lanes='free' is for a loop with loops in its body, and this body holds none. (A loop does not count if "
            "its results are not used: return them.) Write lanes='compact', or leave lanes='lockstep'."
        )
    nest = cut(loop)
    if loop.bound == 0 or not nest.loops:  # within a step, no lane waits
        return run(loop, low, high, consts, carry, xs)
    refuse_other_kinds(nest, loop.kind)
    carry = list(map(jaxi.vary_like, carry, loop.input_avals.carry))
    row, end = _rows_of(loop, low, high)
    inner = Inner(loop, "", nest)
    at = _unbegun(inner)._replace(row=row, end=end, carry=carry)
    leaves, treedef = jax.tree.flatten(_once(inner, at))
    lost = jnp.zeros(len(list(_blocks(inner))), jnp.float32)
    start = [goes_on(loop, at), lost, *leaves]
    single = _as_one(loop, tuple(map(jax.typeof, start)), treedef)
    if single.bound is None and loop.kind.needs_bound:
        raise ValueError(
            "lanes='free' makes one loop of several, and this kind needs a static bound on its steps, which are those "
            "of all. Give `max_steps=` to each loop, or choose `Checkpointed()`, which needs none."
        )
    start = list(map(jaxi.vary_like, start, single.body.out_avals))
    end = jnp.int32(MOST_STEPS if single.bound is None else single.bound)
    out = run(single, jnp.int32(0), end, [*consts, *xs], start, [])
    last: LoopState = treedef.unflatten(out.carry[2:])
    return Outcome(last.num_steps, last.carry, last.ys, [], [])
