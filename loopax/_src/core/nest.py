"""A program, cut at the loops in it: for lanes of which each is at another step of them.

What stands before, between and behind the loops are *blocks*, in which there is no loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.lanes import Lockstep
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.jaxpr.cost import evaluation, is_function
from loopax._src.core.jaxpr.util import bind_again, evaluate, trace, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, Literal, equations_in

SOME_LANES = 64  # for which blocks are compared
SOME_STEPS = 4


OUTSIDE = -1


class Home(NamedTuple):
    """Where a lane has a value that one loop carries, and another one carries on."""

    loop: int  # the first of them; OUTSIDE: that in whose body the program stands
    leaf: int  # of its carry


class Nest(NamedTuple):
    """A program, cut.

    What is *known* in a block: the inputs of the program, what the blocks before it have kept, and the results of the
    loops before it: `*inputs, *kept, *results`.
    """

    blocks: tuple[ClosedJaxpr, ...]  # known -> (low, high, *carry of the next loop, *kept); the last: known -> outputs
    operands: tuple[ClosedJaxpr, ...]  # of each loop: what is known before it, and kept there -> (*consts, *xs)
    loops: tuple["Inner", ...]
    homes: tuple[tuple[Home | None, ...], ...]  # of each loop's leaves; None: their own
    returned: tuple[bool, ...]  # which outputs have their home in the leaf that they become

    @property
    def kept_avals(self) -> list[Sequence[Any]]:
        """The types of what each block but the last keeps."""
        pairs = zip(self.blocks, self.loops, strict=False)
        return [block.out_avals[2 + inner.loop.num_carry :] for block, inner in pairs]


class Inner(NamedTuple):
    """A loop in a program."""

    loop: Loop
    where: str  # in the words of an error: what its user has called, and at which line
    body: Nest | None  # None: its steps are taken as a whole


def cut(loop: Loop, is_outermost: bool = True) -> Nest:
    """Cut the body of a loop, and those of loops in it, wherever lanes may take different numbers of steps."""
    # Where a step may break, its carry is still needed, and no loop in it changes that.
    offered = _leaves(loop) if loop.stop is None else (None,) * len(loop.body.in_avals)
    return _cut_body(loop.body, offered, is_outermost)


def _leaves(loop: Loop) -> tuple[int | None, ...]:
    """For each input of the body the leaf of the carry that it is, None for another, and for what decides."""
    decides = {*loop.stops, *range(loop.predicated)}
    leaves = range(-1 - loop.num_consts, len(loop.body.in_avals) - 1 - loop.num_consts)
    return tuple(leaf if 0 <= leaf < loop.num_carry and leaf not in decides else None for leaf in leaves)


@weakly_cached
def _cut_body(program: ClosedJaxpr, leaves: tuple[int | None, ...], is_outermost: bool) -> Nest:
    is_apart = _asks_apart(program, is_outermost)
    nest = _cut(program, is_apart, lambda loop: cut(loop, False) if _holds_apart(loop.body) else None, leaves)
    for block in nest.blocks:
        _refuse_around_loops(block, is_apart)
    return nest


@weakly_cached
def cut_at_loop(program: ClosedJaxpr, holds: str, otherwise: str) -> Nest:
    """Cut a program at the only loop in it. Where there is not one, the error begins and ends with these words."""
    nest = _cut(program, _is_loop, lambda _: None)
    if len(nest.loops) != 1:
        # A loop that nobody uses has been removed by now.
        unused = "none. (A loop does not count if its results are not used: return them.)"
        found = f"{len(nest.loops)}." if nest.loops else unused
        raise ValueError(
            f"{holds} {found} The form it needs: outside of `cond`, `scan` and other loops, one call of "
            "`loopax.while_loop`, `loopax.fori_loop` or `loopax.scan`; before and after it, anything. Make one loop "
            f"of several{otherwise}"
        )
    return nest


def holds_loop(program: ClosedJaxpr) -> bool:
    """Whether a loop of loopax stands in a program."""
    return any(map(_is_loop, equations_in(program)))


def _is_loop(eqn: Any) -> bool:
    return eqn.primitive is loop_p


def _may_differ(loop: Loop) -> bool:
    """Whether lanes may take different numbers of its steps. A branch is a loop of one step or none (`branches.py`)."""
    return not (loop.is_fixed or loop.bound == 1)


def _asks_apart(program: ClosedJaxpr, is_outermost: bool = False) -> Callable[[Any], bool]:
    """Make a function of equations: whether one is a loop whose steps lanes take apart, or has such a loop in it.

    A loop stays whole if some steps of it take less than what stands around it in the body of an inner loop: lanes that
    come to it together wait there for less time than the single loop would take for more steps of its own.
    """
    around = 0.0 if is_outermost else block_cost(_without_loops(_flat(program)))

    def is_apart(eqn: Any) -> bool:
        if not _is_loop(eqn):
            return False
        loop = Loop(**eqn.params)
        return (_may_differ(loop) and SOME_STEPS * block_cost(loop.body) > around) or _holds_apart(loop.body)

    return is_apart


@weakly_cached
def _holds_apart(body: ClosedJaxpr) -> bool:
    return any(map(_asks_apart(body), equations_in(body)))


def _without_loops(program: ClosedJaxpr) -> ClosedJaxpr:
    left = [eqn for eqn in program.eqns if not (_is_loop(eqn) and _may_differ(Loop(**eqn.params)))]
    return jaxi.replace_jaxpr(program, outvars=[], eqns=left)


def block_cost(block: ClosedJaxpr) -> float:
    """What a block takes for some lanes, in nanoseconds."""
    return evaluation(block, SOME_LANES, is_function(block, SOME_LANES))


def _call_with_loop(eqn: Any) -> ClosedJaxpr | None:
    """The program of a `jit` or a `jax.checkpoint` with a loop in it: what is stored is said by the kind of a loop."""
    program = jaxi.inlinable(eqn)
    return program if program and holds_loop(program) else None


@weakly_cached
def _flat(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose loops stand in no call, without those whose results nobody uses."""
    return trace(lambda *inputs: evaluate(program, inputs, bind_again, inlined=_call_with_loop), program.in_avals)


