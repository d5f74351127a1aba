"""`Reversible`: the last carry is stored, and an inverse of the step walks back from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from loopax._src.core import run_function
from loopax._src.core.buffer_versions import buffers, keep_rows
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.kind import Cost, Decided, Kind, LoopCall, LoopFacts, LoopOperands
from loopax._src.core.ir.loop import NO_STOP, Loop, Outcome, asked_as, needed_by_inverse, num_recorded, unchanged
from loopax._src.core.ir.plan import LastCarry, WalkBack
from loopax._src.core.jaxpr.util import Mask, either, merge_lists, of_selected, reject, select, split_list, trace
from loopax._src.jax_internals import api_boundary, dce, has_tangents, jaxpr_as_fun, to_device
from loopax._src.kinds.steps import NumberedSteps, in_windows
from loopax._src.kinds.storing import Bounded
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import an_int, positive_float

# How far two carries are from each other, and whether rounding errors explain it.


EXPONENT = 2 / 3  # the rounding errors of a step, there and back, are less than this power of the dtype's eps


class Difference(NamedTuple):
    """The largest of all leaves: float32[]."""

    ratio: Any  # to what rounding may do: more than 1 is too much
    amount: Any  # relative to the largest element of the leaf


def largest_difference(given: Sequence[Any], found: Sequence[Any], after: Sequence[Any]) -> Difference:
    """Between two carries before a step; `after` is the carry after it.

    Rounding errors are relative to the largest element of a leaf, before or after. Those of the largest element of all
    leaves may be in each of them: one that holds zeros is computed from the others.
    """
    given, found, after = (list(map(to_device, leaves)) for leaves in (given, found, after))
    pairs = zip(given, after, strict=True)
    sizes = [jnp.maximum(largest(a), largest(c)) if has_tangents(a) else jnp.float32(0) for a, c in pairs]
    widest = max((size.dtype for size in sizes), key=lambda dtype: dtype.itemsize, default=jnp.float32)
    of_all = jnp.stack([jnp.zeros((), widest), *(size.astype(widest) for size in sizes)]).max()
    zero = jnp.float32(0)
    leaves = [Difference(zero, zero)]
    for a, b, size in zip(given, found, sizes, strict=True):
        if has_tangents(a):
            eps, amount = float(jnp.finfo(a.dtype).eps), largest(a - b)
            ratio = relative(amount, jnp.maximum(eps**EXPONENT * size, (eps * of_all).astype(size.dtype)))
            leaves.append(Difference(ratio.astype(jnp.float32), relative(amount, size).astype(jnp.float32)))
        else:  # infinite for integers that differ
            leaves.append(Difference(*[jnp.where((a != b).any(), jnp.float32(jnp.inf), zero)] * 2))
    ratios, amounts = map(jnp.stack, zip(*leaves, strict=True))
    return Difference(ratios.max(), amounts[ratios.argmax()])


def largest(x: Any) -> Any:
    """The absolute value of the largest element; 0 where there is none."""
    return jnp.abs(x).max(initial=0)


def relative(amount: Any, size: Any) -> Any:
    """Their ratio: 0 where there is no amount, infinite where there is no size alone."""
    return jnp.where(amount == 0, 0, jnp.where(size == 0, jnp.inf, amount / jnp.where(size == 0, 1, size)))


# The check that the inverse of a step is one: the first step is taken and undone, where a derivative is taken.


def with_round_trip(call: LoopCall) -> LoopCall:
    """The same call; a derivative of it first checks the inverse."""

    @jax.custom_jvp
    def checked(operands: LoopOperands) -> LoopOperands:
        return operands

    def rule(primals: Any, tangents: Any) -> Any:
        _refuse_needed_leaves(call)
        leaves, structure = jax.tree.flatten(tangents[0])
        is_zero = [isinstance(leaf, SymbolicZero) or leaf.dtype == jax.dtypes.float0 for leaf in leaves]
        ratio, amount = _first_step(call.at(lax.stop_gradient(primals[0])))
        message = (
            "the inverse of kind=Reversible() does not undo the first step{amount}: the largest difference between the "
            "carry before the step and what the inverse makes of the carry after it, relative to the largest element "
            "of the leaf, is more than rounding can explain. inverse(body(val)) must be val. Give what a step loses to "
            "the inverse, as Reversible(inverse, record=...) does, or take kind=Checkpointed()."
        )
        dots = call.checked(reject(is_zero, leaves), ~(ratio <= 1), message, amount)
        return primals[0], structure.unflatten(merge_lists(is_zero, dots, select(is_zero, leaves)))

    checked.defjvp(rule, symbolic_zeros=True)
    return call.at(checked(call.operands))


def _first_step(call: LoopCall) -> Difference:
    """How far off the inverse is after one step.

    It is a loop of one step at most: a lane that takes none evaluates nothing.
    """
    loop, (low, high, consts, carry, xs) = call.loop, call.operands
    low, high = (jnp.maximum(low, high - 1), high) if loop.reverse else (low, jnp.minimum(high, low + 1))
    assert loop.inverse is not None
    body, inverse = jaxpr_as_fun(without_effects(loop.body)), jaxpr_as_fun(loop.inverse)
    compared = reject(_returned(loop), range(loop.num_carry))
    num_rows = num_recorded(loop.body, loop.inverse)

    def there_and_back(row: Any, *inputs: Any) -> list[Any]:
        carry, _, x = split_list(inputs, [loop.num_carry, 2])
        out = body(row, *consts, *carry, *x)
        after, recorded = loop.outputs(out).carry, out[len(out) - num_rows :]
        before = inverse(row, *consts, *after, *x, *recorded)
        go_on = [jnp.zeros_like(leaf) for leaf in after[: int(loop.predicated)]]
        found = largest_difference(*([leaves[i] for i in compared] for leaves in (carry, before, after)))
        if loop.stop is not None:  # a step that breaks is not undone
            found = Difference(*(jnp.where(after[loop.stop] == NO_STOP[0], x, 0) for x in found))
        return [*go_on, *after[len(go_on) :], *found]

    numbers = Difference(jnp.float32(0), jnp.float32(0))
    out = run_function(
        there_and_back,
        [*carry, *numbers],
        xs,
        bound=loop.bound,
        predicated=loop.predicated,
        low=low,
        high=high,
        lanes=loop.lanes,
        **asked_as(loop),
    )
    return Difference(*out.carry[-2:])


def _returned(loop: Loop) -> Mask:
    """Which leaves of the carry the inverse returns as they came, or reads rows of.

    The condition of a loop is none to be compared.
    """
    assert loop.inverse is not None
    same = either(unchanged(loop._replace(body=loop.inverse, inverse=None)), keep_rows(loop.inverse, loop.carry_range))
    return (True, *same[1:]) if loop.predicated else same


def _refuse_needed_leaves(call: LoopCall) -> None:
    """Raise where the inverse returns a leaf as it came that the body changes, and the derivative reads."""
    loop = call.loop
    appended = buffers(loop.body, loop.carry_range, "appends")  # rows of the last version are those of any before it
    may_stay = either(unchanged(loop), appended)
    wrong = [same and not stays for same, stays in zip(_returned(loop), may_stay, strict=True)]
    wrong[:1] = [flag and not loop.predicated for flag in wrong[:1]]
    if not any(wrong):
        return
    needed = _read_by_derivative(loop)
    leaves = zip(loop.names.carry, wrong, needed, strict=True)
    bad = [name or "a leaf" for name, is_wrong, is_needed in leaves if is_wrong and is_needed]
    if bad:
        raise ValueError(
            f"{call.where}: the inverse of kind=Reversible() returns {', '.join(bad)} as it came, but the derivative "
            "of a step reads it. Return its value before the step."
        )


def _read_by_derivative(loop: Loop) -> Sequence[bool]:
    """Which leaves of the carry the derivative of a step reads, or the inverse for those that it reads."""
    assert loop.inverse is not None
    body, avals = jaxpr_as_fun(without_effects(loop.body)), loop.body.in_avals
    is_real = list(map(has_tangents, avals))

    def dots(*inputs: Any) -> list[Any]:
        primals, tangents = split_list(inputs, [len(avals)])
        out = jax.jvp(of_selected(body, is_real, primals), select(is_real, primals), tangents)[1]
        out = out[: len(out) - num_recorded(loop.body, loop.inverse)]
        return [dot for dot in out if dot.dtype != jax.dtypes.float0]

    closed = trace(dots, [*avals, *select(is_real, avals)])
    used = dce(closed, [True] * len(closed.out_avals), False)[1]
    needed = [used[i] for i in loop.carry_range]
    while True:
        also = needed_by_inverse(loop.inverse, needed)
        more = list(either(needed, also[loop.num_consts :][: loop.num_carry]))
        if more == needed:
            return needed
        needed = more


@dataclass(frozen=True)
class Drift:
    """The check, at the end of the way back, that it has ended where the loop started."""

    rtol: float
    checked: Callable[..., Any]  # as in `LoopCall`

    def __call__(self, start: list[Any], end: list[Any], last: list[Any], results: list[Any]) -> list[Any]:
        """The results, or an error where a leaf is off by more than `rtol` of its largest element in start or end."""
        leaves = [map(to_device, each) for each in zip(start, end, last, strict=True) if has_tangents(each[0])]
        amounts = [relative(largest(a - b), jnp.maximum(largest(a), largest(c))) for a, b, c in leaves]
        if not amounts:
            return results
        amount = jnp.stack([a.astype(jnp.float32) for a in amounts]).max()
        message = (
            f"on the way back of kind=Reversible(), rounding errors have grown beyond rtol={self.rtol:g}"
            "{amount}. Give checkpoints=, which stop the drift, or a wider dtype."
        )
        is_real = list(map(has_tangents, results))
        checked = self.checked(select(is_real, results), ~(amount <= self.rtol), message, amount)
        return merge_lists(is_real, reject(is_real, results), checked)


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
        return LastCarry()

    def cost(self, loop: LoopFacts) -> Cost:
        """See `Kind.cost`: a backward step evaluates the inverse, and the step for its derivative."""
        forward = loop.step.evaluation + loop.step.overhead
        return Cost(loop.step.carry_bytes, time=2 * forward + loop.step.derivative, stored="the last carry")

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

    def _of_steps(self, call: LoopCall) -> tuple[LoopCall, Kind]:
        """Without checkpoints."""
        drift = None if self.rtol is None else Drift(self.rtol, call.checked)
        return with_round_trip(call), Decided(WalkBack(drift=drift))

    def _run(self, call: LoopCall) -> Outcome:
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
        call, one = self._of_steps(call)
        call = call.stored_by(one)
        size = -(-bound // (self.checkpoints + 1)) if bound else 0
        if not self.checkpoints or bound is None or size >= bound:
            return call.run()
        return in_windows(NumberedSteps.of(call), size, of_windows=Bounded(), of_steps=one, is_cut=False)
