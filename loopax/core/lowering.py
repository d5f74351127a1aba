"""How a loop is compiled."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from loopax._compat import jaxpr_as_fun, mlir, zeros
from loopax.core.common_rows import common_rows, unmasked
from loopax.core.jaxprs import split, stacked
from loopax.core.lending import in_stretches
from loopax.core.loop import Loop, loop_p, result_avals
from loopax.core.saving import run_saving
from loopax.core.walk import Common, Progress, Step, Steps, Walk, read


def _run(low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    loop = Loop(**params)
    consts, carry, xs = split(operands, loop.sizes)
    if loop.bound == 0:  # there are no rows that a step could read
        return [jnp.int32(0), *carry, *(zeros(aval) for aval in result_avals(loop)[1 + loop.num_carry :])]

    def step(body: Any, consts: Sequence[Any], row: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        carry, y = split(body(row, *consts, *carry, *(read(x, row) for x in xs)), [loop.num_carry])
        return carry, y

    def active_at(progress: Progress) -> Any:
        return loop.lent and jaxpr_as_fun(loop.lent.activity)(progress.position, *consts, *progress.carry)[0]

    def steps_of(body: Any) -> Callable[[Sequence[Any]], Step]:
        return lambda consts: partial(step, body, consts)

    rows = common_rows(loop.body, consts)
    steps = Steps(
        steps_of(jaxpr_as_fun(loop.body)),
        consts,
        common=rows and Common(steps_of(unmasked(loop.body)), *rows),
        lend=loop.lent and in_stretches(loop.lent, consts, active_at),
    )
    walk = Walk(loop.reverse, loop.unroll, loop.predicated, loop.bound is not None or not loop.predicated)
    start = walk.first(low, high)
    ys = [zeros(stacked(aval, loop.bound or 0)) for aval in loop.output_avals[1]]
    progress = Progress(carry, ys, start)
    end = low - 1 if loop.reverse else high
    if loop.saving:
        progress, saved = run_saving(loop, walk, steps, progress, end)
    elif loop.bound == 1 and loop.lent is None:
        progress, saved = walk.run_at_most_once(steps, progress, end), []
    else:
        progress, saved = walk.run(steps, progress, end), []
    return [walk.distance(start, progress.position), *progress.carry, *progress.ys, *saved]


_run_compiled = jax.jit(_run, static_argnames=Loop._fields)


loop_p.def_impl(_run_compiled)
mlir.register_lowering(loop_p, mlir.lower_fun(_run, multiple_results=True))