def _cut(
    program: ClosedJaxpr,
    is_apart: Callable[[Any], bool],
    cut_body: Callable[[Loop], Nest | None],
    leaves: Sequence[int | None] = (),
) -> Nest:
    flat = _flat(program)
    # Before: the equations in their order -> After: each in the first block in which its operands are known
    blocks, at, place_of = [list[Any]()], list[Any](), dict[Any, int]()
    for eqn in flat.eqns:
        place = max((place_of.get(x, 0) for x in eqn.invars if not isinstance(x, Literal)), default=0)
        if is_apart(eqn):
            at.append(eqn)
            blocks.append([])
            place = len(at)
        else:
            blocks[place].append(eqn)
        place_of.update((variable, place) for variable in eqn.outvars)
    loops = [Loop(**eqn.params) for eqn in at]
    inners = [Inner(loop, _where(loop, eqn), cut_body(loop)) for loop, eqn in zip(loops, at, strict=True)]
    for inner in inners:
        _refuse(inner)
    given = [loop.inputs(eqn.invars[2:]) for loop, eqn in zip(loops, at, strict=True)]
    starts = [[*eqn.invars[:2], *inputs.carry] for eqn, inputs in zip(at, given, strict=True)]
    reads = [[*inputs.consts, *inputs.xs] for inputs in given]
    used = _used(blocks, [*starts, flat.outvars], [[], *reads])
    kept = _kept(blocks, used)
    places = {x: Home(OUTSIDE, leaf) for x, leaf in zip(flat.invars, leaves, strict=False) if leaf is not None}
    homes = [_homes(i, at[i], starts[i][2:], set[Any]().union(*used[i + 1 :]), places) for i in range(len(at))]

    def known(place: int, kept: list[list[Any]]) -> list[Any]:
        results = [x for eqn in at[:place] for x in eqn.outvars]
        return [*flat.invars, *(x for names in kept for x in names), *results]

    outputs = [*([*start, *names] for start, names in zip(starts, kept, strict=True)), flat.outvars]
    numbered = enumerate(zip(outputs, blocks, strict=True))
    return Nest(
        tuple(jaxi.replace_jaxpr(flat, known(i, kept[:i]), out, equations) for i, (out, equations) in numbered),
        tuple(jaxi.replace_jaxpr(flat, known(i, kept[: i + 1]), atoms, []) for i, atoms in enumerate(reads)),
        tuple(inners),
        tuple(homes),
        tuple(not isinstance(x, Literal) and places.get(x) == Home(OUTSIDE, k) for k, x in enumerate(flat.outvars)),
    )


def _used(blocks: list[list[Any]], outputs: list[list[Any]], reads: list[list[Any]]) -> list[set[Any]]:
    """What each block uses: also for its `outputs`, and what the loop before it `reads` on its way."""
    return [
        {x for x in (*out, *read, *(x for eqn in equations for x in eqn.invars)) if not isinstance(x, Literal)}
        for equations, out, read in zip(blocks, outputs, reads, strict=True)
    ]


