"""`explain`: the loops of a function, and what its gradient stores, without running it."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import comb
from textwrap import wrap
from typing import Any

from loopax._src.core import DebugInfo, Names
from loopax._src.core.ir.annotations import BlockInfo
from loopax._src.core.ir.lanes import AutoLanes, Lockstep, Sequential
from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.insight.advice import REFUSALS, Advice, Stored, advice_for, aligned, in_bytes, stored_of
from loopax._src.insight.find_loops import FoundLoop, Value, find, found_at, gradient_of, subject
from loopax._src.insight.program_size import operations
from loopax._src.jax_internals import api_boundary, has_tangents
from loopax._src.pytrees.leaves import type_in_words


@dataclass(frozen=True)
class Leaf:
    """An array that a loop reads, carries or writes.

    Attributes
    ----------
    name
        The path of the array in the carry, in `xs` or `ys`, or in an argument of the function. Empty if not known.
    role
        How the loop uses the array:

        - `"constant"`: the same at every step, including leaves of the carry that the body returns unchanged.
        - `"carried"`: changes from step to step.
        - `"stream"`: rows, of which each step reads or writes one.
    shape, dtype
        The shape and dtype of the whole array, including lanes.
    size
        The bytes of the whole array, including lanes.
    is_stored
        Whether a gradient stores the array at some steps.
    is_differentiated
        Whether the array depends on an argument of which the gradient is taken.

    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: Any
    size: int
    is_stored: bool
    is_differentiated: bool


@dataclass(frozen=True)
class LoopExplanation:
    """What `explain` knows of one loop.

    Attributes
    ----------
    function
        The function that the user called, such as `"loopax.scan"` or `"lax.while_loop"`.
    branch
        For a function of `loopax.cond` or `switch`: its name, such as `"true_fun"` or `"branches[1]"`. A branch is a
        loop of at most one step. Empty for loops.
    source
        The line of the call, `"file.py:12 (function)"`.
    kind, lanes
        The argument of the loop, as given. None for loops of `jax.lax`.
    lanes_taken
        What `AutoLanes()` chose for the batch; otherwise as `lanes`.
    lanes_expected
        For a batch whose lanes take different steps, in lockstep or with `AutoLanes()`: ways to run lanes, and the
        estimated nanoseconds of a lane for each of its own steps. Otherwise empty.
    most_steps
        The static bound on the number of steps. None: no bound.
    is_fixed
        Whether the loop always takes the same number of steps.
    leaves
        The arrays of the loop.
    waiting
        The number of lanes that run until the slowest of them has finished. 1 if no lanes have their own numbers of
        steps.
    derivative
        The argument of the loop, without its functions. None: the derivative is that of the steps.
    in_words
        What a gradient stores, as a text, where a plan does not say it. Otherwise empty.
    stored
        What a gradient stores. None if nothing in the loop is differentiated, if there is no gradient, or if `in_words`
        has the answer.
    stored_bytes
        The bytes that a gradient stores for all lanes: `stored.carries * stored.size` times the number of lanes.
    problem
        Why there is no gradient; empty if there is one.
    warnings
        What makes the loop slow, and which line to change.
    inner
        The loops in the body.
    mixed_by
        The primitive that computes for a lane from other lanes. Lanes then run in lockstep, whatever `lanes` says.
        Empty if there is none, or if lanes run as `lanes` says.
    blocks
        Of a nest with free lanes: what one iteration of the single loop runs, each for the lanes that have come to it.
        Each has `words`, the expected `nanoseconds` for 64 lanes, and `waits`: whether lanes of a batch wait there for
        others. Otherwise empty.
    operations
        The number of operations of the body in the program of the value, and in that of the gradient, without those of
        loops in the body, and without what stands on the line of a loop. Zeros if there is no gradient, or if JAX
        cannot lower the program here (for another device, or of a symbolic shape).

    """

    function: str
    source: str
    kind: Any
    lanes: Any
    most_steps: int | None
    is_fixed: bool
    leaves: tuple[Leaf, ...]
    waiting: int
    derivative: Any
    in_words: str
    stored: Stored | None
    stored_bytes: int
    problem: str
    warnings: tuple[Advice, ...]
    inner: tuple["LoopExplanation", ...]
    branch: str = ""
    mixed_by: str = ""
    lanes_expected: Mapping[str, float] = field(default_factory=dict)
    lanes_taken: Any = None
    blocks: tuple[BlockInfo, ...] = ()
    operations: tuple[int, int] = (0, 0)

    def walk(self) -> Iterator["LoopExplanation"]:
        """Iterate over this loop and the loops in its body."""
        return (loop for _, loop in _nested([self]))


