"""`Truncated`: the derivative of the last steps alone, or of windows of steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from loopax._src.core import Checkpoints, Derivative, EveryCarry, Kind, LoopCall, LoopFacts, Outcome, Plan
from loopax._src.jax_internals import api_boundary
from loopax._src.kinds.by_name import KindLike, to_kind
from loopax._src.kinds.last_steps import differentiate_last
from loopax._src.kinds.steps import Steps
from loopax._src.kinds.windows import in_windows
from loopax._src.pytrees.static_args import Why, positive_int

_DEFAULT = "residuals"
_STEPS = Why("how many steps the program of a gradient holds", "choose one number for all calls")


@api_boundary
@dataclass(frozen=True)
class Truncated(Kind):
    """Differentiate only the last steps, or cut the derivative at the ends of windows.

    `Truncated(last=k)` is the derivative of the last k steps. The carry before these steps is a constant, and so is
    everything that earlier steps return. `last=1` is the one-step (phantom) gradient. A loop with at most k steps has
    its whole derivative.

    `Truncated(window=w)` is truncated backpropagation through time: the derivative of the carry is cut before the steps
    w, 2w, 3w, ... Each row of `ys` has the derivative of the steps in its own window. Return the loss of each step as a
    row of `ys`: the derivative of a loss that is summed in the carry is cut, too.

    Values do not change. Forward and reverse mode have the same derivative, in every order.

    A leaf of the carry that the body returns unchanged (a model) counts as closed over: its derivative is not cut.

    Parameters
    ----------
    last
        The number of last steps to differentiate, from 1 on. Give either `last` or `window`.
    window
        The number of steps in a window, from 1 on. Give either `last` or `window`.
    kind
        What a gradient stores of the steps that are differentiated: a kind, or the name of one. The default is
        `"residuals"`. `checkpoints` of a `Reversible` are ignored.

    Raises
    ------
    TypeError
        - Both `last` and `window` are given, or neither.
        - `last` or `window` is not an int, or is traced.
        - In a gradient of a batch, with `last` and a length that is known only at run time: the body calls a
          `jax.custom_vjp` function.
    ValueError
        `last` or `window` is less than 1, or the derivative of `kind` is not that of the steps.
    NotImplementedError
        - `lanes="free"`, or `lanes_map`.
        - A body that changes mutable arrays.
        - `progress` of a loop with `window`.

    Notes
    -----
    Cost of `last=k`: the loop, and the derivative of k steps. If the length is known only at run time, the forward pass
    also stores the carry before each of the last k steps. The last k steps are then evaluated once more. If a batch of
    the body computes for a lane from other lanes (keys of `rbg`, some rules of `custom_vmap`), all steps are evaluated
    again, in windows of k steps; a gradient stores carries before windows as `Checkpointed()` does.

    Cost of `window=w`: the loop, and the derivative of all steps. A gradient stores the carry at the start of each
    window (without a bound: at most 64 of these carries), and recomputes the steps.

    Sources: Williams & Peng (1990), Geng et al. (2021). See docs/references.md.

    """

    last: int | None = None
    window: int | None = None
    kind: KindLike = _DEFAULT
    derivative: ClassVar[Derivative] = "another"

    def __post_init__(self) -> None:
        """Check the arguments."""
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
        """Return the code that makes this object."""
        size = f"last={self.last}" if self.last is not None else f"window={self.window}"
        return f"Truncated({size})" if self.kind == to_kind(_DEFAULT) else f"Truncated({size}, kind={self.kind!r})"

    @property
    def inverse(self) -> Callable[..., Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Kind.inverse`: the inverse of the inner kind."""
        return to_kind(self.kind).inverse

    @property
    def record(self) -> Callable[..., Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Kind.record`: the `record` of the inner kind."""
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
        """See `Kind.plan`. For windows, the plan says which carries before windows are stored."""
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
