"""Kinds and derivatives: what a user chose that a gradient of a loop stores, and which derivative the loop has.

A kind is asked for its plan where a gradient of a loop is taken. A derivative runs the loop where it is called.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.loop import Loop, LoopOutputs, Outcome, num_recorded, result_avals
from loopax._src.core.ir.plan import Plan
from loopax._src.jax_internals import jaxpr_as_fun
from loopax._src.pytrees.leaves import describe, type_in_words

# A loop that a user has called, with its operands: what a derivative runs.


class LoopOperands(NamedTuple):
    """The operands of a loop: a pytree of arrays. The loop takes the rows low, ..., high - 1.

    Attributes
    ----------
    low, high : int32[]
        The first row, and the row after the last.
    consts
        The arrays that the body closes over.
    carry
        The arrays of the first carry. If the loop has a condition, the first array says whether to take a step.
    xs
        The rows of a scan: arrays `(bound, ...)`.

    """

    low: Any
    high: Any
    consts: Sequence[Any]
    carry: Sequence[Any]
    xs: Sequence[Any]


@dataclass(frozen=True, eq=False)
class LoopCall:
    """A loop that a user has called, with its operands.

    `Derivative.run` gets a `LoopCall` and returns the results of the loop.

    Carries, rows and constants are flat lists of arrays.

    Attributes
    ----------
    loop
        The static description of the loop. `loop.bound` is the most steps, or None. `loop.kind` is the kind.
    operands : LoopOperands
        The operands of the loop.
    is_fixed : bool
        Whether the loop always takes as many steps as its bound.
    where : str
        The function of the user, for messages.
    unpack : callable
        `unpack(carry)` returns the pytree that the user's body gets, from the arrays of a carry.
    checked : callable
        `checked(results, failed, message, amount, throw=None)` returns the results, and raises at run time where
        `failed` (bool[]) is True. The error begins with the call of the loop and its line. `{amount}` in the message
        becomes the number `amount`, and its lane. With `throw=False`, the results are NaN instead; None is the `throw`
        of the loop.

    """

    loop: Loop
    operands: LoopOperands
    is_fixed: bool
    where: str
    unpack: Callable[[Sequence[Any]], Any]
    checked: Callable[..., Any]
    _run_loop: Callable[[Loop, LoopOperands], Outcome]

    def run(self) -> Outcome:
        """Run the loop, with the derivative of its steps; gradients store what its kind says."""
        return self.loop.kind._run(self)

    def step(self, row: Any, carry: Sequence[Any], x: Sequence[Any] = ()) -> LoopOutputs:
        """Evaluate the body once, and return the next carry and a row of `ys` as the pair `(carry, ys)`.

        Prints and callbacks of the body belong to the steps of the loop, and do not happen here.
        """
        body = without_effects(self.loop.body)
        return self.loop.outputs(jaxpr_as_fun(body)(row, *self.operands.consts, *carry, *x))

    def at(self, operands: LoopOperands) -> "LoopCall":
        """Return the same loop with other operands."""
        return replace(self, operands=operands)

    def stored_by(self, kind: "Kind") -> "LoopCall":
        """Return the same loop; its gradients store what this kind says."""
        return replace(self, loop=self.loop._replace(kind=kind.without_functions()))


# What a kind may know of a loop whose gradient is taken, and what it may say of its cost.


class StepFacts(NamedTuple):
    """What is carried from one step of a loop to the next, and how long a step takes.

    Attributes
    ----------
    carry_bytes : int
        The bytes of that part of the carry that the derivative of a step needs.
    evaluation : float
        The estimated time of one evaluation of the step, in nanoseconds.
    overhead : float
        The overhead of one step of a loop, in nanoseconds.
    derivative : float
        The estimated time of the derivative of a step from its carry, in nanoseconds. It includes the overhead, and
        what is evaluated again of the step.

    """

    carry_bytes: int
    evaluation: float
    overhead: float = 0.0
    derivative: float = 0.0


class ResidualFacts(NamedTuple):
    """What the derivative of a step needs if no step is recomputed.

    Attributes
    ----------
    stored_bytes : int
        The bytes that are stored of one step.
    derivative : float
        The estimated time of the derivative of a step from its residuals, in nanoseconds. It includes the overhead of
        a step. The time in which the residuals are stored is not included.

    """

    stored_bytes: int
    derivative: float = 0.0


class Measuring(NamedTuple):
    """What `Tuned` may ask for: the times of a step by several plans, why there are none, and the loop as a text."""

    # Of plans, an estimate, a deadline, and a number of lanes.
    times: Callable[[Sequence[Plan], float, float, int], list[float | None]]
    obstacle: Callable[[], str]
    program: Callable[[], str]


class Cost(NamedTuple):
    """What a kind costs for a loop.

    Attributes
    ----------
    memory : float
        The most bytes that a gradient stores.
    time : float
        The estimated nanoseconds of a step, value and gradient together.
    stored : str
        What is stored, as a text for `explain`.

    """

    memory: float
    time: float
    stored: str = ""


@dataclass(frozen=True, eq=False)
class LoopFacts:
    """The facts of a loop whose gradient is taken.

    Sizes and times include batches that `jax.vmap` makes inside the gradient. Times are also for `lanes` lanes of a
    `jax.vmap` outside of it, whose number is not known where the gradient is traced.

    Attributes
    ----------
    bound : int or None
        The most steps that the loop takes; None if there is no bound.
    is_fixed : bool
        Whether the loop always takes as many steps as its bound.
    bound_is_loose : bool
        Whether the loop may take far fewer steps than its bound.
    length_is_known : bool
        Whether the length is known when the loop starts: no condition ends the loop.
    sizes_are_known : bool
        Whether sizes are known when the loop is traced. False for symbolic dimensions of `jax.export`.
    share : float
        The share of the memory budget that this loop may use. Less than 1 if several loops share the budget.
    writes_rows : bool
        Whether a step writes a small part of a large array.
    ends_early : bool
        Whether most lanes are expected to take far fewer steps than the bound: lanes that leave a batch when they have
        finished (`lanes="compact"` and others).
    is_batch : bool
        Whether a `jax.vmap` inside the gradient has made a batch of the loop.
    lanes : int
        The lanes outside of the gradient for which times are estimated. The default is 1.
    lanes_to_come : int
        How many lanes that take their steps together are to be expected outside of the gradient: 1, or 64 if the loop
        names a way to run lanes.
    lanes_apart : int
        The same for lanes that run one after another, and all store what they need.
    step : StepFacts
        What a step carries, and how long it takes.
    residuals : ResidualFacts
        What the derivative of a step needs if no step is recomputed.

    """

    bound: int | None
    is_fixed: bool
    bound_is_loose: bool
    length_is_known: bool
    sizes_are_known: bool
    share: float
    writes_rows: bool
    _measure_step: Callable[[int], StepFacts]
    _measure_residuals: Callable[[int], ResidualFacts]
    _measuring: "Measuring | None" = None
    ends_early: bool = False
    is_batch: bool = False
    lanes_to_come: int = 1
    lanes_apart: int = 1
    lanes: int = 1

    @cached_property
    def step(self) -> StepFacts:
        """What a step carries, and how long it takes."""
        return self._measure_step(self.lanes)

    @cached_property
    def residuals(self) -> ResidualFacts:
        """What the derivative of a step needs. For a large body, the first access takes long."""
        return self._measure_residuals(self.lanes)


class Kind(ABC):
    """Decide what a gradient of a loop stores. Values do not depend on the kind.

    loopax has the kinds `Auto`, `Checkpointed`, `Bounded`, `Residuals`, `Lax` and `Reversible`. To write your own kind,
    subclass `Kind` and define `plan` (docs/write-a-kind.md). Objects must be hashable, and equal if they mean the same:
    JAX uses them as keys of its caches. A frozen dataclass does both.

    Attributes
    ----------
    needs_bound : bool
        Whether the kind needs a static bound. True: a loop without a bound raises a ValueError where it is called. The
        default is False.
    inverse : callable or None
        The function that undoes a step, for the plan `LastCarry`. The function takes the arguments of the body with the
        carry after the step, and returns the carry before the step. None (the default): no inverse.
    record : callable or None
        The function that returns what a step loses. The function takes the arguments of the body, with two carries
        (before and after the step) in place of one. The inverse gets the result as its last argument. None (the
        default): nothing is recorded.

    """

    needs_bound: ClassVar[bool] = False
    inverse: Callable[..., Any] | None = None
    record: Callable[..., Any] | None = None
    _chooses: ClassVar[bool] = False  # among other kinds, and stores nothing itself

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

    def _run(self, call: LoopCall) -> Outcome:
        """Run the loop, with the checks of this kind where a derivative is taken, or in parts."""
        return call._run_loop(call.loop, call.operands)

    def _of_steps(self, call: LoopCall) -> tuple[LoopCall, "Kind"]:
        """The call with the checks of this kind, and the kind of steps that `Truncated` chooses."""
        return call, self

    def _where_steps_may_break(self) -> "Kind":
        """The kind of a loop of static length that may end before (`core/finite.py`)."""
        return self

    def _for_lanes(self, lanes: int) -> "Kind":
        """The kind of one of so many lanes that take their steps together, and share the memory of the loop."""
        del lanes
        return self

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


@dataclass(frozen=True)
class Decided(Kind):
    """A plan that is already there: of loops that loopax makes, and of a loop whose kind was asked."""

    decided: Plan

    @property
    def needs_bound(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - of this object
        """See `Kind.needs_bound`."""
        return self.decided.needs_bound

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`."""
        del loop
        return self.decided