def _nested(loops: Sequence[LoopExplanation], depth: int = 0) -> Iterator[tuple[int, LoopExplanation]]:
    """These loops and those in their bodies, each with the number of loops around it."""
    for loop in loops:
        yield depth, loop
        yield from _nested(loop.inner, depth + 1)


MOST_NAMES = 6  # of what is differentiated, in the first line
MOST_CONSTANTS = 8  # shown one by one
WIDTH = 60  # of a text: what a page shows on a phone
INDENT = 4  # of a loop in another


@dataclass(frozen=True, repr=False)
class Explanation:
    """The loops of a function, and what its gradient stores.

    `print` shows a text. `show()` draws tables if rich is installed and the output is a terminal.

    Attributes
    ----------
    name
        The name of the function.
    differentiated
        The arrays with respect to which a gradient is taken.
    loops
        The loops in the function itself. Loops in a body are in `inner` of the outer loop.
    problem
        Why there is no gradient; empty if there is one.

    """

    name: str
    differentiated: tuple[str, ...]
    loops: tuple[LoopExplanation, ...]
    problem: str

    @property
    def warnings(self) -> tuple[Advice, ...]:
        """The warnings of all loops."""
        return tuple(warning for loop in self.walk() for warning in loop.warnings)

    def walk(self) -> Iterator[LoopExplanation]:
        """Iterate over all loops. A loop in a body follows its outer loop."""
        return (loop for _, loop in _nested(self.loops))

    def __repr__(self) -> str:
        """Return the explanation as a text."""
        text = [self._heading()]
        for depth, loop in _nested(self.loops):
            lines = [_title(loop), *(f"  {line}" for line in aligned(_leaf_rows(loop.leaves), numbers=[3]))]
            for line in _facts(loop):
                lines += wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ")
            for warning in loop.warnings:
                lines += wrap(f"! {warning}", WIDTH, initial_indent="  ", subsequent_indent="    ")
            text += ["", *(" " * INDENT * depth + line for line in lines)]
        return "\n".join([*text, *self._summary()])

    def show(self) -> None:
        """Print the explanation: tables in a terminal if rich is installed, else a text."""
        if not sys.stdout.isatty() or find_spec("rich") is None:
            print(self)
            return
        from rich.console import Console
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        console = Console()
        console.print(Text(self._heading(), "bold"))
        for depth, loop in _nested(self.loops):
            table = Table("array", "role", "type", "size", "gradient", title=_title(loop), title_justify="left")
            table.columns[3].justify = "right"
            for row in _leaf_rows(loop.leaves):
                table.add_row(*map(Text, row))
            warnings = (Text(f"! {warning}", "yellow") for warning in loop.warnings)
            for part in (table, *map(Text, _facts(loop)), *warnings):
                console.print(Padding(part, (0, 0, 0, INDENT * depth)))
        for line in self._summary():
            console.print(Text(line))

    def _heading(self) -> str:
        if not self.loops:
            return f"{self.name}: no loops, neither of loopax nor of jax.lax."
        branches = [bool(loop.branch) for loop in self.walk()]
        counts = ((branches.count(False), "loop", "loops"), (branches.count(True), "branch", "branches"))
        found = " and ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts if count)
        names = self.differentiated
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        of = f", gradient with respect to {', '.join(names[:MOST_NAMES])}{more}" if names else ""
        return f"{self.name}: {found}{of}"

    def _summary(self) -> list[str]:
        problem = [f"no gradient: {self.problem}"] if self.problem else []
        return ["", *problem, f"warnings: {len(self.warnings)}"] if self.loops else []


