"""`Truncated`: the derivative of the last steps alone, or of windows of steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from loopax._src.core import Checkpoints, Derivative, EveryCarry, Kind, LoopCall, LoopFacts, Outcome, Plan
from loopax._src.kinds.by_name import KindLike, to_kind
from loopax._src.kinds.last_steps import differentiate_last
from loopax._src.kinds.steps import Steps
from loopax._src.kinds.windows import in_windows
from loopax._src.pytrees.static_args import Why, positive_int

_DEFAULT = "residuals"
_STEPS = Why("how many steps the program of a gradient holds", "choose one number for all calls")


@dataclass(frozen=True)
class Truncated(Kind):
    """Differentiate the last steps alone, or cut the derivative at the ends of windows.

    `Truncated(last=k)` is the derivative of the last k steps: the carry before them, and all that steps
    before them return, are constants. With `last=1` this is the one-step (phantom) gradient. A loop with at most
    k steps has its whole derivative.

    `Truncated(window=w)` cuts the derivative of the carry before the steps w, 2w, 3w, ...: truncated
    backpropagation through time. Each row of ys has the derivative of the steps of its own window, so a
    loss that is a row of ys is differentiated in each window; one that is summed in the carry is cut with it.

    Values are those of the loop. Forward and reverse mode have the same derivative, in every order.

    Parameters
    ----------
    last, window
        A number of steps, from 1 on: one of the two.
    kind
        What a gradient stores of the steps that are differentiated. Of a `Reversible`, without its `checkpoints`.

    Raises
    ------
    TypeError
        Both or none of `last` and `window` are given; one is no int, or is traced.
    ValueError
        `last` or `window` is less than 1; `kind` has another derivative than that of the steps.
    NotImplementedError
        `lanes="free"`, `lanes_map`, a body that changes mutable arrays; progress of a loop in windows.

    Notes
    -----
    Cost: the loop, and of n steps the derivative of `last`, or of all. Where the length is known only when the
    loop runs, `last` stores the carry before each of the last k steps on the way forward, and evaluates these
    once more. `window` stores the carry at the start of each window, and evaluates steps once more.
    Sources: Williams & Peng (1990); Geng et al. (2021), see docs/references.md.

    """

    last: int | None = None
    window: int | None = None
    kind: KindLike = _DEFAULT
    derivative: ClassVar[Derivative] = "another"

    def __post_init__(self) -> None:
        """Refuse what is not one number of steps."""
        given = {name: value for name in ("last", "window") if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise TypeError(
                f"Truncated(...): got {'both' if given else 'neither of'} last and window, expected one: last=k to "
                "differentiate the last k steps, window=w to cut the derivative every w steps."
            )
        for name, value in given.items():
            object.__setattr__(self, name, positive_int(f"Truncated({name}=...)", value, "steps", _STEPS))
        kind = to_kind(self.kind)
        if kind.derivative != "exact":
            raise ValueError(
                f"Truncated(kind=...): got {kind!r}, whose derivative is not that of the steps. Give a kind that says "
                "what is stored of the steps that are differentiated, such as Residuals() or Checkpointed(), or take "
                f"kind={kind!r} alone."
            )
        object.__setattr__(self, "kind", kind)

    def __repr__(self) -> str:
        """As a user writes it."""
        size = f"last={self.last}" if self.last is not None else f"window={self.window}"
        return f"Truncated({size})" if self.kind == to_kind(_DEFAULT) else f"Truncated({size}, kind={self.kind!r})"

    @property
    def inverse(self) -> Callable[..., Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Kind.inverse`: that of the kind within."""
        return to_kind(self.kind).inverse

    @property
    def record(self) -> Callable[..., Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Kind.record`: that of the kind within."""
        return to_kind(self.kind).record

    def in_words(self) -> str:
        """See `Kind.in_words`."""
        if self.window is not None:
            each = f"the carry before each window of {self.window} steps"
            return f"{each}, and what {self.kind!r} stores of one window at a time"
        again = "also the carry before each of them, and they are evaluated once more"
        steps = f"the last {self.last} steps; where the length is known only at run time, {again}"
        return f"what {self.kind!r} stores of {steps}"

    def without_functions(self) -> "Truncated":
        """See `Kind.without_functions`."""
        return replace(self, kind=to_kind(self.kind).without_functions())

    def plan(self, loop: LoopFacts) -> Plan:
        """See `Kind.plan`: of the windows, what is stored is the carry before each."""
        return EveryCarry() if loop.bound is not None else Checkpoints()

    def run(self, call: LoopCall) -> Outcome:
        """See `Kind.run`."""
        bound, size = call.loop.bound, self.window or self.last
        assert size is not None
        if bound is not None and size >= bound:
            return to_kind(self.kind).run(call.stored_by(self.kind))
        call, kind = to_kind(self.kind).of_steps(call)
        if self.last is not None:
            return differentiate_last(call, size, kind)
        return in_windows(Steps.of(call), size, of_windows=self, of_steps=kind, is_cut=True)
