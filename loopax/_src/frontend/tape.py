"""The row of a tape that an inverse is given, while it is traced together with the step that makes the row.

The types of the row are known only when the step has been traced, so it cannot be an input. It is the result of
a primitive without operands instead, and becomes an input when the inverse is taken apart from the step.
"""

from collections.abc import Sequence
from typing import Any

from loopax._src.jax_internals import ClosedJaxpr, new_primitive, register, replace_jaxpr, strong

_row_of_tape_p = new_primitive("row_of_tape")


def row_of_tape(avals: Sequence[Any]) -> list[Any]:
    """Arrays of these types, which stand for a row."""
    return _row_of_tape_p.bind(avals=tuple(map(strong, avals)))


def take_out_row_of_tape(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr without the equation that stands for a row, and the variables of the row. They are defined nowhere."""
    eqns = closed.jaxpr.eqns
    rows = [eqn for eqn in eqns if eqn.primitive is _row_of_tape_p]
    rest = [eqn for eqn in eqns if eqn.primitive is not _row_of_tape_p]
    variables = [variable for eqn in rows for variable in eqn.outvars]
    return replace_jaxpr(closed, closed.jaxpr.invars, closed.jaxpr.outvars, rest), variables


register(_row_of_tape_p, abstract_eval=lambda *, avals: list(avals))
