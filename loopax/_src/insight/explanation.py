"""What `explain` says of a loop."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loopax._src.insight.advice import Advice
from loopax._src.insight.stored import Stored


@dataclass(frozen=True)
class Leaf:
    """An array that a loop reads, carries or writes.

    Attributes
    ----------
    name
        The path of the array in the carry, in `xs` or `ys`, or in an argument of the function. Empty if not known.
    role
        How the loop uses the array:

        - `"constant"`: the same at every step, including leaves of the carry that the body returns unchanged.
        - `"carried"`: changes from step to step.
        - `"stream"`: rows, of which each step reads or writes one.
    shape, dtype
        The shape and dtype of the whole array, including lanes.
    size
        The bytes of the whole array, including lanes.
    is_stored
        Whether a gradient stores the array at some steps.
    is_differentiated
        Whether the array depends on an argument of which the gradient is taken.

    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: Any
    size: int
    is_stored: bool
    is_differentiated: bool


@dataclass(frozen=True)
class LoopExplanation:
    """What `explain` knows of one loop.

    Attributes
    ----------
    function
        The function that the user called, such as `"loopax.scan"` or `"lax.while_loop"`.
    branch
        For a function of `loopax.cond` or `switch`: its name, such as `"true_fun"` or `"branches[1]"`. A branch is a
        loop of at most one step. Empty for loops.
    source
        The line of the call, `"file.py:12 (function)"`.
    kind, lanes
        The argument of the loop, as given. None for loops of `jax.lax`.
    lanes_taken
        What `AutoLanes()` chose for the batch; otherwise as `lanes`.
    most_steps
        The static bound on the number of steps. None: no bound.
    is_fixed
        Whether the loop always takes the same number of steps.
    leaves
        The arrays of the loop.
    waiting
        The number of lanes that run until the slowest of them has finished. 1 if no lanes have their own numbers of
        steps.
    derivative
        How the derivative relates to that of the steps: `"exact"`, `"to a tolerance"`, or `"another"` on purpose (see
        `Kind.derivative`).
    in_words
        What a gradient stores, as a text, for kinds with a derivative of their own. Otherwise empty.
    stored
        What a gradient stores. None if nothing in the loop is differentiated, if there is no gradient, or if `in_words`
        has the answer.
    stored_bytes
        The bytes that a gradient stores for all lanes: `stored.carries * stored.size` times the number of lanes.
    problem
        Why there is no gradient; empty if there is one.
    warnings
        What makes the loop slow, and which line to change.
    inner
        The loops in the body.
    mixed_by
        The primitive that computes for a lane from other lanes. Lanes then run in lockstep, whatever `lanes` says.
        Empty if there is none, or if lanes run as `lanes` says.

    """

    function: str
    source: str
    kind: Any
    lanes: Any
    most_steps: int | None
    is_fixed: bool
    leaves: tuple[Leaf, ...]
    waiting: int
    derivative: str
    in_words: str
    stored: Stored | None
    stored_bytes: int
    problem: str
    warnings: tuple[Advice, ...]
    inner: tuple["LoopExplanation", ...]
    branch: str = ""
    mixed_by: str = ""
    lanes_taken: Any = None

    def walk(self) -> Iterator["LoopExplanation"]:
        """Iterate over this loop and the loops in its body."""
        yield self
        for loop in self.inner:
            yield from loop.walk()
