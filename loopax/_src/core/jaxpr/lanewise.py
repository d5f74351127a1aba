"""Whether a program that somebody has written for a batch keeps its lanes apart.

The rule of a `custom_vmap` may do anything with its lanes: sort them, or subtract their mean. Here the axis of lanes is
followed from equation to equation. What works along it mixes lanes, and so may what is not known here.
"""

from collections.abc import Sequence
from typing import Any

from loopax._src.core.jaxpr.util import split_list
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    Scan,
    While,
    axis_after,
    branches,
    called,
    draws_for_all_lanes,
    is_cond,
    is_scan,
    is_while,
)

Axes = Sequence[int | None]  # of each value: which of its axes is that of lanes; None: all lanes have the same value


class MayMixLanesError(Exception):
    """It cannot be said that a program keeps lanes apart."""


def keeps_lanes_apart(program: ClosedJaxpr, inputs: Axes, results: Axes) -> bool:
    """Whether each lane of the results follows from the same lane of the inputs."""
    try:
        return list(_follow(program, inputs)) == list(results)
    except MayMixLanesError:
        return False


def _follow(program: ClosedJaxpr, inputs: Axes) -> list[int | None]:
    """The axis of lanes of each result."""
    axes: dict[Any, int | None] = dict(zip(program.jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else axes.get(atom)

    for eqn in program.jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        found = _of_equation(eqn, given) if any(axis is not None for axis in given) else [None] * len(eqn.outvars)
        axes.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def _of_equation(eqn: Any, given: Axes) -> Axes:
    if draws_for_all_lanes(eqn):
        raise MayMixLanesError
    if (program := called(eqn)) is not None:
        return _follow(program, given)
    if is_cond(eqn):
        return _same([_follow(branch, given[1:]) for branch in branches(eqn)])
    if is_scan(eqn):
        return _scan(Scan.of(eqn), given)
    if is_while(eqn):
        loop = While.of(eqn)
        _, consts, carry = split_list(given, loop.sizes)
        return _carried(loop.body, consts, carry, [])[0]
    if not eqn.outvars:  # an effect, of which no lane sees anything
        return []
    axis = None if eqn.effects else axis_after(eqn, given)
    if axis is None:
        raise MayMixLanesError
    return [axis] * len(eqn.outvars)


def _same(found: Sequence[Axes]) -> Axes:
    if any(axes != found[0] for axes in found):
        raise MayMixLanesError
    return found[0]


def _scan(loop: Scan, given: Axes) -> Axes:
    consts, carry, xs = split_list(given, loop.sizes)
    if not carry and all(axis is None for axis in consts) and all(axis in (0, None) for axis in xs):
        return [0] * (len(loop.body.out_avals) - len(carry))  # a map over lanes, one after another
    if any(axis == 0 for axis in xs):
        raise MayMixLanesError
    carry, ys = _carried(loop.body, consts, carry, [None if axis is None else axis - 1 for axis in xs])
    return [*carry, *(None if axis is None else axis + 1 for axis in ys)]


def _carried(body: ClosedJaxpr, consts: Axes, carry: Axes, x: Axes) -> tuple[Axes, Axes]:
    """The axes of carry and rows at the fixed point: a leaf that all lanes share may come to differ."""
    while True:
        out, ys = split_list(_follow(body, [*consts, *carry, *x]), [len(carry)])
        grown = [new if old is None else old for old, new in zip(carry, out, strict=True)]
        if grown == list(carry):
            return _same([carry, out]), ys
        carry = grown