class Derivative(ABC):
    """Give a loop another derivative than that of its steps. Values do not depend on the derivative.

    loopax has the derivatives `Implicit` and `Truncated`. To write your own derivative, subclass `Derivative` and
    define `run` (docs/write-a-kind.md). Objects must be hashable, and equal if they mean the same, as those of a
    `Kind`.

    Attributes
    ----------
    differs : str
        How the derivative differs from that of the loop's steps: `"on purpose"` (the default), or `"by a tolerance"`.
    uses_kind : bool
        Whether steps are differentiated, so that the `kind` of the loop says what a gradient stores of these. False:
        `kind` does nothing, and must be `"auto"` or `Auto(...)`. The default is True.

    """

    differs: ClassVar[Literal["on purpose", "by a tolerance"]] = "on purpose"
    uses_kind: ClassVar[bool] = True

    @abstractmethod
    def run(self, call: LoopCall) -> Outcome:
        """Run the loop and return its results, with this derivative.

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

    def in_words(self, kind: Kind) -> str:
        """Return what a gradient stores of a loop of this kind, as a text for `explain`. See `Kind.in_words`."""
        del kind
        return ""

    def without_functions(self) -> "Derivative":
        """Return the derivative without its functions. See `Kind.without_functions`."""
        return self


def kept(choice: Any) -> Any:
    """What a program keeps of a kind or a derivative; raises where this has no hash."""
    stored = choice.without_functions()
    if type(stored).__hash__ is None:
        raise TypeError(
            f"{stored!r} cannot be hashed, and JAX uses it as a key of its caches. Write `@dataclass(frozen=True)` "
            "above the class."
        )
    return stored


GIVE_BOUND = "Give a static bound: `max_steps=`, rows of `xs`, or a static length."


def checked_kind(kind: Kind, bound: int | None) -> Kind:
    """What a program keeps of a kind; raises where the kind needs a bound and there is none."""
    if kind.needs_bound and bound is None:
        raise ValueError(f"kind={kind!r} needs to know at most how many steps there are. {GIVE_BOUND}")
    return kept(kind)


def run_by(derivative: Derivative, call: LoopCall) -> Outcome:
    """Run a loop with this derivative; raises where the results are not of the types that the loop has."""
    out: Any = derivative.run(call)
    if not isinstance(out, Outcome):
        raise TypeError(
            f"derivative={derivative!r}: `run` returned {out if out is None else type(out).__name__}, expected the "
            "results of the loop: what `call.run()` returns, with another carry or other rows perhaps "
            "(`out._replace(carry=[...])`)."
        )
    wanted, names = result_avals(call.loop), call.loop.names
    carry = ("whether to go on", *names.carry[1:]) if call.loop.predicated else names.carry
    num_ys = len(wanted.ys) - num_recorded(call.loop.body, call.loop.inverse)  # rows of a tape are no results
    lines = [
        *_misfits("results", [out.num_steps], [wanted.num_steps], ["num_steps"]),
        *_misfits("carry", out.carry, wanted.carry, carry),
        *_misfits("ys", out.ys, wanted.ys[:num_ys], names.ys[:num_ys]),
    ]
    if lines:
        raise TypeError(
            f"derivative={derivative!r}: `run` must return results of the same shapes and dtypes as `call.run()`. It "
            "does not, at:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nValues do not depend on a derivative: return every array of the loop, with its type (`x.astype(...)`)."
        )
    return out


def _misfits(group: str, got: Any, wanted: Sequence[Any], names: Sequence[str]) -> list[str]:
    """A line for each array that is not of the type that it should have; `names` are paths in the user's pytrees."""
    if not isinstance(got, list | tuple) or len(got) != len(wanted):
        count = len(got) if isinstance(got, list | tuple) else type(got).__name__
        paths = ", ".join(filter(None, names))
        return [f"{group}: got {count}, expected a list of {len(wanted)} arrays" + f" ({paths})" * bool(paths)]
    places = [f"{group}[{i}]" + f" ({name})" * bool(name) for i, name in enumerate(names)]
    in_words = lambda x: type_in_words(x) if hasattr(x, "dtype") else describe(x)  # noqa: E731
    lines = zip(places, map(in_words, got), map(in_words, wanted), strict=True)
    return [f"{place}: got {found}, expected {expected}" for place, found, expected in lines if found != expected]
