"""The seam between kinds and the core: a kind is asked for its plan where a gradient of a loop is taken."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from loopax._src.core.ir.plan import Plan, Storage
from loopax._src.messages import kind_needs_bound


class StepFacts(NamedTuple):
    """What one step of a loop stores and costs."""

    carry_bytes: int  # the part of the carry that the derivative of a step needs
    residual_bytes: int  # all that it needs, if no step is evaluated again
    evaluation: float  # evaluating the step once, in the time of a byte that is stored to memory and read again
    read_bytes: int = 0  # all that the derivative reads, with what it computes from stored residuals


class Cost(NamedTuple):
    """What a kind costs for a loop."""

    memory: float  # bytes that a gradient stores, at most
    time: float  # per step, beyond one evaluation and its derivative, in the unit of `StepFacts.evaluation`
    stored: str = ""  # what is stored, for `explain`


@dataclass(frozen=True, eq=False)
class LoopFacts:
    """What a kind may know of a loop whose gradient is taken. Batches that `jax.vmap` makes are in the sizes."""

    bound: int | None  # the most steps
    is_fixed: bool  # it always takes as many steps as its bound
    bound_is_loose: bool  # it may take far fewer
    length_is_known: bool  # when it starts: no condition stops it
    sizes_are_known: bool  # when it is traced; not so where `jax.export` has symbolic dimensions
    share: float  # of the memory that a kind was given: the loop is one of several that share it
    measure: Callable[[], StepFacts]

    @cached_property
    def step(self) -> StepFacts:
        """Of one step, with what a gradient needs. The first access traces the derivative of the body twice."""
        return self.measure()


class Kind(ABC):
    """A strategy for reverse mode: what a gradient stores. Values and derivatives do not depend on it.

    loopax has `Auto`, `Checkpointed`, `Bounded`, `Residuals` and `Lax`. A subclass of your own has one method, `plan`
    (docs/write-a-kind.md). Objects are hashable and compare equal where they mean the same, as frozen dataclasses do:
    they are parts of the keys of JAX's caches.
    """

    needs_bound: ClassVar[bool] = False  # a loop without a static bound is refused where it is called
    # Takes one step back: called as the body, with the carry after a step, it returns the carry before it. None: the
    # kind brings none. See the plan `LastCarry`.
    inverse: Callable[..., Any] | None = None

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
