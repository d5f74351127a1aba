"""`compare`: every kind of loop, measured on a user's own function."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from loopax._src.core import Asked, Kind, Loop, LoopCall, LoopOperands, run_by, run_with_tape
from loopax._src.core.batching.compact import CompactVmap, compact_vmap_of, compact_vmap_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.jaxpr.util import bind_again, evaluate, map_programs, trace
from loopax._src.frontend.checks import KindCheck
from loopax._src.frontend.raising import text_of_check
from loopax._src.frontend.trace_program import trace_program
from loopax._src.insight.comparison import Comparison, Measured
from loopax._src.insight.explain import REFUSALS, stored_of
from loopax._src.insight.find_loops import FoundLoop, Subject, find, gradient_of, subject
from loopax._src.jax_internals import ClosedJaxpr, Jaxpr, api_boundary, as_closed, as_open, jaxpr_as_fun, replace_jaxpr
from loopax._src.kinds import Bounded, Checkpointed, KindLike, Residuals, to_kind
from loopax._src.pytrees.static import Why, positive_int

# A program whose loops are of another kind.


def with_kind(closed: ClosedJaxpr, kind: Kind) -> ClosedJaxpr:
    """Give every loop of loopax that a user has called this kind. Loops that loopax makes itself keep theirs."""
    if kind.inverse is not None:
        raise NotImplementedError(
            f"{kind!r} brings the inverse of the steps of one loop. Give it to that loop, and compare the function as "
            "it is written."
        )
    if kind.derivative != "exact":
        return trace(lambda *operands: evaluate(closed, operands, partial(_run_by_kind, kind)), closed.in_avals)
    jaxpr = as_open(closed)
    return replace_jaxpr(closed, jaxpr.invars, jaxpr.outvars, [_equation(eqn, kind) for eqn in jaxpr.eqns])


def _equation(eqn: Any, kind: Kind) -> Any:
    if eqn.primitive is loop_p:
        return eqn.replace(params=_loop(Loop(**eqn.params), kind)._asdict())
    if eqn.primitive is compact_vmap_p:
        compact_vmap = CompactVmap(**eqn.params)
        if isinstance(compact_vmap.static, Loop):
            avals = [atom.aval for atom in eqn.invars]
            compact_vmap = compact_vmap_of(
                compact_vmap.rules, _loop(compact_vmap.static, kind), compact_vmap.axis, compact_vmap.mapped, avals
            )
        return eqn.replace(params=compact_vmap._asdict())
    return eqn.replace(params={name: _inside(value, kind) for name, value in eqn.params.items()})


def _run_by_kind(kind: Kind, eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation, whose loops are run by the kind: it gives them another derivative."""
    if eqn.primitive is compact_vmap_p:
        raise NotImplementedError(f"{kind!r} cannot take the place of the kind of lanes in batches of their own.")
    loop = Loop(**eqn.params) if eqn.primitive is loop_p else None
    if loop is None or loop.debug_info is None:
        return bind_again(map_programs(eqn, partial(with_kind, kind=kind)), operands)
    (low, high, *leaves), info, loop = operands, loop.debug_info, _loop(loop, kind)
    call = LoopCall(
        loop,
        LoopOperands(low, high, *loop.inputs(leaves)),
        is_fixed=info.fixed,
        where=f"the body of loopax.{info.function}",
        unpack=lambda carry: list(carry[int(loop.predicated) :]),
        checked=KindCheck(f"loopax.{info.function}", throw=True),
        run_loop=run_with_tape,
    )
    return run_by(kind, call).leaves


def _loop(loop: Loop, kind: Kind) -> Loop:
    body, debug_info = with_kind(loop.body, kind), loop.debug_info
    if debug_info is None:
        return loop._replace(body=body)
    storage = Asked.of(kind, loop.bound, debug_info.fixed, debug_info.bound_is_loose)
    return loop._replace(body=body, storage=storage, debug_info=replace(debug_info, kind=kind))


def _inside(value: Any, kind: Kind) -> Any:
    """A parameter of an equation, with the loops of the programs in it."""
    if isinstance(value, ClosedJaxpr):
        return with_kind(value, kind)
    if isinstance(value, Jaxpr):
        return as_open(with_kind(as_closed(value), kind))
    if type(value) in (tuple, list):
        return type(value)(_inside(item, kind) for item in value)
    return value


# Compile programs, and time them in turn, so that whatever else the machine does hits all alike.


ENOUGH_ROUNDS = 3  # where programs are slow (loops of small steps on an accelerator)


class Compiled(NamedTuple):
    """A compiled program with its arguments."""

    call: Callable[[], Any]  # returns when the results are there
    temporary_mib: float  # as the compiler reports it
    seconds: float  # to trace, lower and compile it


def compiled(function: Callable[..., Any], arguments: Sequence[Any], times: int = 1) -> Compiled:
    """Compile a program, as if nothing had been traced before; so many times, of which the least counts."""
    seconds, programs = [], []
    for _ in range(times):
        jax.clear_caches()
        start = time.perf_counter()
        programs = [jax.jit(function).lower(*arguments).compile()]
        seconds.append(time.perf_counter() - start)
    (program,) = programs
    analysis = program.memory_analysis()
    temporary = analysis.temp_size_in_bytes / 2**20 if analysis else 0.0
    return Compiled(lambda: jax.block_until_ready(program(*arguments)), temporary, min(seconds))


