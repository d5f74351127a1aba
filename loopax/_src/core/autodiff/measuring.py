"""How long a gradient of a loop takes by each of several plans, measured where the gradient is traced.

The program that is timed is the linear part of the loop, transposed, on made-up numbers of the loop's types. Its known
part runs before it. So both are timed as they are compiled later. Nothing happens in it but arithmetic.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.annotations import without_effects
from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.loop import NO_STOP, Loop, LoopInputs, LoopOutputs, loop_p, run
from loopax._src.core.ir.plan import Plan
from loopax._src.core.jaxpr.util import (
    bind_again,
    evaluate,
    flatten,
    merge_lists,
    reject,
    select,
    stacked,
    trace,
    weakly_cached,
)
from loopax._src.jax_internals import ClosedJaxpr, equations_in, jaxpr_as_fun, map_programs

ROUNDS, ENOUGH = 7, 0.15  # how often each program is called, and for how many seconds in all
INNER_STEPS = 8  # of an inner loop whose length is not known: made-up numbers may never end it
SECONDS_PER_CALL = 0.25  # fewer steps may fit in a cache where all steps do not
LEAST_STEPS, MOST_STEPS = 16, 100_000


class Linearized(NamedTuple):
    """A loop on primals and tangents, the inputs that are tangents, and the outputs that depend on these."""

    loop: Loop
    unknown: LoopInputs
    outputs: LoopOutputs


def obstacle(loop: Loop) -> str:
    """Why the loop cannot be run here; empty: it can."""
    avals, eqns = [*loop.body.in_avals, *loop.body.out_avals], list(equations_in(loop.body))
    if jax.process_count() > 1:
        return "several processes run this program"
    if any(map(jaxi.communicates_over, eqns)) or any(map(jaxi.varying_axes, avals)):
        return "the loop communicates, or stands in a shard_map"
    if any(any(jaxi.spec_of(aval)) for aval in avals):
        return "the arrays of the loop are spread over a mesh"
    if any(map(jaxi.is_on_host, avals)):
        return "arrays of the loop are in host memory"
    if jaxi.uses_references(loop.body):
        return "the loop changes mutable arrays"
    return ""


def measured(
    given: Linearized, plans: Sequence[Plan], step: float, deadline: float, num_lanes: int = 1
) -> list[float | None]:
    """The nanoseconds of a step of all lanes by each plan, value and gradient together.

    None for those that time was too short for, and for those that the device cannot run, such as for lack of memory.
    `step` is how long a step is expected to take, in nanoseconds. Lanes share the consts, and take as many steps.
    """
    end = time.perf_counter() + deadline
    shorter, num_steps = _shorter(given, step)
    calls: dict[int, Callable[[], Any]] = {}
    with jax.ensure_compile_time_eval():
        arguments, axes = _arguments(shorter, num_steps, num_lanes)
    # What is made up may well become NaN, and nobody is to hear of it.
    with jax.debug_nans(False), jax.debug_infs(False):
        for i, plan in enumerate(plans):
            if time.perf_counter() > end:
                break
            with suppress(jax.errors.JaxRuntimeError):
                # Traced as any program is: evaluated at once, zeros would be constants, to which nothing is added in
                # place.
                gradient = _gradient(shorter, plan)
                function = gradient if num_lanes == 1 else jax.vmap(gradient, axes)
                call = partial(jax.jit(function).lower(*arguments).compile(), *arguments)
                jax.block_until_ready(call())
                calls[i] = call
        best = _least_seconds(calls, end)
    return [1e9 * best[i] / num_steps if i in best else None for i in range(len(plans))]


def _least_seconds(calls: Mapping[int, Callable[[], Any]], end: float) -> dict[int, float]:
    """The least of each; all are called in turn."""
    best, begun = dict.fromkeys(calls, inf), time.perf_counter()
    for number in range(ROUNDS):
        for i, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[i] = min(best[i], time.perf_counter() - start)
        if time.perf_counter() > end or (number and time.perf_counter() - begun > ENOUGH * len(calls)):
            break
    return best


def _shorter(given: Linearized, step: float) -> tuple[Linearized, int]:
    """A loop of this body without effects, with enough steps to be timed and no more; and how many it takes."""
    loop, most = given.loop, int(min(max(1e9 * SECONDS_PER_CALL / max(step, 1.0), LEAST_STEPS), MOST_STEPS))
    bound = loop.bound and min(loop.bound, most)
    num_steps = most if bound is None else max(bound // 2, 1) if loop.bound_is_loose else bound
    loop = loop._replace(body=_made_to_run(loop.body, loop.predicated), bound=bound, reporting=None, watch=None)
    return given._replace(loop=loop), num_steps


def _gradient(given: Linearized, plan: Plan) -> Callable[..., Any]:
    """`(low, high, known inputs, cotangents) -> cotangents` of the loop, whose gradient is stored by this plan."""
    loop, outputs, masks = given.loop, given.outputs, flatten(given.unknown)
    planned = loop._replace(kind=Decided(plan))
    tangents = select(masks, _operands(loop))

    def gradient(low: Any, high: Any, known: list[Any], cts: list[Any]) -> Any:
        def linear(*given: Any) -> list[Any]:
            out = run(planned, low, high, *loop.inputs(merge_lists(masks, known, given)))
            return [*select(outputs.carry, out.carry), *select(outputs.ys, out.ys)]

        return jaxi.linear_transpose(linear, *tangents)(cts)

    return gradient


def _operands(loop: Loop) -> list[Any]:
    """Their types, behind low and high."""
    consts, carry, xs = loop.input_avals
    return [*consts, *carry, *(stacked(aval, loop.bound or 0) for aval in xs)]


def _arguments(given: Linearized, num_steps: int, num_lanes: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the gradient is called with, and along which axes lanes lie: those of the carry, of xs, of cotangents."""
    loop, masks = given.loop, flatten(given.unknown)
    stops = {loop.num_consts + i: jnp.int32(value) for i, value in zip(loop.stops, NO_STOP, strict=False)}
    axes = [None if i < loop.num_consts or i in stops else 0 for i in range(len(masks))]
    of_all = lambda aval, axis: aval if axis is None or num_lanes == 1 else stacked(aval, num_lanes)  # noqa: E731
    values = [
        stops[i] if i in stops else _made_up(of_all(aval, axis))
        for i, (aval, axis) in enumerate(zip(_operands(loop), axes, strict=True))
    ]
    ys = [stacked(aval, loop.bound or 0) for aval in loop.output_avals.ys]
    cts = [*select(given.outputs.carry, loop.output_avals.carry), *select(given.outputs.ys, ys)]
    low, high = jnp.int32(0), jnp.int32(num_steps)
    if loop.reverse and loop.bound:
        low, high = jnp.int32(loop.bound - num_steps), jnp.int32(loop.bound)
    cotangents = [_made_up(of_all(aval, 0).to_tangent_aval()) for aval in cts]
    if loop.is_fixed or num_lanes == 1:
        return (low, high, reject(masks, values), cotangents), (None, None, reject(masks, axes), 0)
    # Each lane ends by itself, so steps are masked.
    return (low, jnp.full(num_lanes, high), reject(masks, values), cotangents), (None, 0, reject(masks, axes), 0)


