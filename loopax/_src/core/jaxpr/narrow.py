"""Residuals as they were before they were repeated: a mask as one bool for each lane, a mean as one number for a row.

JAX stores what a product is taken with, which often is a small array that is repeated along an axis.
"""

from collections.abc import Iterator
from typing import Any

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import bind_again, makers, num_bytes, trace
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun


def with_narrow_residuals(known: ClosedJaxpr, later: ClosedJaxpr, num_outputs: int) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Both parts of a step: what is known, and what takes the residuals of it, which repeats them now.

    Before: (...) -> (*outputs, *residuals), and (*residuals, *others) -> ... After: the same, with fewer or smaller
    residuals.
    """
    residuals = known.outvars[num_outputs:]
    # Of those of a size the furthest back, which other residuals may repeat, too.
    ways = [min(reversed([*_ways(known, x)]), key=lambda way: num_bytes([way[0].aval])) for x in residuals]
    if not any(equations for _, equations in ways):
        return known, later
    narrow = list(dict.fromkeys(source for source, _ in ways))

    def of_narrow(*operands: Any) -> list[Any]:
        values = dict(zip(narrow, operands, strict=False))
        wide = list[Any]()
        for source, equations in ways:
            value = values[source]
            for eqn in equations:
                (value,) = bind_again(eqn, [value])
            wide.append(value)
        return jaxpr_as_fun(later)(*wide, *operands[len(narrow) :])

    new = jaxi.replace_jaxpr(known, known.invars, [*known.outvars[:num_outputs], *narrow])
    avals = [*(x.aval for x in narrow), *later.in_avals[len(residuals) :]]
    return jaxi.dce(new, [True] * len(new.out_avals), True)[0], trace(of_narrow, avals)


def _ways(closed: ClosedJaxpr, variable: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The variables that this one repeats, itself first, and the equations by which it does."""
    equations = list[Any]()
    yield variable, equations
    while not isinstance(variable, jaxi.Literal) and variable in makers(closed):
        eqn, position = makers(closed)[variable]
        if jaxi.repeats(eqn):
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
