"""`explain`: the loops of a function, and what its gradient stores, without running it."""

from collections.abc import Callable, Sequence
from typing import Any

from loopax._src.core import DebugInfo, Names
from loopax._src.core.ir.lanes import AutoLanes
from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.insight.advice import REFUSALS, Stored, advice_for, stored_of
from loopax._src.insight.explanation import Explanation, Leaf, LoopExplanation
from loopax._src.insight.find_loops import FoundLoop, Value, find, found_at, gradient_of, subject
from loopax._src.jax_internals import api_boundary, has_tangents


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
        taken,
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
