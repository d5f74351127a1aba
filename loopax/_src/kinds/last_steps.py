"""The derivative of the last steps of a loop alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core import Kind, LoopCall, LoopOperands, Outcome
from loopax._src.core.jaxpr.mixed_lanes import mixing_primitive
from loopax._src.core.jaxpr.util import INDEX, put_rows, stacked, trace
from loopax._src.jax_internals import ClosedJaxpr, jaxpr_as_fun, keep_bits, mapped_aval, on_device, where, zeros
from loopax._src.kinds.checkpointed import Checkpointed
from loopax._src.kinds.lax import Lax
from loopax._src.kinds.perturbed import explained, jvp, zero_tangent
from loopax._src.kinds.steps import Steps
from loopax._src.kinds.windows import in_windows


def differentiate_last(call: LoopCall, size: int, kind: Kind) -> Outcome:
    """Run a loop that may take more than `size` steps; the derivative is that of the last `size`, stored by `kind`."""
    if call.is_fixed and call.loop.reporting is None:
        return _in_two(Steps.of(call), size, kind)
    return _when_it_has_run(call, size, kind)


def _in_two(steps: Steps, size: int, kind: Kind) -> Outcome:
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
        return _lanes_in_front(call.at(operands).run())

    @jax.custom_jvp
    def run_with_ring(operands: LoopOperands) -> tuple[Outcome, list[Any]]:
        if mixes_lanes:
            return run(operands), []
        steps = Steps.of(call.at(lax.stop_gradient(operands)))
        found, ring = steps.with_ring(steps.operands, size)
        return _lanes_in_front(steps.results(found)), ring

    def dots_of(found: Outcome, ring: list[Any], operands: LoopOperands, dots: Any) -> Outcome:
        def last(operands: LoopOperands) -> Outcome:
            steps = Steps.of(call.at(operands)).unconditional()
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


def _last_again(steps: Steps, num_steps: Any, ring: list[Any], size: int, kind: Kind) -> Outcome:
    """The last steps, differentiable, from the carry before them. Rows of ys before theirs are zeros."""
    operands, first, is_whole = steps.operands, jnp.maximum(num_steps - size, 0), num_steps <= size

    def carry_before(rows: Any, start: Any) -> Any:
        """A constant, unless it is the start of the loop."""
        return on_device(
            lambda rows, start: jnp.where(
                is_whole, start, lax.dynamic_index_in_dim(rows, first % size, keepdims=False)
            ),
            *(rows, start),
        )

    carry = [carry_before(*pair) for pair in zip(ring, operands.carry, strict=True)]
    rows_of = partial(lax.dynamic_slice_in_dim, slice_size=size)
    xs = [on_device(lambda x: keep_bits(rows_of, x, first), x) for x in operands.xs]
    last = operands._replace(high=num_steps - first, carry=carry, xs=xs)
    after = steps.part(first, last, size, kind)
    rows = [mapped_aval(size, 0, jax.typeof(y)) for y in after.ys]
    empty = [zeros(stacked(row, steps.loop.bound or 0)) for row in rows]
    ys = [put_rows(*pair, first) for pair in zip(empty, after.ys, strict=True)]
    return steps.results(after._replace(num_steps=num_steps, ys=ys))


def _all_again(steps: Steps, num_steps: Any, size: int, kind: Kind) -> Outcome:
    """All steps, differentiable, of which those before the last return constants."""
    loop, operands = steps.loop, steps.operands
    taken = jaxpr_as_fun(loop.body)

    def body(step: Any, first: Any, *inputs: Any) -> list[Any]:
        return [where(step < first, lax.stop_gradient(leaf), leaf) for leaf in taken(step, *inputs)]

    loop = loop._replace(
        body=trace(body, [INDEX, *loop.body.in_avals]),
        inverse=loop.inverse and _with_first(loop.inverse),
        num_consts=loop.num_consts + 1,
        reporting=None,
    )
    operands = operands._replace(high=num_steps, consts=[num_steps - size, *operands.consts])
    steps = replace(steps, loop=loop, operands=operands)
    return in_windows(steps, size, of_windows=Checkpointed(), of_steps=kind, is_cut=False)


def _with_first(inverse: ClosedJaxpr) -> ClosedJaxpr:
    function = jaxpr_as_fun(inverse)
    return trace(lambda step, _, *inputs: function(step, *inputs), [INDEX, *inverse.in_avals])
