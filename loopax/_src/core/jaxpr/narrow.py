"""Residuals as they were before they were repeated: a mask as one bool for each lane, a mean as one number for a row.

JAX stores what a product is taken with, which often is a small array that is repeated along an axis. Or it is an input
that need not be stored, of which some lanes were changed (`changed`): the weights of lanes, for the lanes that have
finished.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import bind_again, makers, num_bytes
from loopax._src.jax_internals import ClosedJaxpr, Primitive

_LARGE = 4096  # bytes, from which on a mask of bools is stored in place of one of numbers: it has to be converted


Way = tuple[Any, list[Any]]  # a variable, and the equations that repeat or change it

# By primitive, which operand an equation changes: the others are small, or follow from little.
changed: dict[Primitive, int] = {}


class Narrow(NamedTuple):
    """The known part of a step with residuals before they are repeated."""

    known: ClosedJaxpr  # (...) -> (*outputs, *residuals)
    avals: list[Any]  # of the residuals
    ways: list[Way] | None  # of each residual there was; None: they are as they were
    sources: list[Any]  # the variables that the residuals are

    def repeated(self, values: Sequence[Any]) -> list[Any]:
        """The residuals that there were."""
        if self.ways is None:
            return list(values)
        found, of = [], dict(zip(map(id, self.sources), values, strict=True))
        for source, equations in self.ways:
            value = of[id(source)]
            for eqn in equations:
                place = changed.get(eqn.primitive, 0)
                operands = [value if i == place else of[id(atom)] for i, atom in enumerate(eqn.invars)]
                (value,) = bind_again(eqn, operands)
            found.append(value)
        return found


def narrow(known: ClosedJaxpr, num_outputs: int, avals: Sequence[Any], free: Sequence[Any]) -> Narrow:
    """Fewer or smaller residuals, which are the outputs of `known` from `num_outputs` on, and have these types.

    Those that are inputs among `free` need not be stored.
    """
    residuals = known.outvars[num_outputs:]
    size = lambda way: 0 if way[0] in free else num_bytes([way[0].aval])  # noqa: E731
    # Of those of a size the furthest back, which other residuals may repeat, too.
    ways = [min(reversed([*_ways(known, x, free)]), key=size) for x in residuals]
    if not any(equations for _, equations in ways):
        return Narrow(known, list(avals), None, residuals)
    types = dict[int, tuple[Any, Any]]()
    for (source, equations), aval in zip(ways, avals, strict=True):
        types[id(source)] = source, source.aval if equations else aval
        for eqn in equations:
            others = [x for i, x in enumerate(eqn.invars) if i != changed.get(eqn.primitive, 0)]
            types |= {id(x): (x, x.aval) for x in others if id(x) not in types}
    sources, avals = map(list, zip(*types.values(), strict=True))
    known = jaxi.replace_jaxpr(known, known.invars, [*known.outvars[:num_outputs], *sources])
    return Narrow(jaxi.dce(known, [True] * len(known.out_avals), True)[0], avals, ways, sources)


def _ways(closed: ClosedJaxpr, variable: Any, free: Sequence[Any]) -> Iterator[Way]:
    """The variables that this one repeats, itself first; and the free one that it changes."""
    equations = list[Any]()
    yield variable, equations
    is_changed = False
    while not isinstance(variable, jaxi.Literal) and variable in makers(closed):
        eqn, position = makers(closed)[variable]
        if free and eqn.primitive in changed:
            variable, equations = eqn.invars[changed[eqn.primitive]], [eqn, *equations]
            is_changed = True
        elif jaxi.repeats(eqn) or (jaxi.converts(eqn) and num_bytes([variable.aval]) >= _LARGE):
            variable, equations = eqn.invars[0], [eqn, *equations]
        elif jaxi.is_jit(eqn) and (inner := jaxi.called(eqn)):
            *_, (source, more) = _ways(inner, inner.outvars[position], [])  # others are no variables here
            if source not in inner.invars:
                return
            variable, equations = eqn.invars[inner.invars.index(source)], [*more, *equations]
        else:
            return
        if isinstance(variable, jaxi.Literal):
            return
        if not is_changed or variable in free:
            yield variable, equations
