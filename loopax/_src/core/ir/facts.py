"""What a kind may know of a loop whose gradient is taken, and what it may say of its cost."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class StepFacts(NamedTuple):
    """What one step of a loop stores and costs."""

    carry_bytes: int  # the part of the carry that the derivative of a step needs
    residual_bytes: int  # all that it needs, if no step is evaluated again
    evaluation: float  # evaluating the step once, in nanoseconds
    read_bytes: int = 0  # all that the derivative reads, with what it computes from stored residuals
    step: float = 0.0  # nanoseconds of a step of a loop that evaluates it, beside this
    # What storing every carry, and residuals of every step, adds to a step, beside the bytes: calls of operations.
    carry_calls: float = 0.0
    residual_calls: float = 0.0


class Cost(NamedTuple):
    """What a kind costs for a loop."""

    memory: float  # bytes that a gradient stores, at most
    time: float  # per step, beyond one evaluation and its derivative, in nanoseconds
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