def interleaved(
    calls: Sequence[Callable[[], Any]], rounds: int, *, warm: bool = False, seconds: float = inf
) -> list[float]:
    """The median milliseconds of each call, which returns when its work is done; all are called in every round.

    With `warm`, each is called once more before it is timed: what ran before it, and how much memory that gave back,
    would matter else. After so many seconds, three rounds are enough.
    """
    times: list[list[float]] = [[] for _ in calls]
    begun = time.perf_counter()
    for i in range(rounds):
        if i >= ENOUGH_ROUNDS and time.perf_counter() - begun > seconds:
            break
        for call, of_call in zip(calls, times, strict=True):
            if warm:
                call()
            start = time.perf_counter()
            call()
            of_call.append(1e3 * (time.perf_counter() - start))
    return list(map(median, times))


_ROUNDS = Why("how often compiled programs are run", "give the number outside of `jit`")
KINDS: tuple[KindLike, ...] = (Checkpointed(), Bounded(), Residuals())


@api_boundary
def compare(
    fn: Callable[..., Any],
    *args: Any,
    kinds: Sequence[KindLike] = KINDS,
    argnums: int | Sequence[int] | None = None,
    rounds: int = 5,
) -> Comparison:
    """Measure a function and its gradient with each kind of loop.

    ::

        print(lx.compare(loss, params, xs, jnp.int32(700)))

    `compare` compiles and runs the function as written, and once more with each kind. The kind then replaces that of
    all loops of loopax in the function. The programs run in turn. Loops of `jax.lax` do not change; `rewrite_loops`
    replaces them.

    Parameters
    ----------
    fn, *args
        The function and its arguments, as in `explain`. The function is run, so a `jax.ShapeDtypeStruct` is not enough.
    kinds
        The kinds to measure, or their names. The default is `Checkpointed()`, `Bounded()` and `Residuals()`. A loop of
        kind `Implicit` or `Truncated` keeps its derivative with every kind. `Reversible` is not allowed here: give it
        to its loop.
    argnums
        The numbers of the arguments with respect to which a gradient is taken. None: all floating-point arrays.
    rounds
        How often each program is run: an int from 1 on. `compare` reports medians. The default is 5.

    Returns
    -------
    Comparison
        One row for each program; the first row is the function as written. `print` shows a table, and `.plot()` draws
        time against memory. Kinds that lead to the same program share a row. If a kind is not possible, or its program
        ends with an error, the row has the reason.

    Raises
    ------
    TypeError
        - As in `explain`.
        - `kinds` is not a sequence of kinds.
        - `rounds` is not an int.
    ValueError
        - As in `explain`.
        - The function holds no loop of loopax.
        - A kind is unknown.
        - `rounds` is less than 1.

    Notes
    -----
    Cost: each row compiles two programs (function and gradient), and runs each `rounds` + 1 times. Kinds that differ
    only in what a gradient stores share the program of the function. Effects of the function (callbacks, prints) happen
    as often.

    """
    if isinstance(kinds, str | Kind):
        raise TypeError(f"compare(kinds=...): got {kinds!r}, expected several: `kinds=[{kinds!r}]`.")
    chosen = [to_kind(kind) for kind in kinds]
    rounds = positive_int("compare(rounds=...)", rounds, "runs of each program", _ROUNDS)
    asked = subject("compare", fn, args, argnums)
    _refuse_types(asked)
    if not any(asked.perturbed):
        raise TypeError(
            f"compare({asked.name}, ...): there is no floating-point array among the arguments, so there is no "
            "gradient, and without one all kinds are the same."
        )
    loops = _of_loopax(find(asked.program.closed, asked.inputs))
    if not loops:
        raise ValueError(
            f"compare({asked.name}, ...): there is no loop of loopax in this function, so there are no kinds to "
            "compare. `loopax.rewrite_loops(fn, scans=True)` puts loops of loopax in the place of those of `jax.lax`."
        )
    written = _Candidate(fn, asked, None, _written(loops))
    rows = _measured([written, *(_Candidate(fn, asked, kind, _named(kind)) for kind in chosen)], rounds)
    return Comparison(asked.name, (replace(rows[0], is_chosen=True), *rows[1:]))


def _named(kind: Kind) -> str:
    """A kind, and that its derivative is not that of the steps, where it is not."""
    has_own = kind.derivative != "exact"
    return f"{kind!r} (derivative: {kind.derivative})" if has_own else repr(kind)


