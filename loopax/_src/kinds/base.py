"""What every kind answers: what the core stores for a loop."""

from abc import ABC, abstractmethod

from loopax._src import core


class Kind(ABC):
    """A strategy for reverse mode. Choose one of its subclasses."""

    @abstractmethod
    def storage(self, bound: int | None, fixed: bool, bound_is_loose: bool) -> core.Storage:
        """What the core stores for a loop of at most `bound` steps.

        `fixed`: always as many, known when traced; `bound_is_loose`: perhaps far fewer.
        """


def need_bound(kind: Kind, bound: int | None) -> None:
    """Refuse a loop without a bound, for a kind that stores something for every step."""
    if bound is None:
        raise ValueError(
            f"kind={kind!r} stores something for every step, so it needs to know at most how many there are. "
            "Give a static bound: `max_steps=`, rows of `xs`, or a static length."
        )
