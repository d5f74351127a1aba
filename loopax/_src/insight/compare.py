"""`compare`: every kind of loop, measured on a user's own function."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from statistics import median
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from loopax._src.core import Derivative, Kind, Loop, LoopCall, LoopOperands, checked_kind, kept, run_by, run_with_tape
from loopax._src.core.batching.compact_primitive import CompactVmap, compact_vmap_of, compact_vmap_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.jaxpr.util import bind_again, evaluate, trace
from loopax._src.extras import optional
from loopax._src.frontend.raising import text_of_check
from loopax._src.frontend.run_time_checks import KindCheck
from loopax._src.frontend.trace_program import trace_program
from loopax._src.insight.advice import REFUSALS, aligned, in_bytes, stored_of
from loopax._src.insight.find_loops import FoundLoop, Subject, find, gradient_of, subject
from loopax._src.jax_internals import ClosedJaxpr, api_boundary, jaxpr_as_fun, map_programs, replace_jaxpr
from loopax._src.kinds import Asked, Bounded, Checkpointed, KindLike, Residuals, to_kind
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Why, positive_int

# A program whose loops are of another kind, or have another derivative.


def with_kind(closed: ClosedJaxpr, kind: Kind) -> ClosedJaxpr:
    """Give every loop of loopax that a user has called this kind. Loops that loopax makes itself keep theirs."""
    if kind.inverse is not None:
        raise NotImplementedError(
            f"{kind!r} brings the inverse of the steps of one loop. Give it to that loop, and compare the function as "
            "it is written."
        )

    def exchanged(eqn: Any) -> Any:
        if eqn.primitive is loop_p:
            return eqn.replace(params=_of_kind(Loop(**eqn.params), kind)._asdict())
        if eqn.primitive is not compact_vmap_p:
            return map_programs(eqn, partial(with_kind, kind=kind))
        batch = CompactVmap(**eqn.params)
        if isinstance(batch.static, Loop):
            avals = [atom.aval for atom in eqn.invars]
            batch = compact_vmap_of(batch.rules, _of_kind(batch.static, kind), batch.axis, batch.mapped, avals)
        return eqn.replace(params=batch._asdict())

    return replace_jaxpr(closed, closed.invars, closed.outvars, list(map(exchanged, closed.eqns)))


def _of_kind(loop: Loop, kind: Kind) -> Loop:
    body, debug_info = with_kind(loop.body, kind), loop.debug_info
    if debug_info is None:
        return loop._replace(body=body)
    stored = checked_kind(kind, loop.bound)
    return loop._replace(body=body, kind=stored, debug_info=replace(debug_info, kind=kind))


def with_derivative(closed: ClosedJaxpr, derivative: Derivative) -> ClosedJaxpr:
    """Give every loop of loopax that a user has called this derivative. Kinds stay."""
    return trace(lambda *operands: evaluate(closed, operands, partial(_run_by, derivative)), closed.in_avals)


def _run_by(derivative: Derivative, eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation, whose loops are run by the derivative."""
    if eqn.primitive is compact_vmap_p:
        raise NotImplementedError(f"{derivative!r} cannot take the place of that of lanes in batches of their own.")
    loop = Loop(**eqn.params) if eqn.primitive is loop_p else None
    if loop is None or loop.debug_info is None:
        return bind_again(map_programs(eqn, partial(with_derivative, derivative=derivative)), operands)
    (low, high, *leaves), name = operands, loop.debug_info.function
    loop = loop._replace(body=with_derivative(loop.body, derivative), derivative=kept(derivative))
    given, where = LoopOperands(low, high, *loop.inputs(leaves)), f"the body of loopax.{name}"
    unpack = lambda carry: list(carry[int(loop.predicated) :])  # noqa: E731
    checked = KindCheck(f"loopax.{name}", throw=True)
    call = LoopCall(loop, given, loop.is_fixed, where, unpack, checked, run_with_tape)
    return run_by(derivative, call).leaves


# Compile programs, and time them in turn, so that whatever else the machine does hits all alike.


ENOUGH_ROUNDS = 3  # where programs are slow (loops of small steps on an accelerator)


class Compiled(NamedTuple):
    """A compiled program with its arguments."""

    call: Callable[[], Any]  # returns when the results are there
    temporary_mib: float  # as the compiler reports it
    seconds: float  # to trace, lower and compile it


def compiled(function: Callable[..., Any], arguments: Sequence[Any], times: int = 1) -> Compiled:
    """Compile a program, as if nothing had been traced before; so many times, of which the least counts."""
    found = []
    for _ in range(times):
        jax.clear_caches()
        start = time.perf_counter()
        found.append(_compiled(jax.jit(function).lower(*arguments), arguments, start))
    return found[-1]._replace(seconds=min(one.seconds for one in found))


def _compiled(lowered: Any, arguments: Sequence[Any], start: float) -> Compiled:
    program = lowered.compile()
    seconds, analysis = time.perf_counter() - start, program.memory_analysis()
    temporary = analysis.temp_size_in_bytes / 2**20 if analysis else 0.0
    return Compiled(lambda: jax.block_until_ready(program(*arguments)), temporary, seconds)


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


