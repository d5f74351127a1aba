"""`explain`: the loops of a function, and what its gradient stores, without running it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loopax._src.core.ir.lanes import AutoLanes
from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.insight import explanation as showing
from loopax._src.insight.advice import Advice, Stored, advice_for, stored_by
from loopax._src.insight.explanation import Leaf, LoopExplanation
from loopax._src.insight.find_loops import FoundLoop, Value, find, found_at, gradient_of, see, subject
from loopax._src.jax_internals import api_boundary, has_tangents

MOST_NAMES = 6  # of what is differentiated, in the first line
REFUSALS = (ValueError, TypeError, NotImplementedError)


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
        for loop in self.loops:
            yield from loop.walk()

    def __str__(self) -> str:
        """Return the explanation as a text."""
        return showing.text(self._heading(), self.loops, self._summary())

    def __repr__(self) -> str:
        """Return the text of `str`, for notebooks and the Python prompt."""
        return str(self)

    def show(self) -> None:
        """Print the explanation: tables in a terminal if rich is installed, else a text."""
        showing.show(self._heading(), self.loops, self._summary())

    def _heading(self) -> list[str]:
        if not self.loops:
            return [f"{self.name}: no loops, neither of loopax nor of jax.lax."]
        branches = [bool(loop.branch) for loop in self.walk()]
        counts = ((branches.count(False), "loop", "loops"), (branches.count(True), "branch", "branches"))
        found = " and ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts if count)
        names = self.differentiated
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        of = f", gradient with respect to {', '.join(names[:MOST_NAMES])}{more}" if names else ""
        return [f"{self.name}: {found}{of}"]

    def _summary(self) -> list[str]:
        problem = [f"no gradient: {self.problem}"] if self.problem else []
        return ["", *problem, f"warnings: {len(self.warnings)}"] if self.loops else []


@api_boundary
def explain(fn: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None) -> Explanation:
    """Explain the loops of a function: what they carry, what a gradient stores, and what makes them slow.

    ::

        print(lx.explain(loss, params, xs, jnp.int32(700)))

    `explain` traces the function, without compiling or running it. `explain` finds all loops, of loopax and of
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
    Cost: tracing the function and its gradient.

    A `jax.vmap` around the function is not seen, so explain the mapped function.

    All temporary memory of a program is known only when it is compiled: `compare` shows what XLA reports.

    """
    asked = subject("explain", fn, args, argnums)
    loops = tuple(map(_explained, find(asked.program.closed, asked.inputs)))
    differentiated = tuple(value.name for value in asked.inputs if value.perturbed)
    problem = "" if differentiated else "no floating-point array among the arguments"
    try:
        if differentiated:
            gradient_of(asked.program.closed, asked.perturbed)
    except REFUSALS as error:
        problem = str(error)
    return Explanation(asked.name, differentiated, loops, problem)


def explanation_of(eqn: Any) -> LoopExplanation:
    """A loop that is an equation, where all its operands are differentiated that can be."""
    seen = see(eqn)
    assert seen is not None
    real = [Value(perturbed=has_tangents(atom.aval)) for atom in seen.operands]
    return _explained(found_at(eqn, seen, real))


def _explained(found: FoundLoop) -> LoopExplanation:
    seen, loop = found.seen, found.seen.loop
    debug_info = loop.debug_info
    is_lax = seen.library == "lax"
    kind = None if is_lax or debug_info is None else debug_info.kind
    in_words = loop.derivative.in_words(kind) if loop.derivative else kind.in_words() if kind else ""
    stored, problem = (None, "") if in_words else stored_of(found)
    lanes = taken = None if is_lax or debug_info is None else debug_info.lanes
    if isinstance(lanes, AutoLanes) and not isinstance(loop.lanes, AutoLanes):  # it has chosen, in a batch
        taken = loop.lanes
    return LoopExplanation(
        f"{seen.library}.{debug_info.function}" if debug_info else "a loop of loopax",
        found.source,
        kind,
        lanes,
        loop.bound if debug_info is None or debug_info.most_steps is None else debug_info.most_steps,
        bool(debug_info and debug_info.fixed),
        tuple(_leaves(found, stored)),
        max(seen.waiting, 1),
        loop.derivative,
        in_words,
        stored,
        stored.carries * stored.size * seen.lanes if stored else 0,
        problem,
        tuple(advice_for(found, stored)),
        tuple(map(_explained, found.inner)),
        debug_info.branch if debug_info else "",
        debug_info.mixed_by if debug_info else "",
        taken,
    )


def stored_of(found: FoundLoop) -> tuple[Stored | None, str]:
    """What a gradient of a loop stores, if any is taken of it, or why none can be."""
    perturbed = tuple(value.perturbed for value in found.operands)
    if not any(perturbed):
        return None, ""
    seen = found.seen
    try:
        return stored_by(seen.loop._replace(share=seen.loop.share / max(seen.lanes, 1)), perturbed), ""
    except REFUSALS as error:
        return None, str(error)


def _leaves(found: FoundLoop, stored: Stored | None) -> list[Leaf]:
    """The arrays of a loop; what is there for its own sake (its condition, its checks) has no name and is no leaf."""
    seen, loop = found.seen, found.seen.loop
    consts, _, xs = loop.inputs(found.operands)
    const_vars, carry_vars, xs_vars = loop.inputs(seen.operands)
    is_stored = stored.leaves if stored else (False,) * loop.num_carry
    # The steps of such a loop run on constants, and its result has a derivative all the same.
    has_own_derivative = loop.derivative is not None

    def leaf(value: Value, role: str, atom: Any, is_stored: bool = False) -> Leaf:
        aval = atom.aval
        is_differentiated = value.perturbed or (role == "carried" and has_own_derivative and has_tangents(aval))
        return Leaf(value.name, role, tuple(aval.shape), aval.dtype, num_bytes([aval]), is_stored, is_differentiated)

    carried = zip(found.carry, carry_vars, is_stored, strict=True)
    rows = zip(loop.names.ys, seen.results[loop.num_carry :], strict=False)
    return [
        *(leaf(value, "constant", atom) for value, atom in zip(consts, const_vars, strict=True) if atom.aval.shape),
        *(leaf(value, "carried", atom, keep) for value, atom, keep in carried if value.name),
        *(leaf(value, "stream", atom) for value, atom in zip(xs, xs_vars, strict=True)),
        *(leaf(Value(name or "ys"), "stream", atom) for name, atom in rows),
    ]
