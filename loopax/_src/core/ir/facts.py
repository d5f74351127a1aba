"""What a kind may know of a loop whose gradient is taken, and what it may say of its cost."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class StepFacts(NamedTuple):
    """What one step of a loop stores, and how long it takes.

    Attributes
    ----------
    carry_bytes : int
        The bytes of that part of the carry that the derivative of a step needs.
    residual_bytes : int
        The bytes that the derivative of a step needs if no step is recomputed.
    evaluation : float
        The estimated time of one evaluation of the step, in nanoseconds.
    read_bytes : int
        The bytes that the derivative reads, including what it computes from stored residuals.
    step : float
        The overhead of one step of a loop, in nanoseconds.
    carry_calls, residual_calls : float
        The nanoseconds that storing every carry, or the residuals of every step, adds to a step in calls of operations.
        The time of the bytes is not included.

    """

    carry_bytes: int  # the part of the carry that the derivative of a step needs
    residual_bytes: int  # all that it needs, if no step is evaluated again
    evaluation: float  # evaluating the step once, in nanoseconds
    read_bytes: int = 0  # all that the derivative reads, with what it computes from stored residuals
    step: float = 0.0  # nanoseconds of a step of a loop that evaluates it, beside this
    # What storing every carry, and residuals of every step, adds to a step, beside the bytes: calls of operations.
    carry_calls: float = 0.0
    residual_calls: float = 0.0


class Cost(NamedTuple):
    """What a kind costs for a loop.

    Attributes
    ----------
    memory : float
        The most bytes that a gradient stores.
    time : float
        The nanoseconds per step, beyond one evaluation of the step and its derivative.
    stored : str
        What is stored, as a text for `explain`.

    """

    memory: float  # bytes that a gradient stores, at most
    time: float  # per step, beyond one evaluation and its derivative, in nanoseconds
    stored: str = ""  # what is stored, for `explain`


@dataclass(frozen=True, eq=False)
class LoopFacts:
    """The facts of a loop whose gradient is taken.

    The sizes include batches that `jax.vmap` makes inside the gradient.

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
    step : StepFacts
        What a step stores, and how long it takes.

    """

    bound: int | None  # the most steps
    is_fixed: bool  # it always takes as many steps as its bound
    bound_is_loose: bool  # it may take far fewer
    length_is_known: bool  # when it starts: no condition stops it
    sizes_are_known: bool  # when it is traced; not so where `jax.export` has symbolic dimensions
    share: float  # of the memory that a kind was given: the loop is one of several that share it
    measure: Callable[[], StepFacts]

    @cached_property
    def step(self) -> StepFacts:
        """What a step stores, and how long it takes. The first access traces the derivative of the body twice."""
        return self.measure()