@dataclass(frozen=True)
class Measured:
    """The measurements for one kind, or for several kinds that lead to the same program.

    Attributes
    ----------
    name
        The name of the kind.
    forward_ms, gradient_ms
        The median times of the function and of its gradient, in milliseconds.
    compile_seconds
        The seconds to trace and compile the gradient.
    temporary_bytes
        The temporary memory of the gradient in bytes, as XLA reports it.
    traces
        How often the function was traced: once for each of the two programs.
    problem
        Why there is no gradient with this kind; empty if there is one.
    is_chosen
        Whether this row is the function as written.

    """

    name: str
    forward_ms: float = float("nan")
    gradient_ms: float = float("nan")
    compile_seconds: float = float("nan")
    temporary_bytes: int = 0
    traces: int = 0
    problem: str = ""
    is_chosen: bool = False

    def _shared_with(self, name: str) -> "Measured":
        """Return the row with one more name. A name like `Auto() takes Bounded()` contains `Bounded()` already."""
        first, *others = self.name.split(" = ")
        is_first = first == name or (first.endswith(f" takes {name}") and ", " not in first)
        return self if is_first or name in others else replace(self, name=f"{self.name} = {name}")


@dataclass(frozen=True, repr=False)
class Comparison:
    """The kinds of loops of one function, measured.

    `print` shows a table, and `plot` draws time against memory.

    Attributes
    ----------
    name
        The name of the function.
    rows : tuple of Measured
        One row for each program; the first row is the function as written.

    """

    name: str
    rows: tuple[Measured, ...]

    def __repr__(self) -> str:
        """Return the comparison as a table."""
        columns = "kind", "forward", "gradient", "compile", "memory", "traces"
        lines = [f"{self.name}: its loops by kind (* as written); medians, memory of the gradient"]
        lines += aligned([columns, *map(_cells, self.rows)], numbers=range(1, len(columns)))
        lines += [f"{row.name}: {row.problem}" for row in self.rows if row.problem]
        return "\n".join(lines)

    def plot(self, axes: Any = None) -> Any:
        """Draw the time of the gradient against its memory, and return the axes (needs matplotlib).

        Both scales are logarithmic. A ring marks the function as written.
        """
        if axes is None:
            pyplot = optional("matplotlib.pyplot", "matplotlib", "A picture of a comparison")
            axes = pyplot.subplots(layout="constrained")[1]
        rows = [row for row in self.rows if not row.problem]
        for row in rows:
            memory = max(row.temporary_bytes, 1) / 2**20
            axes.scatter(memory, row.gradient_ms, label=f"as written: {row.name}" if row.is_chosen else row.name)
            if row.is_chosen:
                axes.scatter(memory, row.gradient_ms, s=180, facecolors="none", edgecolors="black", zorder=3)
        axes.set(xscale="log", yscale="log", xlabel="temporary memory of the gradient, MiB", ylabel="gradient, ms")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(self.name)
        if rows:
            axes.legend(frameon=False)
        return axes


def _cells(row: Measured) -> tuple[str, ...]:
    mark = "* " if row.is_chosen else "  "
    if row.problem:
        return (mark + row.name, "none")
    times = f"{row.forward_ms:.3g} ms", f"{row.gradient_ms:.3g} ms", f"{row.compile_seconds:.2f} s"
    return (mark + row.name, *times, in_bytes(row.temporary_bytes), str(row.traces))


_ROUNDS = Why("how often compiled programs are run", "give the number outside of `jit`")
KINDS: tuple[KindLike, ...] = (Checkpointed(), Bounded(), Residuals())


