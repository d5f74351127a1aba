"""The arguments `kind` and `derivative`: an object, or the name of one."""

from typing import Any, Literal

from loopax._src.core import Derivative, Kind
from loopax._src.kinds.auto import Auto
from loopax._src.kinds.implicit import Implicit
from loopax._src.kinds.storing import Bounded, Checkpointed, Lax, Residuals
from loopax._src.kinds.tuned import Tuned
from loopax._src.pytrees.static import Why, no_choice, refuse_tracers

_WHY = Why("the program of a gradient", "choose one for all calls: values do not depend on it")

KindLike = Kind | Literal["auto", "tuned", "lax", "checkpointed", "bounded", "residuals"]
DerivativeLike = Derivative | Literal["implicit"] | None
_KINDS = Auto, Tuned, Lax, Checkpointed, Bounded, Residuals
_BY_NAME: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in _KINDS}
_DERIVATIVES: dict[str, type[Any]] = {"implicit": Implicit}
_WRITTEN = {"implicit": "lx.Implicit()", "truncated": "lx.Truncated(last=5)"}


def to_kind(kind: KindLike) -> Kind:
    """The object behind the `kind` argument."""
    refuse_tracers("kind=...", kind, "a kind or the name of one", _WHY)
    if isinstance(kind, Kind):
        return kind
    if isinstance(kind, str) and kind in _BY_NAME:
        return _BY_NAME[kind]()
    is_class = isinstance(kind, type) and issubclass(kind, Derivative)
    if isinstance(kind, Derivative) or is_class or (isinstance(kind, str) and kind in _WRITTEN):
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(
            f"kind={name} is a derivative, and `kind` says what a gradient stores. Write "
            f"derivative={_WRITTEN.get(name.lower(), name)}, which while_loop, fori_loop, scan and rollout take."
        )
    raise ValueError(no_choice("kind", kind, "a kind of loop", _BY_NAME, {"reversible": "lx.Reversible(inverse)"}))


def to_derivative(derivative: DerivativeLike) -> Derivative | None:
    """The object behind the `derivative` argument."""
    refuse_tracers("derivative=...", derivative, "a derivative or the name of one", _WHY)
    if derivative is None or isinstance(derivative, Derivative):
        return derivative
    if isinstance(derivative, str) and derivative in _DERIVATIVES:
        return _DERIVATIVES[derivative]()
    if isinstance(derivative, Kind):
        raise ValueError(f"derivative={derivative!r} is a kind, which says what is stored: write kind={derivative!r}.")
    raise ValueError(no_choice("derivative", derivative, "a derivative of a loop", _DERIVATIVES, _WRITTEN))
