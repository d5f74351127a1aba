"""Loops in the body of a loop, in which a lane that has finished takes no step.

Where a body is mere arithmetic but for these loops, such a lane computes with operands of its own, and what it computes
is thrown away (`core/masking.py`). In a loop alone could it stay for longer than the others do. In a derivative it is
given the operands of an active lane, and takes the steps of that.

Which operands lanes have of their own is known when JAX maps an equation. So this is a primitive, and its batching rule
decides: a loop in which all lanes take the same steps stays as it is, and loops in that are looked at.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import Loop, deciding_operands, loop_p
from loopax._src.core.jaxpr.dependence import stoppable
from loopax._src.core.jaxpr.types import Axis, batch_if_mapped, fill_axis, is_batched
from loopax._src.core.jaxpr.util import weakly_cached
from loopax._src.core.masking import stop_inactive_p
from loopax._src.jax_internals import ClosedJaxpr, Primitive, ad, equations_in

# Operands are `active, low, high`, and the predicate of a loop that has one, with what decides about it. Results: what
# may stop a lane that is not active, the predicate or else `high`; and whether a lane is active in the body.
enter_p: Primitive = jaxi.new_primitive("enter_loop")


def entered(active: Any, eqn: Any, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Whether a lane is active in the body of a loop; and the operands of the loop, for a lane that may not be."""
    places = deciding_operands(Loop(**eqn.params))
    at = places[2] if len(places) > 2 else 1
    new, inside = enter_p.bind(active, *(operands[i] for i in places))
    return inside, [*operands[:at], new, *operands[at + 1 :]]


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    at = 3 if len(operands) > 3 else 2
    if not any(is_batched(dims[1:])):
        return [operands[at], operands[0]], [dims[at], dims[0]]
    axis = Axis.of(axis_data)
    active, low, given = (fill_axis(axis, operands[i], dims[i]) for i in (0, 1, at))
    other = jnp.zeros_like(given) if len(operands) > 3 else low
    (new,) = stop_inactive_p.bind(active, given, other, when="in_derivatives")
    return [new, jnp.ones((), bool)], [0, None]


def _jvp(primals: Sequence[Any], _: Sequence[Any]) -> Any:
    """Limits, predicates and flags have no tangents."""
    results = enter_p.bind(*primals)
    return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


jaxi.register(
    enter_p,
    meaning=lambda active, _, high, *decides: [*(decides or [high])[:1], active],
    params=[],
    jvp=_jvp,
    batch=batch_if_mapped(enter_p, _batch),
)

stoppable[enter_p] = lambda _: True
stoppable[loop_p] = lambda eqn: Loop(**eqn.params).derivative is None and Loop(**eqn.params).inverse is None


@weakly_cached
def holds_stoppable(program: ClosedJaxpr) -> bool:
    """Whether there is such a loop in a program."""
    return any(eqn.primitive is loop_p for eqn in equations_in(program))