@api_boundary
def compare(
    fn: Callable[..., Any],
    *args: Any,
    kinds: Sequence[KindLike | Derivative] = KINDS,
    argnums: int | Sequence[int] | None = None,
    rounds: int = 5,
    cache: str | os.PathLike[str] | None = None,
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
        The kinds to measure, or their names. The default is `Checkpointed()`, `Bounded()` and `Residuals()`. A loop
        keeps its `derivative` with every kind. An object such as `Truncated(last=5)` takes the place of the derivative
        instead. `Reversible` is not allowed here: give it to its loop.
    argnums
        The numbers of the arguments with respect to which a gradient is taken. None: all floating-point arrays.
    rounds
        How often each program is run: an int from 1 on. `compare` reports medians. The default is 5.
    cache
        A folder. The fastest of the kinds is written there, for all loops of the function whose gradient is taken. A
        loop of kind `Tuned(cache=folder)` then takes this kind, if it is one of those that `Tuned()` chooses from.

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
        - `rounds` is not an int, or `cache` is no path.
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
    if isinstance(kinds, str | Kind | Derivative):
        raise TypeError(f"compare(kinds=...): got {kinds!r}, expected several: `kinds=[{kinds!r}]`.")
    chosen = [kind if isinstance(kind, Derivative) else to_kind(kind) for kind in kinds]
    rounds = positive_int("compare(rounds=...)", rounds, "runs of each program", _ROUNDS)
    if cache is not None and not isinstance(cache, str | os.PathLike):
        raise TypeError(f"compare(cache=...): got {describe(cache)}, expected the path of a folder.")
    asked = subject("compare", fn, args, argnums)
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
    if not any(asked.perturbed):
        raise TypeError(
            f"compare({asked.name}, ...): there is no floating-point array among the arguments, so there is no "
            "gradient, and without one all kinds are the same."
        )
    names = _as_written(find(asked.program.closed, asked.inputs))
    if not names:
        raise ValueError(
            f"compare({asked.name}, ...): there is no loop of loopax in this function, so there are no kinds to "
            "compare. `loopax.rewrite_loops(fn, scans=True)` puts loops of loopax in the place of those of `jax.lax`."
        )
    traced = [_traced(fn, asked, None, ", ".join(filter(None, names)))]
    traced += [_traced(fn, asked, choice, repr(choice)) for choice in chosen]
    first, *others = _measured(traced, asked.program.arrays, rounds)
    if cache is not None:
        _remember(cache, asked, (first, *others), [kind for kind in chosen if isinstance(kind, Kind)])
    return Comparison(asked.name, (replace(first, is_chosen=True), *others))


def _remember(folder: str | os.PathLike[str], asked: Subject, rows: Sequence[Measured], kinds: Sequence[Kind]) -> None:
    """The fastest kind, for the loops of the gradient. Kinds that lead to the same program share a row."""
    pairs = ((kind, row) for kind in kinds for row in rows if row._shared_with(repr(kind)) is row and not row.problem)
    times = {kind: row.gradient_ms for kind, row in pairs}
    if times:
        loops = Asked()
        gradient_of(with_kind(asked.program.closed, loops), asked.perturbed)
        listed = ", ".join(f"{kind} {ms:.3g}" for kind, ms in times.items())
        loops.remember(folder, min(times, key=lambda kind: times[kind]), f"compared, milliseconds: {listed}")


def _as_written(loops: Sequence[FoundLoop]) -> dict[str, None]:
    """The kinds of the loops of loopax among these and in their bodies, and what they take."""
    names: dict[str, None] = {}
    for found in loops:
        if found.library == "loopax":
            debug_info, (stored, _) = found.loop.debug_info, stored_of(found)
            name = repr(debug_info.kind) if debug_info else ""
            if derivative := found.loop.derivative:
                names[f"{derivative!r} with {name}" if derivative.uses_kind else repr(derivative)] = None
            else:
                names[f"{name} takes {stored.kind}" if name and stored and stored.kind != name else name] = None
        names |= _as_written(found.inner)
    return names


# The function and its gradient, lowered; none where this has a problem.
Programs = tuple[Any, ...]


def _traced(
    fn: Callable[..., Any], asked: Subject, choice: Kind | Derivative | None, name: str
) -> tuple[Measured, Programs]:
    """The programs with this choice for all loops (None: as the function is written), and a row without times."""
    traces = 0

    def counted(*args: Any) -> Any:
        nonlocal traces
        traces += 1
        return fn(*args)

    def program() -> ClosedJaxpr:
        closed = trace_program("compare", counted, asked.args, {}).closed
        if isinstance(choice, Derivative):
            return with_derivative(closed, choice)
        return closed if choice is None else with_kind(closed, choice)

    arrays = asked.program.arrays
    try:
        forward = jax.jit(jaxpr_as_fun(program())).lower(*arrays)
        start = time.perf_counter()
        gradient = jax.jit(jaxpr_as_fun(gradient_of(program(), asked.perturbed))).lower(*arrays)
    except REFUSALS as error:
        return Measured(name, problem=str(error)), ()
    return Measured(name, compile_seconds=time.perf_counter() - start, traces=traces), (forward, gradient)


def _measured(traced: Sequence[tuple[Measured, Programs]], arrays: Sequence[Any], rounds: int) -> list[Measured]:
    """A row for each program, all measured in turn. Kinds that come to the same have programs of the same text."""
    texts = [tuple(program.as_text() for program in programs) for _, programs in traced]
    lowered = dict(zip(chain(*texts), chain(*(programs for _, programs in traced)), strict=True))
    found, problems = dict[str, Compiled](), dict[str, str]()
    for text, program in lowered.items():
        found[text] = _compiled(program, arrays, time.perf_counter())
        try:
            found[text].call()
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # such as a check that fails in it
            problems[text] = text_of_check(error)
    good = [text for text in found if text not in problems]
    times = dict(zip(good, interleaved([found[text].call for text in good], rounds), strict=True))
    rows: dict[Any, Measured] = {}
    for (row, _), pair in zip(traced, texts, strict=True):
        if problem := next((problems[text] for text in pair if text in problems), ""):
            row = Measured(row.name, problem=problem)
        elif pair:
            compile_seconds = row.compile_seconds + found[pair[1]].seconds
            temporary = int(found[pair[1]].temporary_mib * 2**20)
            forward_ms, gradient_ms = (times[text] for text in pair)
            row = Measured(row.name, forward_ms, gradient_ms, compile_seconds, temporary, row.traces)
        key = pair or row.name
        rows[key] = rows[key]._shared_with(row.name) if key in rows else row
    return list(rows.values())
