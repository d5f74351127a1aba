"""The seam between kinds and the core.

A kind is asked for its plan where a gradient of a loop is taken. One that has another derivative than the loop's also
runs the loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from loopax._src.core.ir.call import LoopCall
from loopax._src.core.ir.facts import Cost, LoopFacts
from loopax._src.core.ir.inverse import num_recorded
from loopax._src.core.ir.loop import Outcome, result_avals
from loopax._src.core.ir.plan import Plan, Storage
from loopax._src.messages import (
    kind_needs_bound,
    no_outcome,
    no_plan,
    other_outcome,
    plan_needs_bound,
    unhashable_kind,
)

Derivative = Literal["exact", "to a tolerance", "another"]


class Kind(ABC):
    """Decide what a gradient of a loop stores. Values do not depend on the kind.

    loopax has the kinds `Auto`, `Checkpointed`, `Bounded`, `Residuals`, `Lax`, `Reversible`, `Implicit` and
    `Truncated`. To write your own kind, subclass `Kind` and define `plan` (docs/write-a-kind.md). Objects must be
    hashable, and equal if they mean the same: JAX uses them as keys of its caches. A frozen dataclass does both.

    Attributes
    ----------
    needs_bound : bool
        Whether the kind needs a static bound. True: a loop without a bound raises a ValueError where it is called. The
        default is False.
    derivative : str
        How the derivative relates to that of the loop's steps: `"exact"` (the default), `"to a tolerance"`, or
        `"another"` on purpose. A kind with one of the last two overrides `run`.
    inverse : callable or None
        The function that undoes a step, for the plan `LastCarry`. The function takes the arguments of the body with the
        carry after the step, and returns the carry before the step. None (the default): no inverse.
    record : callable or None
        The function that returns what a step loses. The function takes the arguments of the body, with two carries
        (before and after the step) in place of one. The inverse gets the result as its last argument. None (the
        default): nothing is recorded.

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
        """Return what a gradient of this loop stores.

        loopax calls this method where reverse mode or a linearisation is traced. A loop that is never differentiated
        has no plan.

        Parameters
        ----------
        loop
            The facts of the loop: the bound, the length, and, on demand, the sizes and the cost of a step.

        Returns
        -------
        Plan
            One of `Checkpoints`, `EveryCarry`, `EveryResidual`, `LastCarry` and `NoReverseMode` of `loopax.kinds`.

        """

    def run(self, call: LoopCall) -> Outcome:
        """Run the loop and return its results. Override this method to give the results another derivative.

        The values must be those of `call.run()`. Define the derivative with JAX: `jax.lax.stop_gradient`,
        `jax.custom_jvp`, or more steps (`call.step`). Forward and reverse mode then agree, in every order.

        Parameters
        ----------
        call
            The loop, with its operands.

        Returns
        -------
        Outcome
            The results of the loop.

        """
        return call.run()

    def of_steps(self, call: LoopCall) -> tuple[LoopCall, "Kind"]:
        """Return the call with the checks of this kind, and the kind that stores the steps.

        An outer kind that chooses the steps, such as `Truncated`, calls this method.
        """
        return call, self

    def in_words(self) -> str:
        """Return what a gradient stores, as a text for `explain`. Empty: `explain` shows the plan."""
        return ""

    def without_functions(self) -> "Kind":
        """Return the kind without its functions. Override this method if the kind has functions as fields.

        Programs keep the kind, and its functions may close over traced values, which must not stay in a program.
        """
        return self

    def cost(self, loop: LoopFacts) -> Cost | None:
        """Return the memory and the time of the plan; None if they are not known.

        `Auto` compares its candidates by this cost.
        """
        del loop
        return None


def run_by(kind: Kind, call: LoopCall) -> Outcome:
    """Run a loop as its kind says; raises where the results are not of the types that the loop has."""
    out: Any = kind.run(call)
    if not isinstance(out, Outcome):
        raise TypeError(no_outcome(kind, out))
    wanted, names = result_avals(call.loop), call.loop.names
    carry = ("whether to go on", *names.carry[1:]) if call.loop.predicated else names.carry
    num_ys = len(wanted.ys) - num_recorded(call.loop.body, call.loop.inverse)  # rows of a tape are no results
    lines = [
        *_misfits("results", [out.num_steps], [wanted.num_steps], ["num_steps"]),
        *_misfits("carry", out.carry, wanted.carry, carry),
        *_misfits("ys", out.ys, wanted.ys[:num_ys], names.ys[:num_ys]),
    ]
    if lines:
        raise TypeError(other_outcome(kind, lines))
    return out


def runs_plainly(kind: Kind) -> bool:
    """Whether a kind runs a loop as it is, so that its derivative is that of the steps."""
    return type(kind).run is Kind.run


def _misfits(group: str, got: Any, wanted: Sequence[Any], names: Sequence[str]) -> list[str]:
    """A line for each array that is not of the type that it should have; `names` are paths in the user's pytrees."""
    if not isinstance(got, list | tuple) or len(got) != len(wanted):
        count = len(got) if isinstance(got, list | tuple) else type(got).__name__
        paths = ", ".join(filter(None, names))
        return [f"{group}: got {count}, expected a list of {len(wanted)} arrays" + f" ({paths})" * bool(paths)]
    places = [f"{group}[{i}]" + f" ({name})" * bool(name) for i, name in enumerate(names)]
    lines = zip(places, map(_in_words, got), map(_in_words, wanted), strict=True)
    return [f"{place}: got {found}, expected {expected}" for place, found, expected in lines if found != expected]


def _in_words(x: Any) -> str:
    """The dtype and shape of an array; what else it is."""
    if not hasattr(x, "dtype"):
        return f"{type(x).__name__} {x!r}"
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


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
        stored = kind.without_functions()
        if type(stored).__hash__ is None:
            raise TypeError(unhashable_kind(stored))
        return cls(stored, is_fixed, bound_is_loose)

    @property
    def needs_bound(self) -> bool:
        """See `Storage.needs_bound`."""
        return self.kind.needs_bound

    def planned(self, facts_for: Callable[["Asked"], LoopFacts]) -> Plan:
        """See `Storage.planned`."""
        facts = facts_for(self)
        plan = self.kind.plan(facts)
        if not isinstance(plan, Plan):
            raise TypeError(no_plan(self.kind, plan))
        if plan.needs_bound and facts.bound is None:
            raise ValueError(plan_needs_bound(self.kind, plan))
        return plan

    def part(self, share: float) -> "Asked":
        """See `Storage.part`."""
        return replace(self, share=self.share * share)

    def stored_by(self, kind: Kind) -> Self:
        """See `Storage.stored_by`."""
        return replace(self, kind=kind.without_functions())
