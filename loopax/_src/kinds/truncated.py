"""`Truncated`: the derivative of the last steps alone, or of windows of steps."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core import Derivative, Kind, LoopCall, LoopOperands, Outcome
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.jaxpr.dependence import mixing_primitive
from loopax._src.core.jaxpr.util import put_rows, stacked, trace
from loopax._src.jax_internals import api_boundary, jaxpr_as_fun, keep_bits, mapped_aval, on_device, where, zeros
from loopax._src.kinds.steps import NumberedSteps, explained, in_windows, jvp, with_number, zero_tangent
from loopax._src.kinds.storing import Bounded, Checkpointed, Lax
from loopax._src.pytrees.static import Why, positive_int

# The derivative of the last `size` steps of a loop alone, stored by `kind`.


def _in_two(steps: NumberedSteps, size: int, kind: Kind) -> Outcome:
    """The length is static: a loop over the first steps, of constants, and one over the last."""
    assert steps.loop.bound is not None
    first, last = steps.loop.bound - size, steps.operands
    constants = lax.stop_gradient(steps.operands)
    # All rows, of which it takes the first: a slice of them would be a copy.
    before = steps.part(jnp.int32(0), constants._replace(high=jnp.int32(first)), steps.loop.bound, Lax())
    carry, xs = lax.stop_gradient(before.carry), [keep_bits(lambda x: x[first:], x) for x in last.xs]
    last = last._replace(high=jnp.int32(size), carry=carry, xs=xs)
    after = steps.part(jnp.int32(first), last, size, kind, is_fixed=True, is_shown=True)
    ys = [put_rows(*pair, first) for pair in zip(before.ys, after.ys, strict=True)]
    return steps.results(after._replace(num_steps=before.num_steps + after.num_steps, ys=ys))


def _when_it_has_run(call: LoopCall, size: int, kind: Kind) -> Outcome:
    """The length is known when the loop has run: it keeps the carries before its last steps, which are taken again.

    Lanes take their last steps at different times. A step that mixes lanes would be taken beside other steps than the
    first time: such a loop keeps no carries, and takes all of its steps again.

    A value alone needs neither, so both stand in the rules of a `jax.custom_jvp`. There, results must be computed from
    primals alone, and so have rules of their own.
    """
    mixes_lanes = mixing_primitive(call.loop.body) is not None

    @jax.custom_jvp
    def run(operands: LoopOperands) -> Outcome:
        return _lanes_in_front(call._run_loop(call.loop, operands))

    @jax.custom_jvp
    def run_with_ring(operands: LoopOperands) -> tuple[Outcome, list[Any]]:
        if mixes_lanes:
            return run(operands), []
        steps = NumberedSteps.of(call.at(lax.stop_gradient(operands)))
        found, ring = steps.with_ring(size)
        return _lanes_in_front(steps.results(found)), ring

    def dots_of(found: Outcome, ring: list[Any], operands: LoopOperands, dots: Any) -> Outcome:
        def last(operands: LoopOperands) -> Outcome:
            steps = NumberedSteps.of(call.at(operands))
            # The steps have been taken, and are only evaluated again: without their condition and effects.
            loop = steps.loop._replace(body=without_effects(steps.loop.body), predicated=False, stop=None)
            steps = replace(steps, loop=loop)
            if mixes_lanes:
                return _all_again(steps, found.num_steps, size, kind)
            return _last_again(steps, found.num_steps, ring, size, kind)

        return jvp(last, operands, dots)[1]

    def rule_of_run(primals: Any, tangents: Any) -> Any:
        found, ring = run_with_ring(*primals)
        return found, dots_of(found, ring, primals[0], tangents[0])

    def rule_of_run_with_ring(primals: Any, tangents: Any) -> Any:
        found, ring = run_with_ring(*primals)
        dots = dots_of(found, ring, primals[0], tangents[0])
        return (found, ring), (dots, jax.tree.map(zero_tangent, ring))

    run.defjvp(explained(rule_of_run, "Truncated(last=...)"), symbolic_zeros=True)
    run_with_ring.defjvp(explained(rule_of_run_with_ring, "Truncated(last=...)"), symbolic_zeros=True)
    return run(call.operands)


def _lanes_in_front(out: Outcome) -> Outcome:
    """The results, whose rows of ys have their lanes in front under `jax.vmap`.

    The function of a `jax.custom_jvp` and its rule must agree on this, for JAX does not see where they do not: rows of
    a loop have their lanes behind, rows that have been turned have them in front.
    """
    return out._replace(ys=[lax.reshape(lax.reshape(y, (1, *y.shape)), y.shape) for y in out.ys])


def _last_again(steps: NumberedSteps, num_steps: Any, ring: list[Any], size: int, kind: Kind) -> Outcome:
    """The last steps, differentiable, from the carry before them. Rows of ys before theirs are zeros."""
    operands, first, is_whole = steps.operands, jnp.maximum(num_steps - size, 0), num_steps <= size

    def carry_before(rows: Any, start: Any) -> Any:
        """A constant, unless it is the start of the loop."""
        return jnp.where(is_whole, start, lax.dynamic_index_in_dim(rows, first % size, keepdims=False))

    carry = [on_device(carry_before, *pair) for pair in zip(ring, operands.carry, strict=True)]
    rows_of = partial(lax.dynamic_slice_in_dim, slice_size=size)
    xs = [on_device(lambda x: keep_bits(rows_of, x, first), x) for x in operands.xs]
    last = operands._replace(high=num_steps - first, carry=carry, xs=xs)
    after = steps.part(first, last, size, kind)
    rows = [mapped_aval(size, 0, jax.typeof(y)) for y in after.ys]
    empty = [zeros(stacked(row, steps.loop.bound or 0)) for row in rows]
    ys = [put_rows(*pair, first) for pair in zip(empty, after.ys, strict=True)]
    return steps.results(after._replace(num_steps=num_steps, ys=ys))


def _all_again(steps: NumberedSteps, num_steps: Any, size: int, kind: Kind) -> Outcome:
    """All steps, differentiable, of which those before the last return constants."""
    operands, loop = steps.operands, with_number(steps.loop, lambda _, step: step)
    taken = jaxpr_as_fun(loop.body)

    def body(step: Any, first: Any, *inputs: Any) -> list[Any]:
        return [where(step < first, lax.stop_gradient(leaf), leaf) for leaf in taken(step, first, *inputs)]

    loop = loop._replace(body=trace(body, loop.body.in_avals), reporting=None)
    operands = operands._replace(high=num_steps, consts=[num_steps - size, *operands.consts])
    steps = replace(steps, loop=loop, operands=operands)
    return in_windows(steps, size, of_windows=Checkpointed(), of_steps=kind, is_cut=False)


_STEPS = Why("how many steps the program of a gradient holds", "choose one number for all calls")


@api_boundary
@dataclass(frozen=True)
class Truncated(Derivative):
    """Differentiate only the last steps, or cut the derivative at the ends of windows.

    `Truncated(last=k)` is the derivative of the last k steps. The carry before these steps is a constant, and so is
    everything that earlier steps return. `last=1` is the one-step (phantom) gradient. A loop with at most k steps has
    its whole derivative.

    `Truncated(window=w)` is truncated backpropagation through time: the derivative of the carry is cut before the steps
    w, 2w, 3w, ... Each row of `ys` has the derivative of the steps in its own window. Return the loss of each step as a
    row of `ys`: the derivative of a loss that is summed in the carry is cut, too.

    Values do not change. Forward and reverse mode have the same derivative, in every order.

    A leaf of the carry that the body returns unchanged (a model) counts as closed over: its derivative is not cut.

    The `kind` of the loop says what a gradient stores of the steps that are differentiated: the last k, or one window.
    `Auto` chooses for these, within its memory. `checkpoints` of a `Reversible` are ignored.

    Parameters
    ----------
    last
        The number of last steps to differentiate, from 1 on. Give either `last` or `window`.
    window
        The number of steps in a window, from 1 on. Give either `last` or `window`.

    Raises
    ------
    TypeError
        - Both `last` and `window` are given, or neither.
        - `last` or `window` is not an int, or is traced.
        - In a gradient of a batch, with `last` and a length that is known only at run time: the body calls a
          `jax.custom_vjp` function.
    ValueError
        `last` or `window` is less than 1.
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

    def __repr__(self) -> str:
        """Return the code that makes this object."""
        return f"Truncated(last={self.last})" if self.last is not None else f"Truncated(window={self.window})"

    def in_words(self, kind: Kind) -> str:
        """See `Derivative.in_words`."""
        if self.window is not None:
            each = f"the carry before each window of {self.window} steps"
            return f"{each}, and what {kind!r} stores of one window at a time"
        again = "also the carry before each of them, and they are evaluated once more"
        steps = f"the last {self.last} steps; where the length is known only at run time, {again}"
        return f"what {kind!r} stores of {steps}"

    def run(self, call: LoopCall) -> Outcome:
        """See `Derivative.run`."""
        bound, size = call.loop.bound, self.window or self.last
        assert size is not None
        if bound is not None and size >= bound:
            return call.run()
        call, kind = call.loop.kind._of_steps(call)
        call = call.stored_by(Lax())  # steps of constants, of which nothing is stored
        if self.last is not None and call.is_fixed and call.loop.reporting is None:
            return _in_two(NumberedSteps.of(call), size, kind)
        if self.last is not None:
            return _when_it_has_run(call, size, kind)
        of_windows = Checkpointed() if bound is None else Bounded()
        return in_windows(NumberedSteps.of(call), size, of_windows, of_steps=kind, is_cut=True)