def _title(loop: LoopExplanation) -> str:
    """Which loop it is, and where."""
    where = loop.function + (f" at {loop.source}" if loop.source else "")
    return f"{where}: {loop.branch}" if loop.branch else where


def _leaf_rows(leaves: tuple[Leaf, ...]) -> list[list[str]]:
    """Name, role, type, size and what a gradient does with it; many constants are summed up."""
    constants = sorted((leaf for leaf in leaves if leaf.role == "constant"), key=lambda leaf: -leaf.size)
    rows: list[list[str]] = []
    for leaf in [*(leaf for leaf in leaves if leaf.role != "constant"), *constants[:MOST_CONSTANTS]]:
        note = "stored" if leaf.is_stored else "" if leaf.is_differentiated or leaf.role != "carried" else "no gradient"
        name = leaf.name or ("(closed over)" if leaf.role == "constant" else "(rows)")
        rows.append([name, leaf.role, type_in_words(leaf), in_bytes(leaf.size), note])
    if rest := constants[MOST_CONSTANTS:]:
        rows.append([f"{len(rest)} more", "constant", "", in_bytes(sum(leaf.size for leaf in rest)), ""])
    return rows


def _evaluations(loop: LoopExplanation, stored: Stored) -> str:
    """How often the body is evaluated."""
    back = ", and n times the inverse" if stored.walks_back else ""
    if stored.evaluations is None:
        few = comb(stored.carries + 2, 2) - 1  # so many steps are evaluated twice, as a known number of them would be
        most = f"2n{back}" if back else f"at most 3n{f' up to {few} steps, then slowly more' if few else ''}"
        return f"body evaluations: forward n; with the gradient {most}"
    if loop.blocks:
        return f"iterations of the loop that is made of all: at most {stored.evaluations} with the gradient{back}"
    bound = "" if loop.is_fixed else " for as many steps as the bound"
    return f"body evaluations: forward {loop.most_steps}, with the gradient {stored.evaluations}{back}{bound}"


