"""Loops in the body of a loop, in which a lane that has finished takes no step.

Where a body is mere arithmetic but for these loops, such a lane computes with operands of its own, and what it computes
is thrown away (`core/masking.py`). In a loop alone could it stay for longer than the others do.

Which operands lanes have of their own is known when JAX maps an equation. So this is a primitive, and its batching rule
decides: a loop in which all lanes take the same steps stays as it is.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import Loop, loop_p, steps_differ
from loopax._src.core.jaxpr.dependence import stoppable
from loopax._src.core.jaxpr.types import Axis, batch_if_mapped, fill_axis, is_batched
from loopax._src.core.jaxpr.util import weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, Primitive, equations_in

# Operands are `active`, and those of the loop: `low, high, *consts, *carry, *xs`. Results are what may stop a lane that
# is not active: the predicate of a loop that has one, else `high`.
stop_p: Primitive = jaxi.new_primitive("stop_inactive")


def stopped(active: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of a loop that a lane does not enter if it is not active."""
    at = _place(Loop(**eqn.params))
    (new,) = stop_p.bind(active, *operands, **eqn.params)
    return [*operands[:at], new, *operands[at + 1 :]]


def _place(loop: Loop) -> int:
    return 2 + loop.num_consts if loop.predicated else 1


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    loop, axis = Loop(**params), Axis.of(axis_data)
    at = 1 + _place(loop)
    if not steps_differ(loop, is_batched(dims[1:])):
        return [operands[at]], [dims[at]]
    active, low, given = (fill_axis(axis, operands[i], dims[i]) for i in (0, 1, at))
    return [given & active if loop.predicated else jnp.where(active, given, low)], [0]


jaxi.register(
    stop_p,
    meaning=lambda _, *operands, **params: [operands[_place(Loop(**params))]],
    params=Loop._fields,
    batch=batch_if_mapped(stop_p, _batch),
)

stoppable[loop_p] = lambda eqn: eqn.params["derivative"] is None and eqn.params["inverse"] is None


@weakly_cached
def holds_stoppable(program: ClosedJaxpr) -> bool:
    """Whether there is such a loop in a program."""
    return any(eqn.primitive is loop_p for eqn in equations_in(program))
