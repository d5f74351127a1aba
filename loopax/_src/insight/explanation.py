"""What `explain` says of a loop."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loopax._src.insight.advice import Advice
from loopax._src.insight.stored import Stored


@dataclass(frozen=True)
class Leaf:
    """An array that a loop goes through, or carries.

    Attributes
    ----------
    name
        Its path in the carry, `xs` or `ys`, or in an argument of the function; empty where that is not known.
    role
        "constant": the same at every step, also a leaf of the carry that the body returns as it came. "carried": it
        changes from step to step. "stream": rows, of which a step reads or writes one.
    shape, dtype, size
        Of the whole array, lanes included; the size in bytes.
    is_stored
        Whether a gradient stores it at some steps.
    is_differentiated
        Whether it depends on what the gradient is taken of.

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
    """A loop.

    Attributes
    ----------
    function
        "loopax.scan", "lax.while_loop" and the like.
    branch
        "true_fun", "branches[1]" and the like: a function of a `loopax.cond` or `switch`, which is a loop of one step
        or none. Empty for loops.
    source
        Where it is called, "file.py:12 (function)".
    kind, lanes
        As they were given; nothing for the loops of `jax.lax`.
    most_steps
        The static bound on the steps; None where there is none.
    is_fixed
        Whether it takes as many steps always.
    leaves
        Its arrays.
    waiting
        Lanes that run until the slowest of them is done; 1 where there are no lanes with steps of their own.
    derivative
        "exact", that of the steps; "to a tolerance", or "another" on purpose: `Kind.derivative`.
    in_words
        What a gradient stores, for kinds that differentiate a loop in a way of their own; else empty.
    stored
        What a gradient stores: the kind that is taken, the reason of `Auto`, how many carries, and the body
        evaluations. None where nothing in the loop is differentiated, where a gradient cannot be taken, and where
        `in_words` says it.
    stored_bytes
        `stored.carries * stored.size`, for all lanes.
    problem
        Why a gradient cannot be taken; empty where it can.
    warnings
        What makes it slow, and the line to change.
    inner
        The loops in its body.

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

    def walk(self) -> Iterator["LoopExplanation"]:
        """The loop, and those in it."""
        yield self
        for loop in self.inner:
            yield from loop.walk()
