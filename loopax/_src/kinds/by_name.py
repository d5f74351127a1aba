"""The `kind` argument: a kind, or the name of one."""

from typing import Any, Literal

from loopax._src.core import Kind
from loopax._src.kinds.auto import Auto
from loopax._src.kinds.bounded import Bounded
from loopax._src.kinds.checkpointed import Checkpointed
from loopax._src.kinds.implicit import Implicit
from loopax._src.kinds.lax import Lax
from loopax._src.kinds.residuals import Residuals
from loopax._src.pytrees.static_args import Why, no_choice, refuse_tracers

_KIND = Why("the program of a gradient", "choose one kind for all calls: values do not depend on it")

KindLike = Kind | Literal["auto", "lax", "checkpointed", "bounded", "residuals", "implicit"]
_BY_NAME: dict[str, type[Any]] = {
    "auto": Auto,
    "lax": Lax,
    "checkpointed": Checkpointed,
    "bounded": Bounded,
    "residuals": Residuals,
    "implicit": Implicit,
}
_WITH_ARGUMENTS = {"reversible": "lx.Reversible(inverse)", "truncated": "lx.Truncated(last=5)"}


def to_kind(kind: KindLike) -> Kind:
    """The strategy object behind the `kind` argument."""
    refuse_tracers("kind=...", kind, "a kind or the name of one", _KIND)
    if isinstance(kind, Kind):
        return kind
    if isinstance(kind, str) and kind in _BY_NAME:
        return _BY_NAME[kind]()
    raise ValueError(no_choice("kind", kind, "a kind of loop", _BY_NAME, _WITH_ARGUMENTS))
