"""Random numbers in a loop on a CPU.

JAX compiles Threefry for a CPU as a loop of five times four rounds, which takes XLA eighty calls. In a program that
draws once that matters to nobody; in a step that draws a few numbers it takes longer than the rest. Here the rounds
stand in a row, behind a condition that always holds: XLA would fuse them into each operation that reads the numbers,
and compute all of them there once more. The numbers are the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.random.threefry2x32 import _threefry2x32_lowering as _threefry  # what it is, as a function of JAX
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

from loopax._src.jax_internals.types import spec_of


def _in_a_row(*operands: Any) -> Any:
    """Threefry of two keys and two counters, as its primitive takes them."""
    rounds = partial(_threefry, *operands, use_rolled_loops=False)
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    if 0 in shape or any(any(spec_of(jax.typeof(x))) for x in operands):  # of a mesh with axes that are `Explicit`
        return rounds()
    is_one = lax.population_count(operands[0].reshape(-1)[0] | jnp.uint32(1)) > 0
    return lax.cond(is_one, rounds, lambda: (jnp.zeros(shape, jnp.uint32),) * 2)


_rule = mlir.lower_fun(_in_a_row)


def with_fast_random_numbers(lower: Callable[..., Any], ctx: Any, *operands: Any, **params: Any) -> Any:
    """The results of a rule that lowers a loop for a CPU, in a context in which random numbers are computed so.

    JAX has a public way to compile a primitive otherwise in all programs, and this one for a part of a program. What it
    has compiled already, for what stands outside of loops, is not used within.
    """
    module = ctx.module_context
    rules = module.lowering_parameters.override_lowering_rules or ()
    if any(primitive is threefry2x32_p for primitive, _ in rules):
        return lower(ctx, *operands, **params)
    parameters = replace(module.lowering_parameters, override_lowering_rules=(*rules, (threefry2x32_p, _rule)))
    inside = module.replace(lowering_parameters=parameters, lowering_cache={}, cached_primitive_lowerings={})
    within = ctx.replace(module_context=inside)
    results = lower(within, *operands, **params)
    if within.tokens_out is not ctx.tokens_out:  # of effects that have an order
        ctx.set_tokens_out(within.tokens_out)
    return results
