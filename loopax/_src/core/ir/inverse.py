"""The inverse of a step: a body that walks back, (row, *consts, *carry after the step, *x) -> carry before it.

A kind may bring one (`Kind.inverse`). It has the inputs of the body, and is rewritten wherever the body is. Whether a
leaf of the carry has a tangent, an axis of lanes or an unknown value is decided for both bodies together. So a part of
a loop holds all that its inverse reads.

The inverse of a loop that is not yet bound may have more inputs: a row of a tape (`core/row_buffers/tape.py`).
"""

from collections.abc import Sequence

from loopax._src.jax_internals import ClosedJaxpr, dce


def num_recorded(body: ClosedJaxpr, inverse: ClosedJaxpr | None) -> int:
    """Of how many arrays a row of the tape is, which the body returns as its last ys; 0 where there is no tape."""
    return 0 if inverse is None else len(inverse.in_avals) - len(body.in_avals)


def needed_by_inverse(inverse: ClosedJaxpr, carry: Sequence[bool]) -> list[bool]:
    """Which inputs behind the row it takes to walk these leaves of the carry back."""
    return dce(inverse, carry, False)[1][1:]


def part_of_inverse(inverse: ClosedJaxpr | None, inputs: Sequence[bool], carry: Sequence[bool]) -> ClosedJaxpr | None:
    """The inverse for these leaves of the carry alone. It has these inputs behind the row, and needs no others."""
    if inverse is None:
        return None
    keep = [True, *inputs]
    part, used = dce(inverse, carry, keep)
    assert used == keep
    return part
