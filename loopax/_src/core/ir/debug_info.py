"""Where a loop comes from: what a user called, and the names of what goes through it. No rule looks at it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from loopax._src.core.jaxpr.util import select

UNNAMED = ""


class Names(NamedTuple):
    """The names of a loop's operands and rows of results, as paths in a user's pytrees.

    A rule that changes which there are may leave them as they are: names that do not fit are not shown.
    """

    consts: tuple[str, ...]
    carry: tuple[str, ...]
    xs: tuple[str, ...]
    ys: tuple[str, ...]

    def keep(self, *masks: Sequence[bool]) -> "Names":
        """Those of what is kept of each."""
        return Names(*(_kept(mask, names) for mask, names in zip(masks, self, strict=True)))

    def with_tangents(self, *masks: Sequence[bool]) -> "Names":
        """The names of operands on pairs: behind each group, those of its tangents."""
        pairs = zip(self, self.keep(*masks), strict=True)
        return Names(*((*names, *(f"tangent of {name}" for name in dots)) for names, dots in pairs))

    def fit(self, sizes: Sequence[int]) -> "Names":
        """For so many of each."""
        pairs = zip(self, sizes, strict=True)
        return Names(*(names if len(names) == size else (UNNAMED,) * size for names, size in pairs))


def _kept(mask: Sequence[bool], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(select(mask, names)) if len(mask) == len(names) else ()


@dataclass(frozen=True)
class DebugInfo:
    """What a user called."""

    function: str
    kind: Any  # as it was given
    lanes: Any
    fixed: bool  # always as many steps, known when traced
    bound_is_loose: bool  # the bound is `max_steps`
    names: Names
    most_steps: int | None = None  # of the call, from which a kind may make several loops
    waiting: int = 1  # lanes that stop at different steps and run until the slowest is done
    branch: str = ""  # of a `cond` or a `switch`: the function of the user's
    mixed_by: str = ""  # the primitive that mixes lanes, for which a batch is in lockstep that would not be

    def renamed(self, names: Names) -> "DebugInfo":
        """Give the operands and results other names."""
        return replace(self, names=names)

    def mixed(self, primitive: str) -> "DebugInfo":
        """A batch in which lanes are mixed."""
        return replace(self, mixed_by=primitive)

    def in_lockstep(self, lanes: Any, consts: int, carry: int) -> "DebugInfo":
        """A batch that waits for its slowest lane, with so many more constants and leaves of the carry in front."""
        names = self.names
        names = names._replace(consts=(UNNAMED,) * consts + names.consts, carry=(UNNAMED,) * carry + names.carry)
        waiting = self.waiting * lanes if isinstance(lanes, int) else self.waiting
        return replace(self, names=names, waiting=waiting)

    def __repr__(self) -> str:
        """Short, for it stands in printed jaxprs."""
        return self.function
