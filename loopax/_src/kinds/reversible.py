"""`Reversible`: the last carry is stored, and an inverse of the step walks back from it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from loopax._src.core import Cost, Kind, LastCarry, LoopCall, LoopFacts, Outcome
from loopax._src.jax_internals import api_boundary, to_device
from loopax._src.kinds.bounded import Bounded
from loopax._src.kinds.round_trip import with_round_trip
from loopax._src.kinds.rounding import is_real, largest, relative
from loopax._src.kinds.steps import Steps
from loopax._src.kinds.windows import in_windows
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static_args import an_int, positive_float


@dataclass(frozen=True)
class Drift:
    """The check, at the end of the way back, that it has ended where the loop started."""

    rtol: float
    checked: Callable[..., Any]  # as in `LoopCall`

    def __call__(self, start: list[Any], end: list[Any], last: list[Any], results: list[Any]) -> list[Any]:
        """The results, or an error where a leaf is off by more than `rtol` of its largest element in start or end."""
        leaves = [map(to_device, each) for each in zip(start, end, last, strict=True) if is_real(each[0])]
        amounts = [relative(largest(a - b), jnp.maximum(largest(a), largest(c))) for a, b, c in leaves]
        if not amounts:
            return results
        amount = jnp.stack([a.astype(jnp.float32) for a in amounts]).max()
        message = (
            f"on the way back of kind=Reversible(), rounding errors have grown beyond rtol={self.rtol:g}"
            "{amount}. Give checkpoints=, which stop the drift, or a wider dtype."
        )
        real = list(map(is_real, results))
        found = iter(
            self.checked([x for x, r in zip(results, real, strict=True) if r], ~(amount <= self.rtol), message, amount)
        )
        return [next(found) if r else x for x, r in zip(results, real, strict=True)]


def _taken_away(*_: Any) -> Any:
    """Stands for a user's `record` where programs keep the kind."""
    raise AssertionError


