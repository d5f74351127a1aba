"""How a loop is compiled."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from loopax._src.core.ir.loop import Loop, result_avals
from loopax._src.core.ir.progress import UNKNOWN, Reports
from loopax._src.core.jaxpr.operand_groups import flatten
from loopax._src.core.jaxpr.util import stacked
from loopax._src.core.jaxpr.varying_axes import unvarying
from loopax._src.core.lowering.active_sets import active_of, filled_outside
from loopax._src.core.lowering.checkpointed import run_saving
from loopax._src.core.lowering.while_loop import Common, LoopState, RowLoop, Step, Steps, Watch, read
from loopax._src.core.masking.all_active import common_rows, unmasked
from loopax._src.jax_internals import jaxpr_as_fun, unwritten, zeros


def evaluate_loop(low: Any, high: Any, *operands: Any, **params: Any) -> list[Any]:
    """The meaning of `loop_p` as a function of JAX, by which it is run and compiled.

    Operands are `low, high, *consts, *carry, *xs`, results `num_steps, *carry, *ys, *saved, checkpoint_rows`.
    """
    loop, low, high = Loop(**params), unvarying(low), unvarying(high)
    if loop.reporting is None:
        return _walk(loop, None, low, high, operands)
    reports = Reports.begin(loop.reporting, UNKNOWN if loop.predicated else jnp.maximum(high - low, 0))
    num_steps, *results = _walk(loop, reports, low, high, operands)
    reports.end(num_steps)
    return [num_steps, *results]


def _walk(loop: Loop, reports: Reports | None, low: Any, high: Any, operands: Sequence[Any]) -> list[Any]:
    consts, carry, xs = map(list, loop.inputs(operands))
    if loop.bound == 0:  # there are no rows that a step could read
        _, _, *others = result_avals(loop)
        return [jnp.int32(0), *carry, *map(zeros, flatten(others))]
    steps = _steps(loop, consts, xs)
    walk = RowLoop(loop.reverse, loop.unroll, loop.predicated, loop.bound is not None or not loop.predicated)
    start = walk.first(low, high)
    ys = [unwritten(stacked(aval, loop.bound or 0)) for aval in loop.output_avals[1]]
    state = LoopState(carry, ys, start)
    if reports is not None and loop.bound != 1:
        watch = Watch(reports, start, loop.active_count_index)
        walk = walk._replace(watch=watch)
        state = state._replace(due=watch.first_due(walk._replace(limited=True) if loop.saving else walk))
    end = low - 1 if loop.reverse else high
    if loop.saving:
        state, saved = run_saving(loop.saving, loop, walk, steps, state, end)
    elif loop.bound == 1:
        run = walk.run_and_discard if loop.may_discard else walk.run_at_most_once
        state, saved = run(steps, state, end), []
    else:
        state, saved = walk.run(steps, state, end), []
    return [walk.distance(start, state.position), *state.carry, *state.ys, *saved]


def _steps(loop: Loop, consts: list[Any], xs: list[Any]) -> Steps:
    def step(body: Any, consts: Sequence[Any], row: Any, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        out = loop.outputs(body(row, *consts, *carry, *(read(x, row) for x in xs)))
        return list(out.carry), list(out.ys)

    def steps_of(body: Any) -> Callable[[Sequence[Any]], Step]:
        return lambda consts: partial(step, body, consts)

    if loop.bound != 1 and (outside := filled_outside(loop.body, loop.num_consts, loop.num_carry)):
        active_at = lambda state: active_of(outside, consts, state.position, state.carry)  # noqa: E731
        steps = Steps(steps_of(jaxpr_as_fun(outside.body)), consts)
        return steps._replace(per_active_set=partial(outside.at, consts, active_at))
    rows = common_rows(loop.body, consts)
    common = rows and Common(steps_of(unmasked(loop.body)), *rows)
    return Steps(steps_of(jaxpr_as_fun(loop.body)), consts, common=common)
