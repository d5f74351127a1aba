"""Programs whose loops do not show progress: recomputed steps are not shown a second time."""

from collections.abc import Iterator
from typing import Any

from loopax._src.core.ir.progress import Reporting
from loopax._src.core.jaxpr.util import inner_jaxprs, map_parameter, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr


def strip_progress(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with loops that report nothing; itself where none does."""
    return _stripped(closed) if _reports(closed) else closed


def strip_progress_of_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation, with programs that do not show progress."""
    return {name: map_parameter(value, strip_progress, _without_reporting) for name, value in params.items()}


def _without_reporting(value: Any) -> Any:
    return None if isinstance(value, Reporting) else value


def strip_progress_of_equation(eqn: Any) -> Any:
    """The equation, with programs that do not show progress."""
    return eqn.replace(params=strip_progress_of_params(eqn.params)) if _equation_reports(eqn) else eqn


@weakly_cached
def _reports(jaxpr: Any) -> bool:
    """Whether a loop anywhere inside reports."""
    eqns = jaxpr.jaxpr.eqns if isinstance(jaxpr, ClosedJaxpr) else jaxpr.eqns
    return any(map(_equation_reports, eqns))


def _equation_reports(eqn: Any) -> bool:
    return any(map(_reports, inner_jaxprs(eqn))) or any(
        isinstance(leaf, Reporting) for value in eqn.params.values() for leaf in _with_fields(value)
    )


def _with_fields(value: Any) -> Iterator[Any]:
    """A parameter and, where it is the static description of something, its fields."""
    yield value
    if hasattr(value, "_fields"):
        yield from value


@weakly_cached
def _stripped(closed: ClosedJaxpr) -> ClosedJaxpr:
    eqns = list(map(strip_progress_of_equation, closed.jaxpr.eqns))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)  # type: ignore[attr-defined]
