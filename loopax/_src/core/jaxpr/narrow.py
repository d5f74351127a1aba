"""Residuals as they were before they were repeated: a mask as one bool for each lane, a mean as one number for a row.

JAX stores what a product is taken with, which often is a small array that is repeated along an axis.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import bind_again, makers, num_bytes
from loopax._src.jax_internals import ClosedJaxpr

_LARGE = 4096  # bytes, from which on a mask of bools is stored in place of one of numbers: it has to be converted


Way = tuple[Any, list[Any]]  # a variable, and the equations that repeat it


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
                (value,) = bind_again(eqn, [value])
            found.append(value)
        return found


def narrow(known: ClosedJaxpr, num_outputs: int, avals: Sequence[Any]) -> Narrow:
    """Fewer or smaller residuals, which are the outputs of `known` from `num_outputs` on, and have these types."""
    residuals = known.outvars[num_outputs:]
    # Of those of a size the furthest back, which other residuals may repeat, too.
    ways = [min(reversed([*_ways(known, x)]), key=lambda way: num_bytes([way[0].aval])) for x in residuals]
    if not any(equations for _, equations in ways):
        return Narrow(known, list(avals), None, residuals)
    pairs = zip(ways, avals, strict=True)
    types = {id(source): (source, source.aval if equations else aval) for (source, equations), aval in pairs}
    sources, avals = map(list, zip(*types.values(), strict=True))
    known = jaxi.replace_jaxpr(known, known.invars, [*known.outvars[:num_outputs], *sources])
    return Narrow(jaxi.dce(known, [True] * len(known.out_avals), True)[0], avals, ways, sources)


def _ways(closed: ClosedJaxpr, variable: Any) -> Iterator[Way]:
    """The variables that this one repeats, itself first."""
    equations = list[Any]()
    yield variable, equations
    while not isinstance(variable, jaxi.Literal) and variable in makers(closed):
        eqn, position = makers(closed)[variable]
        if jaxi.repeats(eqn) or (jaxi.converts(eqn) and num_bytes([variable.aval]) >= _LARGE):
            variable, equations = eqn.invars[0], [eqn, *equations]
        elif jaxi.is_jit(eqn) and (inner := jaxi.called(eqn)):
            *_, (source, more) = _ways(inner, inner.outvars[position])
            if source not in inner.invars:
                return
            variable, equations = eqn.invars[inner.invars.index(source)], [*more, *equations]
        else:
            return
        if isinstance(variable, jaxi.Literal):
            return
        yield variable, equations
