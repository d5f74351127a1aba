"""The seam between kinds and the core.

A kind is asked for its plan where a gradient of a loop is taken. One that has another derivative than the loop's also
runs the loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from loopax._src.core.ir.call import LoopCall
from loopax._src.core.ir.facts import Cost, LoopFacts
from loopax._src.core.ir.loop import Outcome
from loopax._src.core.ir.plan import Plan, Storage
from loopax._src.messages import kind_needs_bound

Derivative = Literal["exact", "to a tolerance", "another"]


class Kind(ABC):
    """A strategy for reverse mode: what a gradient stores. Values do not depend on it.

    loopax has `Auto`, `Checkpointed`, `Bounded`, `Residuals`, `Lax`, `Reversible`, `Implicit` and `Truncated`. A
    subclass of your own has one method, `plan` (docs/write-a-kind.md). Objects are hashable and compare equal where
    they mean the same, as frozen dataclasses do: they are parts of the keys of JAX's caches.
    """

    needs_bound: ClassVar[bool] = False  # a loop without a static bound is refused where it is called
    # Whose derivative a gradient is: the loop's exactly, the loop's to a tolerance, or another one on purpose. The last
    # two override `run`.
    derivative: ClassVar[Derivative] = "exact"
    # Takes one step back: called as the body, with the carry after a step, it returns the carry before it. None: the
    # kind brings none. See the plan `LastCarry`.
    inverse: Callable[..., Any] | None = None
    # Makes a row of a tape of each step. It is called as the body, with two carries in the place of one: before and
    # after the step. The inverse gets the row as its last argument. None: there is no tape.
    record: Callable[..., Any] | None = None

    @abstractmethod
    def plan(self, loop: LoopFacts) -> Plan:
        """What to store of this loop. Called where reverse mode or a linearisation is traced, never for values alone.

        Parameters
        ----------
        loop
            The bound, what is known of the length, and, when asked for, the sizes and the cost of a step.

        Returns
        -------
        Plan
            One of `Checkpoints`, `EveryCarry`, `EveryResidual` and `NoReverseMode` of `loopax.kinds`.

        """

    def run(self, call: LoopCall) -> Outcome:
        """Run a loop that a user has called. Override it to give the results another derivative.

        The values must be those of `call.run()`. Give them their derivative by means of JAX: `jax.lax.stop_gradient`,
        `jax.custom_jvp`, or more steps (`call.step`). Forward and reverse mode then agree, in every order.
        """
        return call.run()

    def of_steps(self, call: LoopCall) -> tuple[LoopCall, "Kind"]:
        """A call with the checks of this kind, and what stores its steps, where another kind chooses the steps."""
        return call, self

    def in_words(self) -> str:
        """What a gradient stores, for `explain`, where that is not what the plan says; else empty."""
        return ""

    def without_functions(self) -> "Kind":
        """The kind without the functions that it brings: programs keep it, and functions may close over tracers."""
        return self

    def cost(self, loop: LoopFacts) -> Cost | None:
        """What the plan costs, in bytes and in time; None if nobody can say. `Auto` compares these."""
        del loop
        return None


@dataclass(frozen=True)
class Asked(Storage):
    """A kind, which is asked for its plan where a gradient is taken."""

    kind: Kind
    is_fixed: bool  # these three as in `LoopFacts`
    bound_is_loose: bool
    share: float = 1.0

    @classmethod
    def of(cls, kind: Kind, bound: int | None, is_fixed: bool, bound_is_loose: bool) -> "Asked":
        """For a loop with this bound; raises where the kind needs one and there is none."""
        if kind.needs_bound and bound is None:
            raise ValueError(kind_needs_bound(kind))
        return cls(kind.without_functions(), is_fixed, bound_is_loose)

    @property
    def needs_bound(self) -> bool:
        """See `Storage.needs_bound`."""
        return self.kind.needs_bound

    def planned(self, facts_for: Callable[["Asked"], LoopFacts]) -> Plan:
        """See `Storage.planned`."""
        return self.kind.plan(facts_for(self))

    def part(self, share: float) -> "Asked":
        """See `Storage.part`."""
        return replace(self, share=self.share * share)

    def stored_by(self, kind: Kind) -> Self:
        """See `Storage.stored_by`."""
        return replace(self, kind=kind.without_functions())
