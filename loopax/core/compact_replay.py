"""A batch of reverse sweeps in stages.

The windows of all lanes are known, for their loops have run. Those loops saved nothing (each lane would have saved
before rows of its own), so a batch walks forward again, in stages of which each saves for itself, and then
back through the same stages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopax._compat import zeros
from loopax.core.axes import Axis
from loopax.core.batch import Rules
from loopax.core.compact import Stage, head, heads, put_head, stages_of, take, take_mapped, with_rows
from loopax.core.jaxprs import Mask, split, stacked
from loopax.core.lanes_loop import own_limits
from loopax.core.lanes_replay import lanes_replay
from loopax.core.loop import Outcome, run
from loopax.core.replay import Replay, lending_replay, replay, saving_loop


class Part(NamedTuple):
    """A stage and its operands."""

    stage: Stage
    static: Replay  # of its lanes
    consts: list[Any]
    xs: list[Any]


class Passage(NamedTuple):
    """A stage that has been walked forward."""

    init: list[Any]
    out: Outcome


def _run(static: Replay, axis: Axis, mapped: Mask, operands: Sequence[Any]) -> list[Any]:
    """The program of a batch; operands are low, high, *consts, *init, *carry, *xs."""
    assert static.stages is not None
    (low, high), consts, init, carry, xs = split(operands, _sizes(static))
    windows, mapped_consts, _, _, mapped_xs = (tuple(m) for m in split(mapped, _sizes(static)))
    order, stages = stages_of(static.stages, axis.size, low, high, windows, static.reverse)

    sizes = [stage.size for stage in stages]
    own = own_limits(windows, low, high)
    mapped_own = (*(True for _ in own), *mapped_consts)
    consts_of = heads(take_mapped([*own, *consts], mapped_own, order, 0), mapped_own, sizes, 0)
    xs_of = heads(take_mapped(xs, mapped_xs, order, 1), mapped_xs, sizes, 1)
    window_avals = tuple(map(jax.typeof, own))

    def part(stage: Stage) -> Part:
        lanes = axis.resized(stage.size)
        batch = lanes_replay(static, lanes, mapped_consts, mapped_xs, windows, _resized(window_avals, stage.size))
        return Part(stage, batch, consts_of[stage.size], xs_of[stage.size])

    parts = list(map(part, stages))
    passages = _walk_forward(parts, [take(x, order, 0) for x in init])
    ys = [zeros(stacked(stacked(aval, axis.size), static.bound or 0)) for aval in static.y_avals]
    carry, ys = _walk_back(parts, passages, [take(x, order, 0) for x in carry], ys)
    back = jnp.argsort(order).astype(jnp.int32)
    return [*(take(x, back, 0) for x in carry), *(take(y, back, 1) for y in ys)]


def _walk_forward(parts: Sequence[Part], states: list[Any]) -> list[Passage]:
    """Save in every stage."""
    passages = []
    for (size, low, high), static, consts, xs in parts:
        init = [head(x, size, 0) for x in states]
        forward = lending_replay(static).forward
        loop = saving_loop(static, forward, len(consts), len(init))
        out = run(loop, low, high, consts, init, xs[: static.num_forward_xs])
        states = [put_head(x, new, 0) for x, new in zip(states, out.carry, strict=True)]
        passages.append(Passage(init, out))
    return passages


def _walk_back(
    parts: Sequence[Part], passages: Sequence[Passage], carry: list[Any], ys: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Sweep the stages, from the last to the first."""
    for part, passage in zip(reversed(parts), reversed(passages), strict=True):
        (size, low, high), static, consts, xs = part
        (marks,) = passage.out.marks
        now = [head(x, size, 0) for x in carry]
        new, rows = replay(static, low, high, marks, consts, passage.init, passage.out.saved, now, xs)
        carry = [put_head(x, n, 0) for x, n in zip(carry, new, strict=True)]
        rows = [with_rows(head(y, size, 1), row, low, high) for y, row in zip(ys, rows, strict=True)]
        ys = [put_head(y, row, 1) for y, row in zip(ys, rows, strict=True)]
    return carry, ys


def _resized(avals: Sequence[Any], size: int) -> tuple[Any, ...]:
    return tuple(aval.update(shape=(size,)) for aval in avals)


def _sizes(static: Replay) -> list[int]:
    return [2, static.num_consts, static.num_state, static.num_carry]


def _operand_axes(static: Replay) -> list[int]:
    leading, num_xs = sum(_sizes(static)), len(static.backward_avals[3])
    return [0] * leading + [1] * num_xs


def _result_axes(static: Replay) -> list[int]:
    return [0] * static.num_carry + [1] * len(static.y_avals)


SWEEPS = Rules(_run, _operand_axes, _result_axes)
