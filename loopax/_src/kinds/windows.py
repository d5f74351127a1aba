"""A loop as a loop over windows of steps, each of which is a loop."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.core import Asked, Kind, LoopOperands, Outcome, run
from loopax._src.core.jaxpr.util import INDEX, padded, split_list, trace
from loopax._src.jax_internals import keep_bits, mapped_aval, where
from loopax._src.kinds.steps import Steps


def in_windows(steps: Steps, size: int, of_windows: Kind, of_steps: Kind, is_cut: bool) -> Outcome:
    """Run the steps, `size` at a time. `is_cut`: each window takes the carry before it for a constant."""
    loop, operands, bound = steps.loop, steps.operands, steps.loop.bound
    if loop.reporting is not None:
        raise NotImplementedError(
            f"{steps.whole.where}: its kind makes a loop of windows of the loop, which cannot show its progress. Leave "
            "progress out, or choose another kind."
        )
    num_windows = None if bound is None else -(-bound // size)
    is_fixed = steps.whole.is_fixed and bound is not None and bound % size == 0

    def body(window: Any, high: Any, *inputs: Any) -> list[Any]:
        consts, carry, (num_steps,), xs = split_list(inputs, [loop.num_consts, loop.num_carry, 1])
        first = window * size
        if is_cut:
            carry = [where(window == 0, leaf, lax.stop_gradient(leaf)) for leaf in carry]
        these = LoopOperands(jnp.int32(0), jnp.minimum(high - first, size), consts, carry, xs)
        out = steps.part(first, these, size, of_steps, is_fixed)
        return [*out.carry, num_steps + out.num_steps, *out.ys]

    consts, xs = [operands.high, *operands.consts], [_in_windows(x, size) for x in operands.xs]
    carry = [*operands.carry, jnp.zeros_like(operands.high)]
    rows = [mapped_aval(x.shape[0], 0, jax.typeof(x)) for x in xs]
    outer = loop._replace(
        body=trace(body, [INDEX, *map(jax.typeof, [*consts, *carry]), *rows]),
        num_consts=len(consts),
        num_carry=len(carry),
        bound=num_windows,
        storage=Asked.of(of_windows, num_windows, is_fixed, bound_is_loose=False),
        unroll=1,
        inverse=None,
    )
    high = operands.high // size + (operands.high % size > 0).astype(jnp.int32)
    out = run(outer, jnp.int32(0), high, consts, carry, xs)
    ys = [keep_bits(lambda y: y.reshape(-1, *y.shape[2:])[:bound], y) for y in out.ys]
    return steps.results(out._replace(num_steps=out.carry[-1], carry=out.carry[:-1], ys=ys))


def _in_windows(x: Any, size: int) -> Any:
    """Rows as rows of windows, with zeros behind the last."""
    missing = -x.shape[0] % size
    return padded(x, missing).reshape(-1, size, *x.shape[1:])