@api_boundary
@dataclass(frozen=True)
class Reversible(Kind):
    """Store only the last carry, and compute the earlier carries with the inverse of the step.

    The memory of a gradient does not depend on the number of steps n (without `record`). Forward and gradient together
    evaluate the body 2n times and the inverse n times.

    The inverse is checked where a derivative is taken: loopax takes the first step and undoes it.

    Parameters
    ----------
    inverse
        The inverse of the step: a function that returns the carry before a step. The function takes the arguments of
        the body, with the carry after the step: `inverse(val)` for a `while_loop`, `inverse(i, val)` for a `fori_loop`,
        `inverse(carry, x)` for a `scan`. If the body gets `key=`, so does the inverse. With `record`, the last argument
        is the recorded row. The inverse may close over what the body closes over. Leaves that the derivative does not
        read, such as a sum, may be returned unchanged.
    record
        A function that returns what a step loses, as a pytree of arrays. The function takes the arguments of the body,
        with two carries (before and after the step) in place of one: `record(before, after)`, `record(i, before,
        after)`, `record(before, after, x)`. A gradient stores one row for each step of the bound, so a static bound is
        needed. None: nothing is recorded.
    checkpoints
        The number of carries that are stored in addition. The reverse sweep starts again from each of them, so rounding
        errors grow over fewer steps. Each step is evaluated once more (the body 3n times in all). With `record`, only
        the rows between two checkpoints are stored at a time. Needs a static bound. The default is 0.
    rtol
        The largest rounding error at the end of the reverse sweep. The carry found there is compared with the first
        carry of the loop; the error of each leaf is relative to the leaf's largest element at the start and at the end.
        None: no comparison. A `jax.vmap` of a gradient checks each lane. The gradient of a batch checks all lanes
        together, unless the lanes are compact.

    Raises
    ------
    TypeError
        - `inverse` or `record` is not a function.
        - The inverse returns a carry of another structure, shape or dtype.
        - `checkpoints` or `rtol` is not a Python number.
    ValueError
        - `checkpoints` is negative, or `rtol` is not positive.
        - `checkpoints` or `record` is given for a loop without a bound.
        - The inverse returns a leaf unchanged that the derivative reads.
    NotImplementedError
        - `lanes="free"`, `lanes_map`, or a `rollout` with a `history`.
        - A body that changes mutable arrays.
        - `progress` together with `checkpoints`.
    equinox.EquinoxRuntimeError
        The following errors are raised where a derivative is taken. With `throw=False` the derivative is NaN instead.

        - `inverse` does not undo the first step to the rounding of the dtype; the message gives the difference.
        - The reverse sweep ends further from the first carry than `rtol`.

    Notes
    -----
    The gradient of a gradient stores checkpoints instead: about 2 sqrt(N) for a bound of N steps, 64 without a bound. A
    loop with a `Buffer` in its carry also stores checkpoints, if the inverse does more with the rows of the buffer than
    read them.

    """

    inverse: Callable[..., Any] | None
    record: Callable[..., Any] | None = field(default=None, kw_only=True)
    checkpoints: int = field(default=0, kw_only=True)
    rtol: float | None = field(default=None, kw_only=True)
    drift: Drift | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.inverse is not None and not callable(self.inverse):
            raise TypeError(f"Reversible(inverse): got {describe(self.inverse)}, expected a function.")
        if self.record is not None and not callable(self.record):
            raise TypeError(f"Reversible(record=...): got {describe(self.record)}, expected a function.")
        if an_int("Reversible(checkpoints=...)", self.checkpoints, ", the number of stored carries") < 0:
            raise ValueError(f"Reversible(checkpoints=...): got {self.checkpoints}, expected at least 0.")
        if self.rtol is not None:
            object.__setattr__(self, "rtol", positive_float("Reversible(rtol=...)", self.rtol))

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        given = ["record=record"] * (self.record is not None)
        given += [f"checkpoints={self.checkpoints}"] * bool(self.checkpoints)
        given += [] if self.rtol is None else [f"rtol={self.rtol:g}"]
        return f"Reversible({', '.join(['inverse', *given])})"

    def plan(self, loop: LoopFacts) -> LastCarry:
        """See `Kind.plan`."""
        del loop
        return LastCarry(drift=self.drift)

    def cost(self, loop: LoopFacts) -> Cost:
        """See `Kind.cost`: a backward step evaluates the inverse, and the step for its derivative."""
        return Cost(loop.step.carry_bytes, time=2 * loop.step.evaluation, stored="the last carry")

    def in_words(self) -> str:
        """See `Kind.in_words`."""
        tape = " and a row of the tape for each step" if self.record else ""
        if self.checkpoints:
            tape = ", and as many rows of the tape as there are steps between two of these" if self.record else ""
            return f"{self.checkpoints} carries and the last{tape}; the body is evaluated 3n times, the inverse n times"
        return tape and f"the last carry{tape}; the body is evaluated 2n times, the inverse n times"

    def without_functions(self) -> "Reversible":
        """See `Kind.without_functions`."""
        return replace(self, inverse=None, record=self.record and _taken_away)

    def of_steps(self, call: LoopCall) -> tuple[LoopCall, Kind]:
        """See `Kind.of_steps`: without checkpoints."""
        drift = None if self.rtol is None else Drift(self.rtol, call.checked)
        return with_round_trip(call), replace(self.without_functions(), checkpoints=0, drift=drift)

    def run(self, call: LoopCall) -> Outcome:
        """See `Kind.run`."""
        bound = call.loop.bound
        if self.record is not None and bound is None:
            raise ValueError(
                f"{call.where}: kind={self!r} stores a row of each step, and the loop has no static bound. Give "
                "max_steps=."
            )
        if self.checkpoints and bound is None:
            raise ValueError(
                f"{call.where}: kind={self!r} spreads its checkpoints over a static bound, and the loop has none. Give "
                "max_steps=, or leave out checkpoints."
            )
        call, one = self.of_steps(call)
        call = call.stored_by(one)
        size = -(-bound // (self.checkpoints + 1)) if bound else 0
        if not self.checkpoints or bound is None or size >= bound:
            return call.run()
        return in_windows(Steps.of(call), size, of_windows=Bounded(), of_steps=one, is_cut=False)