def _facts(loop: LoopExplanation) -> Iterator[str]:
    """Steps, kind, what is stored, and body evaluations."""
    stored, no_gradient = loop.stored, [f"no gradient: {loop.problem}"] if loop.problem else []
    if loop.branch:
        yield f"runs: {_runs(loop)}"
        yield from no_gradient
        return
    most = "no static bound" if loop.most_steps is None else f"{'' if loop.is_fixed else 'at most '}{loop.most_steps}"
    chosen = "" if loop.lanes is None or loop.lanes == Lockstep() else f", {loop.lanes!r}"
    if loop.mixed_by:
        chosen += f" (in lockstep: {loop.mixed_by} computes for a lane from other lanes)"
    elif loop.lanes_taken != loop.lanes:
        listed = ", ".join(f"{name.removesuffix('()')} {ns:.3g}" for name, ns in loop.lanes_expected.items())
        why = f" (expected nanoseconds of a lane for each of its own steps: {listed})" if listed else ""
        chosen += f", which takes {loop.lanes_taken!r}{why}"
    until = "the last one" if loop.blocks else "the slowest"
    waiting = f", {loop.waiting} lanes until {until} is done" if loop.waiting > 1 else ""
    yield f"steps: {most}{chosen}{waiting}"
    yield from _blocks(loop)
    # A gradient stores as much for each of these; for one, where the loop itself is of all lanes.
    lanes = loop.stored_bytes // (stored.carries * stored.size) if stored and loop.stored_bytes else 1
    if loop.kind is not None:
        together = f"for all {loop.waiting} lanes together: " if loop.waiting > 1 else ""
        of_lane = f"for one of {lanes} lanes: " if lanes > 1 else together
        taken = f", takes {stored.kind} ({of_lane}{stored.reason})" if stored and stored.reason else ""
        idle = "" if loop.derivative is None or loop.derivative.uses_kind else ", which does nothing here"
        yield f"kind: {loop.kind!r}{taken}{idle}"
    if loop.derivative is not None:
        yield f"derivative: {loop.derivative!r}, which differs from that of the steps {loop.derivative.differs}"
    if loop.in_words:
        yield f"gradient stores {loop.in_words}"
    elif stored is not None:
        times = f" x {lanes} lanes" if lanes > 1 else ""
        records = ", or residuals in their place" if stored.records else ""
        each = f"{stored.carries} {stored.what} x {in_bytes(stored.size)}{times}"
        of_one = f", {in_bytes(loop.stored_bytes / loop.waiting)} for each lane" if loop.waiting > 1 else ""
        total = f"{in_bytes(loop.stored_bytes)}{of_one}{records}"
        yield f"gradient stores {f'{each} = {total}' if stored.size else 'nothing'}"
        yield _evaluations(loop, stored)
    else:
        yield from no_gradient
    if all(loop.operations):
        of_value, of_gradient = loop.operations
        times = f" ({of_gradient / of_value:.2g} times as many to compile)"
        yield f"operations of the body: {of_value}, with the gradient {of_gradient}{times}"


def _blocks(loop: LoopExplanation) -> Iterator[str]:
    """What free lanes run."""
    if loop.blocks:
        yield "blocks, each for the lanes that are at it (microseconds for 64 lanes):"
    for block in loop.blocks:
        yield f"  {block.nanoseconds / 1000:.3g}  {block.words}{', where lanes wait for others' if block.waits else ''}"


def _runs(loop: LoopExplanation) -> str:
    """When a branch is evaluated, and for whom."""
    if loop.waiting > 1:
        return f"for all {loop.waiting} lanes, if one of them takes it"
    how = loop.lanes_taken
    if how == Sequential():
        return "if it is taken, for one lane after another"
    if how is not None and how not in (Lockstep(), AutoLanes()):
        return f"if it is taken, in a batch for the lanes that take it ({how!r}); once more for a gradient"
    return "if it is taken"


@api_boundary
def explain(fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None) -> Explanation:
    """Explain the loops of a function: what they carry, what a gradient stores, and what makes them slow.

    ::

        print(lx.explain(loss, params, xs, jnp.int32(700)))

    `explain` traces and lowers the function, without compiling or running it. It finds all loops, of loopax and of
    `jax.lax`: in the function, in the libraries that it calls, and in the bodies of other loops.

    Parameters
    ----------
    fn
        Any function that JAX can trace.
    *args
        The arguments for `fn`. Arrays and Python floats are traced. All other values (Python ints and bools, strings,
        functions) keep their Python values. For example, an int is a static length, and `jnp.int32(...)` is a length
        known only at run time. A `jax.ShapeDtypeStruct` can replace an array.
    argnums
        The numbers of the arguments with respect to which a gradient is taken. None: all floating-point arrays.

    Returns
    -------
    Explanation
        The explanation: `print` shows a text, and `show()` draws tables. Each loop has its source line, kind, bound,
        arrays, stored carries with their bytes, and body evaluations. Each loop also has the reason for its kind, and
        warnings that name the line to change.

    Raises
    ------
    TypeError
        - `fn` is not a function, or JAX cannot trace it.
        - The arguments do not fit `fn`.
        - `argnums` names no argument that can be differentiated.
    ValueError
        `argnums` names an argument that does not exist.

    Notes
    -----
    Cost: tracing and lowering the function and its gradient.

    A `jax.vmap` around the function is not seen, so explain the mapped function.

    All temporary memory of a program is known only when it is compiled: `compare` shows what XLA reports.

    """
    asked = subject("explain", fn, args, argnums)
    found = find(asked.program.closed, asked.inputs)
    loops = tuple(map(_explained, found))
    differentiated = tuple(value.name for value in asked.inputs if value.perturbed)
    problem = "" if differentiated else "no floating-point array among the arguments"
    try:
        if differentiated:
            gradient = gradient_of(asked.program.closed, asked.perturbed)
            loops = _with_operations(loops, *(operations(p, found) for p in (asked.program.closed, gradient)))
    except REFUSALS as error:
        problem = str(error)
    return Explanation(asked.name, differentiated, loops, problem)


