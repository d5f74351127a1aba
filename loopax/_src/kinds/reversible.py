"""`Reversible`: the last carry is stored, and an inverse of the step walks back from it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from loopax._src.core import Cost, Kind, LastCarry, LoopCall, LoopFacts, Outcome
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
    where: str
    checked: Callable[[Any, Any, str, Any], Any]  # as in `LoopCall`

    def __call__(self, start: list[Any], end: list[Any], last: list[Any], results: list[Any]) -> list[Any]:
        """The results, or an error where a leaf is off by more than `rtol` of its largest element in start or end."""
        leaves = [each for each in zip(start, end, last, strict=True) if is_real(each[0])]
        amounts = [relative(largest(a - b), jnp.maximum(largest(a), largest(c))) for a, b, c in leaves]
        if not amounts:
            return results
        amount = jnp.stack([a.astype(jnp.float32) for a in amounts]).max()
        message = (
            f"{self.where}: on the way back of kind=Reversible(), rounding errors have grown beyond rtol={self.rtol:g}"
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


@dataclass(frozen=True)
class Reversible(Kind):
    """Store the last carry, and walk back from it by the inverse of the step.

    A gradient stores one carry, whatever the number of steps. The inverse is evaluated once for each step, and the
    body once again for its derivative: for forward and gradient together the body 2n times, the inverse n times.

    Where a derivative is taken, two checks are made. The first step is taken and undone: a function that is no inverse
    is an error that says how far off it is. With `rtol`, the way back must end at the start of the loop.

    Parameters
    ----------
    inverse
        Takes what the body takes, with the carry after the step in the place of the carry: `inverse(val)` for
        a `while_loop`, `inverse(i, val)` for a `fori_loop`, `inverse(carry, x)` for a `scan`, with `key=` where
        the body has it. Returns the carry before the step. It may close over what the body closes over.
        Leaves that the derivative does not read (accumulators) may be returned as they came. With `record`, it takes
        a row of the tape as its last argument.
    record
        None, or what a step loses: a function that takes what the body takes, with two carries in the place of
        one, before and after the step: `record(before, after)`, `record(i, before, after)`,
        `record(before, after, x)`. It returns a pytree of arrays, which the inverse gets. Needs a static bound.
    checkpoints
        Carries that are stored besides, from 0 on. The way back begins anew at each, so rounding errors grow
        over fewer steps; the steps are evaluated once more. The tape is then that of one part at a time. Needs a
        static bound.
    rtol
        None, or how far the end of the way back may be from the start of the loop, in each leaf relative to the
        largest element at the start and at the end. A `jax.vmap` of a gradient checks each lane; the gradient of a
        batch checks all of its lanes together, unless they are compact.

    Raises
    ------
    TypeError
        `inverse` or `record` is no function, or the inverse returns another carry; `checkpoints` or `rtol` is no
        Python number.
    ValueError
        A negative `checkpoints`; `checkpoints` or `record` without a bound; `rtol` is not positive; the inverse
        returns a leaf as it came that the derivative reads.
    NotImplementedError
        `lanes="free"`, `lanes_map`, a `rollout` with a `history`, a body that changes mutable arrays; progress with
        checkpoints.
    equinox.EquinoxRuntimeError
        Where a derivative is taken: `inverse` does not undo the first step to the rounding of the dtype; or the
        way back ends further from the start than `rtol`. With `throw=False` the derivative is NaN.

    Notes
    -----
    The gradient of a gradient stores checkpoints instead: about 2 sqrt(N) for a bound of N steps, 64 without a bound.
    So does that of a loop with a `Buffer` in its carry, if the inverse does more with its rows than read them.
    A gradient with `record` stores a row for each step of the bound.

    """

    inverse: Callable[..., Any] | None
    record: Callable[..., Any] | None = field(default=None, kw_only=True)
    checkpoints: int = field(default=0, kw_only=True)
    rtol: float | None = field(default=None, kw_only=True)
    drift: Drift | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        """Refuse what is no function, and no number of carries."""
        if self.inverse is not None and not callable(self.inverse):
            raise TypeError(f"Reversible(inverse): got {describe(self.inverse)}, expected a function.")
        if self.record is not None and not callable(self.record):
            raise TypeError(f"Reversible(record=...): got {describe(self.record)}, expected a function.")
        if an_int("Reversible(checkpoints=...)", self.checkpoints, ", the number of stored carries") < 0:
            raise ValueError(f"Reversible(checkpoints=...): got {self.checkpoints}, expected at least 0.")
        if self.rtol is not None:
            object.__setattr__(self, "rtol", positive_float("Reversible(rtol=...)", self.rtol))

    def __repr__(self) -> str:
        """As a user writes it."""
        given = ["record=record"] * (self.record is not None)
        given += [f"checkpoints={self.checkpoints}"] * bool(self.checkpoints)
        given += [] if self.rtol is None else [f"rtol={self.rtol:g}"]
        return f"Reversible({', '.join(['inverse', *given])})"

    def plan(self, loop: LoopFacts) -> LastCarry:
        """See `Kind.plan`."""
        del loop
        return LastCarry(drift=self.drift)

    def cost(self, loop: LoopFacts) -> Cost:
        """See `Kind.cost`: a step back evaluates the inverse, and the step for its derivative."""
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
        drift = None if self.rtol is None else Drift(self.rtol, call.where, call.checked)
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