def _made_up(aval: Any) -> Any:
    """Ones: they are in the domain of most functions."""
    zeros = jaxi.zeros(aval)
    return jnp.ones_like(zeros) if jaxi.is_number(aval.dtype) else zeros


def _made_to_run(body: ClosedJaxpr, predicated: bool) -> ClosedJaxpr:
    """The body without effects, which goes on whatever the numbers are, and whose inner loops end soon."""
    function = jaxpr_as_fun(_ending_soon(without_effects(body)))
    if not predicated:
        return trace(function, body.in_avals)
    return trace(lambda *operands: [jnp.bool_(True), *function(*operands)[1:]], body.in_avals)


@weakly_cached
def _ending_soon(closed: ClosedJaxpr) -> ClosedJaxpr:
    """With loops in it that take some steps at most, where their lengths are not known."""
    return trace(lambda *operands: evaluate(closed, operands, _equation), closed.in_avals)


def _equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    eqn = map_programs(eqn, _ending_soon)
    if eqn.primitive is loop_p and (loop := Loop(**eqn.params)).bound is None:
        low, high, *leaves = operands
        high = jnp.minimum(high, low + INNER_STEPS)  # of a bound, which a loop without one does not ask for
        return loop_p.bind(low, high, *leaves, **loop._replace(bound=INNER_STEPS)._asdict())
    loop = jaxi.lax_loop(eqn)
    if loop is None or loop.cond is None:
        return bind_again(eqn, operands)
    cond_consts, consts, init, _ = loop.groups(operands)
    cond, body = jaxpr_as_fun(loop.cond), jaxpr_as_fun(loop.body)
    goes_on = lambda c: (c[0] < INNER_STEPS) & cond(*cond_consts, *c[1])[0]  # noqa: E731
    return lax.while_loop(goes_on, lambda c: (c[0] + 1, body(*consts, *c[1])), (jnp.int32(0), list(init)))[1]