def _with_operations(
    loops: tuple[LoopExplanation, ...], value: Counter[str], gradient: Counter[str]
) -> tuple[LoopExplanation, ...]:
    def counted(loop: LoopExplanation) -> LoopExplanation:
        inner = _with_operations(loop.inner, value, gradient)
        return replace(loop, operations=(value[loop.source], gradient[loop.source]), inner=inner)

    return tuple(map(counted, loops))


def explanation_of(eqn: Any) -> LoopExplanation:
    """A loop that is an equation, where all its operands are differentiated that can be."""
    found = found_at(eqn, [Value(perturbed=has_tangents(atom.aval)) for atom in eqn.invars])
    assert found is not None
    return _explained(found)


def _explained(found: FoundLoop) -> LoopExplanation:
    loop, debug_info = found.loop, found.loop.debug_info or DebugInfo("", None, None, False, Names((), (), (), ()))
    is_lax = found.library == "lax"
    kind = None if is_lax else debug_info.kind
    in_words = loop.derivative.in_words(kind) if loop.derivative else kind.in_words() if kind else ""
    stored, problem = (None, "") if in_words else stored_of(found)
    lanes = taken = None if is_lax else debug_info.lanes
    if isinstance(lanes, AutoLanes) and not isinstance(loop.lanes, AutoLanes):  # it has chosen, in a batch
        taken = loop.lanes
    return LoopExplanation(
        f"{found.library}.{debug_info.function}" if debug_info.function else "a loop of loopax",
        found.source,
        kind,
        lanes,
        loop.bound if debug_info.most_steps is None else debug_info.most_steps,
        debug_info.fixed,
        tuple(_leaves(found, stored)),
        max(found.waiting, 1),
        loop.derivative,
        in_words,
        stored,
        stored.carries * stored.size * found.lanes if stored else 0,
        problem,
        tuple(advice_for(found, stored)),
        tuple(map(_explained, found.inner)),
        debug_info.branch,
        debug_info.mixed_by,
        dict(debug_info.lanes_expected),
        taken,
        debug_info.blocks,
    )


def _leaves(found: FoundLoop, stored: Stored | None) -> list[Leaf]:
    """The arrays of a loop; what is there for its own sake (its condition, its checks) has no name and is no leaf."""
    consts, _, xs = found.loop.inputs(found.operands)
    is_stored = stored.leaves if stored else (False,) * found.loop.num_carry

    def leaf(value: Value, role: str, is_stored: bool = False) -> Leaf:
        aval, loop = value.aval, found.loop
        # The steps of a loop with a derivative of its own run on constants, and its result has one all the same.
        has_own_derivative = role == "carried" and loop.derivative is not None and has_tangents(aval)
        is_differentiated = value.perturbed or has_own_derivative
        return Leaf(value.name, role, tuple(aval.shape), aval.dtype, num_bytes([aval]), is_stored, is_differentiated)

    return [
        *(leaf(value, "constant") for value in consts if value.aval.shape),
        *(leaf(value, "carried", keep) for value, keep in zip(found.carry, is_stored, strict=True) if value.name),
        *(leaf(value, "stream") for value in (*xs, *found.ys)),
    ]