def _homes(
    number: int, eqn: Any, starts: Sequence[Any], used: set[Any], places: dict[Any, Home]
) -> tuple[Home | None, ...]:
    """The homes of a loop's leaves: those of what they begin with, if nobody needs that any more.

    `used`: what is used in the loop and behind it. `places`: the homes of values, by variables; those of the results of
    the loop are added.
    """
    loop = Loop(**eqn.params)
    leaves, results = _leaves(loop)[1 + loop.num_consts :], loop.results(eqn.outvars).carry
    homes, taken = list[Home | None](), set[Home]()
    for start, result, leaf in zip(starts, results, leaves, strict=False):
        home = None
        if leaf is not None:
            is_free = not isinstance(start, Literal) and start not in used and start.aval == result.aval
            home = places.get(start) if is_free else None
            home = None if home in taken else home
            places[result] = home or Home(number, leaf)
            taken.add(places[result])
        homes.append(home)
    return tuple(homes)


def _kept(blocks: list[list[Any]], used: list[set[Any]]) -> list[list[Any]]:
    """Of each block but the last, what it computes and others use behind it."""
    later = [set[Any]().union(*used[place + 1 :]) for place in range(len(blocks))]
    made = [[x for eqn in equations for x in eqn.outvars] for equations in blocks]
    return [[x for x in own if x in others] for own, others in zip(made[:-1], later, strict=False)]


# What cannot be taken apart.

TAKES_NO_INVERSE = (
    "does not take a kind that brings an inverse. Choose another kind, such as `Checkpointed()`, or write the loop as "
    "a while_loop, fori_loop or scan of its own."
)


def _where(loop: Loop, eqn: Any) -> str:
    """What its user has called, and where."""
    name = loop.debug_info.function if loop.debug_info else "loop"
    return name + next((f" at {file}:{line}" for file, line, _ in jaxi.user_lines(eqn)), "")


def _refuse(inner: Inner) -> None:
    """Raise where a loop takes no steps one by one."""
    loop, where, _ = inner
    if loop.derivative:
        # What is around a loop gives it another derivative than its own, and a program that is cut has it elsewhere.
        raise NotImplementedError(
            f"a loop of which one is made with others does not take derivative={loop.derivative!r} (the {where}). "
            "Leave the derivative out, or leave the lanes in lockstep or compact."
        )
    if loop.reporting is not None:
        raise NotImplementedError(
            "a loop with progress= stands in the body of a loop with lanes='free', or in the function of `lanes_map` "
            f"(the {where}). It is taken apart there, step by step, and cannot show how far it is. Leave its progress= "
            "out; a loop with lanes='free' can show its own."
        )
    if loop.inverse is not None:
        raise NotImplementedError(
            f"a loop inside of another, of which one is made (lanes='free'), {TAKES_NO_INVERSE} It is the {where}."
        )


def _refuse_around_loops(block: ClosedJaxpr, is_apart: Callable[[Any], bool]) -> None:
    """Raise where lanes would wait for each other inside of what is no loop of loopax."""
    for eqn in block.eqns:
        inside = (inner for program in jaxi.inner_jaxprs(eqn) for inner in equations_in(program))
        found = None if jaxi.is_custom(eqn) else next(filter(is_apart, inside), None)
        if found is not None:
            raise ValueError(
                f"lanes='free': the {_where(Loop(**found.params), found)} stands in a `{eqn.primitive}`, where its "
                "steps cannot be taken one by one. Call `cond`, `scan` and `while_loop` of loopax in place of those of "
                "`jax.lax`: they take the same arguments, and `loopax.rewrite_loops(..., lanes='free')` puts them in "
                "their place. Or leave lanes='lockstep'."
            )


def refuse_other_kinds(nest: Nest, kind: Any) -> None:
    """Raise where a loop in a nest has a kind that is not the one of the single loop."""
    for loop, where, body in nest.loops:
        is_left_out = isinstance(loop.kind, Decided) or (loop.kind._chooses and loop.kind == type(loop.kind)())
        if not (is_left_out or loop.kind == kind) or loop.lanes != Lockstep():
            given = f"lanes={loop.lanes!r}" if loop.lanes != Lockstep() else f"kind={loop.kind!r}"
            raise ValueError(
                f"the {where} has {given}, and stands in a loop with lanes='free' and kind={kind!r}. One loop is made "
                "of all, which has one kind. Leave it out of the inner loop, or give both loops the same."
            )
        if body is not None:
            refuse_other_kinds(body, kind)
