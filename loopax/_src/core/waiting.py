"""Which blocks of a program run, where each lane of a batch is at another one.

A block takes about as long for one lane as for all. So lanes wait at a block for others to come to it, while the blocks
run at which more lanes are. A block runs when the lanes at it have lost half the time that it takes. (All of it would
be best if lanes came to it at a steady rate and had equally far to go, as orders are best placed. The lane with the
longest way loses more than others.) The block with the most lanes runs, too, and each that is cheap beside the others.
So no lane waits for longer than it takes to lose that time alone.

Lanes take their steps in other iterations than alone, but the same steps. A derivative walks the steps back, each lane
at its own pace: there no lane waits, and each iteration runs all blocks (`without_waiting`).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.types import batch_filled, without_tangents
from loopax._src.core.jaxpr.util import rewriting
from loopax._src.jax_internals import Primitive, map_programs

LOST = 0.5  # of what a block takes
CHEAP = 0.15  # a block that takes so little of an iteration with all blocks

blocks_to_run_p: Primitive = jaxi.new_primitive("blocks_to_run")


def blocks_to_run(at: Sequence[Any], lost: Any, costs: Sequence[float], waits: Sequence[bool]) -> tuple[list[Any], Any]:
    """Whether each block runs for a lane, and what lanes at each have then lost.

    `at`: for each block whether the lane is at it; `lost`: float32[blocks], zeros at first; `costs`: of each block,
    and behind them that of an iteration without its blocks; `waits`: at which lanes wait. A lane alone never does.
    """
    runs, lost = blocks_to_run_p.bind(jnp.stack(list(at)), lost, costs=tuple(costs), waits=tuple(waits))
    return [runs[i] for i in range(len(at))], lost


def lanes_wait(costs: Sequence[float], are_innermost: Sequence[bool]) -> list[bool]:
    """At which blocks lanes of a batch wait for others: at dear ones.

    Where only steps of one innermost loop are, lanes are there in each iteration, as they pass all others at once.
    """
    is_dear = [cost > CHEAP * sum(costs) for cost in costs]
    found = [is_innermost for is_innermost, dear in zip(are_innermost, is_dear, strict=True) if dear]
    return [False] * len(costs) if found == [True] else is_dear


def _blocks_to_run(at: Any, lost: Any, *, costs: tuple[float, ...], waits: tuple[bool, ...]) -> list[Any]:
    """The meaning. `at`: bool[*lanes, blocks]; `lost`: float32[*lanes, blocks], the same for all lanes of a batch."""
    lanes = tuple(range(at.ndim - 1))
    if not lanes or 0 in at.shape or not any(waits):
        return [jnp.ones_like(at), lost]
    waiting = jnp.sum(at, lanes, dtype=jnp.float32)
    runs, lost_now = blocks_that_run(jnp, waiting, lost[(0,) * len(lanes)], costs, waits)
    return [jnp.broadcast_to(runs, at.shape), jnp.broadcast_to(lost_now, lost.shape)]


def blocks_that_run(xp: Any, waiting: Any, lost: Any, costs: Sequence[float], waits: Sequence[bool]) -> tuple[Any, Any]:
    """Which blocks run, and what lanes at each have then lost, with the functions of `xp`, NumPy or jax.numpy.

    `waiting`: how many lanes are at each block.
    """
    cost, of_iteration = np.asarray(costs[:-1], np.float32), np.float32(costs[-1])
    is_due = (lost >= LOST * cost) & (waiting > 0)
    has_most = xp.arange(len(cost), dtype=np.int32) == xp.argmax(waiting).astype(np.int32)
    runs = is_due | has_most | ~np.array(waits)
    taken = of_iteration + xp.sum(xp.where(runs, cost, np.float32(0)))
    share = waiting / xp.maximum(xp.sum(waiting), np.float32(1))
    return runs, xp.where(runs, np.float32(0), lost + share * taken)


jaxi.register(
    blocks_to_run_p,
    meaning=_blocks_to_run,
    params=["costs", "waits"],
    jvp=without_tangents(blocks_to_run_p),
    batch=batch_filled(blocks_to_run_p),
)


@rewriting
def without_waiting(eqn: Any) -> Any:
    """A program in which each block runs in each iteration."""
    if eqn.primitive is not blocks_to_run_p:
        return map_programs(eqn, without_waiting)
    nowhere = (False,) * eqn.invars[0].aval.shape[-1]
    return eqn.replace(params={**eqn.params, "waits": nowhere})