def _refuse_types(asked: Subject) -> None:
    for value, array in zip(asked.inputs, asked.program.arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise TypeError(
                f"compare({asked.name}, ...): {value.name} is a type without values (a `jax.ShapeDtypeStruct`). The "
                "function is run: give an array. `loopax.explain` takes types."
            )
        if isinstance(array, Tracer):
            raise TypeError(
                f"compare({asked.name}, ...): {value.name} is a traced value. The function is compiled and run: call "
                "`compare` outside of `jit`, `vmap` and `grad`."
            )


def _of_loopax(found: Sequence[FoundLoop]) -> list[FoundLoop]:
    """The loops of loopax among these and in their bodies."""
    return [f for outer in found for f in (outer, *_of_loopax(outer.inner)) if f.seen.library == "loopax"]


def _written(loops: Sequence[FoundLoop]) -> str:
    """The kinds of the loops as they are written, and what they take."""
    names = {}
    for found in loops:
        debug_info = found.seen.loop.debug_info
        if debug_info is not None:
            names[_taken(found, repr(debug_info.kind))] = None
    return ", ".join(names)


def _taken(found: FoundLoop, name: str) -> str:
    stored, _ = stored_of(found)
    return name if stored is None or stored.kind == name else f"{name} takes {stored.kind}"


@dataclass
class _Candidate:
    """A function with a kind for all its loops; None: as it is written."""

    fn: Callable[..., Any]
    asked: Subject
    kind: Kind | None
    name: str
    traces: int = 0

    def forward(self, *arrays: Any) -> list[Any]:
        """What the function computes."""
        return jaxpr_as_fun(self._program())(*arrays)

    def gradient(self, *arrays: Any) -> list[Any]:
        """Its gradient."""
        return jaxpr_as_fun(gradient_of(self._program(), self.asked.perturbed))(*arrays)

    def _program(self) -> ClosedJaxpr:
        def counted(*args: Any) -> Any:
            self.traces += 1
            return self.fn(*args)

        return self._exchanged(trace_program("compare", counted, self.asked.args, {}).closed)

    def _exchanged(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        return closed if self.kind is None else with_kind(closed, self.kind)


@dataclass(frozen=True)
class _Lowered:
    """The two programs of a candidate, traced."""

    forward: Any
    gradient: Any
    seconds: float  # to trace the gradient

    @property
    def texts(self) -> tuple[str, str]:
        """What they are: kinds that come to the same have the same."""
        return self.forward.as_text(), self.gradient.as_text()


@dataclass(frozen=True)
class _Timed:
    """A compiled program that has been run."""

    program: Any
    seconds: float  # to compile it
    milliseconds: float = float("nan")
    problem: str = ""  # why it cannot be run


def _measured(candidates: Sequence[_Candidate], rounds: int) -> list[Measured]:
    """A row for each program, all measured in turn."""
    arrays = candidates[0].asked.program.arrays
    lowered = [_lowered(candidate, arrays) for candidate in candidates]
    programs = {
        text: program
        for found in lowered
        if isinstance(found, _Lowered)
        for text, program in zip(found.texts, (found.forward, found.gradient), strict=True)
    }
    compiled = [_compiled(program) for program in programs.values()]
    timed = dict(zip(programs, _timed(compiled, arrays, rounds), strict=True))
    rows: dict[Any, Measured] = {}
    for candidate, found in zip(candidates, lowered, strict=True):
        if not isinstance(found, _Lowered):
            rows[candidate.name] = Measured(candidate.name, problem=str(found))
        elif found.texts in rows:
            rows[found.texts] = rows[found.texts].shared_with(candidate.name)
        else:
            rows[found.texts] = _row(candidate, found, *(timed[text] for text in found.texts))
    return list(rows.values())


def _lowered(candidate: _Candidate, arrays: Sequence[Any]) -> _Lowered | Exception:
    """The programs, or why they cannot be had."""
    try:
        forward = jax.jit(candidate.forward).lower(*arrays)
        start = time.perf_counter()
        gradient = jax.jit(candidate.gradient).lower(*arrays)
        return _Lowered(forward, gradient, time.perf_counter() - start)
    except REFUSALS as error:
        return error


def _compiled(lowered: Any) -> _Timed:
    start = time.perf_counter()
    program = lowered.compile()
    return _Timed(program, time.perf_counter() - start)


def _timed(compiled: Sequence[_Timed], arrays: Sequence[Any], rounds: int) -> list[_Timed]:
    """Run each program once, then measure those that run in turn; adds the median time of each, or its problem."""
    calls = [lambda one=one: jax.block_until_ready(one.program(*arrays)) for one in compiled]
    tried = [replace(one, problem=_problem_of(call)) for one, call in zip(compiled, calls, strict=True)]
    times = iter(interleaved([call for one, call in zip(tried, calls, strict=True) if not one.problem], rounds))
    return [one if one.problem else replace(one, milliseconds=next(times)) for one in tried]


def _problem_of(call: Callable[[], Any]) -> str:
    """Why a program ends with an error, such as a check that fails in it; empty where it does not."""
    try:
        call()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return text_of_check(error)
    return ""


def _row(candidate: _Candidate, lowered: _Lowered, forward: _Timed, gradient: _Timed) -> Measured:
    if problem := forward.problem or gradient.problem:
        return Measured(candidate.name, problem=problem)
    return Measured(
        candidate.name,
        forward.milliseconds,
        gradient.milliseconds,
        lowered.seconds + gradient.seconds,
        gradient.program.memory_analysis().temp_size_in_bytes,
        candidate.traces,
    )
