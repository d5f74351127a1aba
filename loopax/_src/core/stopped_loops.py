"""Loops in the body of a loop, in which a lane that has finished takes no step.

Where a body is mere arithmetic but for these loops, such a lane computes with operands of its own, and what it computes
is thrown away (`core/masking.py`). In a loop alone could it stay for longer than the others do. In a derivative it is
given the operands of an active lane, and takes the steps of that.

Which operands lanes have of their own is known when JAX maps an equation. So this is a primitive, and its batching rule
decides: a loop in which all lanes take the same steps stays as it is.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import Loop, deciding_operands, loop_p
from loopax._src.core.jaxpr.dependence import dependence, stoppable, to_bits
from loopax._src.core.jaxpr.types import Axis, batch_if_mapped, fill_axis, is_batched, without_tangents
from loopax._src.core.jaxpr.util import Mask, bind_again, evaluate, trace, weakly_cached
from loopax._src.core.masking import stop_inactive_p
from loopax._src.core.own_arrays import takes
from loopax._src.jax_internals import ClosedJaxpr, Literal, Primitive, equations_in, inner_jaxprs

# Operands are `active, low, high`, and the predicate of a loop that has one, with what decides about it. The result is
# what may stop a lane that is not active: the predicate, or else `high`.
enter_p: Primitive = jaxi.new_primitive("enter_loop")


def entered(active: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of a loop, for a lane that takes no step of it if it is not active."""
    places = deciding_operands(Loop(**eqn.params))
    at = places[2] if len(places) > 2 else 1
    (new,) = enter_p.bind(active, *(operands[i] for i in places))
    return [*operands[:at], new, *operands[at + 1 :]]


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    at = 3 if len(operands) > 3 else 2
    if not any(is_batched(dims[1:])):
        return [operands[at]], [dims[at]]
    axis = Axis.of(axis_data)
    active, low, given = (fill_axis(axis, operands[i], dims[i]) for i in (0, 1, at))
    other = jnp.zeros_like(given) if len(operands) > 3 else low
    return stop_inactive_p.bind(active, given, other, when="in_derivatives"), [0]


jaxi.register(
    enter_p,
    meaning=lambda _, __, high, *decides: [*decides, high][:1],
    params=[],
    jvp=without_tangents(enter_p),
    batch=batch_if_mapped(enter_p, _batch),
)

stoppable[enter_p] = lambda _: True
takes[enter_p] = lambda eqn: (range(4, len(eqn.invars)), {})
stoppable[loop_p] = lambda eqn: Loop(**eqn.params).derivative is None and Loop(**eqn.params).inverse is None


@weakly_cached
def holds_stoppable(program: ClosedJaxpr) -> bool:
    """Whether there is such a loop in a program."""
    return any(eqn.primitive is loop_p for eqn in equations_in(program))


@weakly_cached
def stop_suffices(body: ClosedJaxpr, mapped: Mask) -> bool:
    """Whether a lane that takes no step of the loops in a body takes none of those in them, either.

    Not where all lanes take the same steps of a loop that holds others. `mapped`: which inputs lanes have of their own.
    """
    flat = trace(lambda *inputs: evaluate(body, inputs, bind_again, inlined=jaxi.inlinable), body.in_avals)
    own = to_bits(mapped)
    for eqn in flat.eqns:
        if eqn.primitive is not loop_p:
            if any(map(_holds_loops_in_loops, inner_jaxprs(eqn))):
                return False
        elif any(map(holds_stoppable, inner_jaxprs(eqn))):
            decide = [eqn.invars[i] for i in deciding_operands(Loop(**eqn.params))]
            found = jaxi.replace_jaxpr(flat, outvars=[x for x in decide if not isinstance(x, Literal)])
            if not any(bits & own for bits in dependence(found)):
                return False
    return True


def _holds_loops_in_loops(program: ClosedJaxpr) -> bool:
    loops = (eqn for eqn in equations_in(program) if eqn.primitive is loop_p)
    return any(holds_stoppable(inner) for eqn in loops for inner in inner_jaxprs(eqn))
