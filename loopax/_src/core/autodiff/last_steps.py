"""A loop made of two, where its gradient stores the residuals of the last steps on the way forward.

The first loop takes the steps that are evaluated again later, in blocks. The second takes the last steps, and stores
what their derivative needs. The way back begins with these. When it has used them up, replays of the first loop have
the room.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._src.core.ir.loop import Loop, LoopInputs, Outcome
from loopax._src.core.ir.plan import Plan
from loopax._src.core.jaxpr.util import trace, weakly_cached
from loopax._src.jax_internals import ClosedJaxpr, ad, jaxpr_as_fun, keep_bits


class Part(NamedTuple):
    """One of the two loops: it takes the rows `start ... start + loop.bound - 1` of the whole one."""

    loop: Loop
    start: int

    @property
    def window(self) -> tuple[Any, Any]:
        """Its first row, and the one behind its last."""
        assert self.loop.bound is not None
        return jnp.int32(0), jnp.int32(self.loop.bound)

    def inputs(self, inputs: LoopInputs) -> LoopInputs:
        """Its operands from those of the whole loop, whose carry it may be given: it begins where the other ends."""
        return inputs._replace(xs=[self._rows(x) for x in inputs.xs])

    def _rows(self, x: Any) -> Any:
        assert self.loop.bound is not None
        if ad.is_undefined_primal(x):
            return ad.UndefinedPrimal(x.aval.update(shape=(self.loop.bound, *x.aval.shape[1:])))
        rows = partial(lax.slice_in_dim, start_index=self.start, limit_index=self.start + self.loop.bound)
        return keep_bits(rows, x)


def in_two(loop: Loop) -> tuple[Part, Part] | None:
    """The first and the second loop; None: the plan does not ask for two."""
    assert isinstance(loop.storage, Plan)
    plans = None if loop.bound is None or loop.saving else loop.storage.in_two(loop.bound)
    if plans is None:
        return None
    assert loop.bound is not None
    first, last = (plans.num_steps, 0), (loop.bound - plans.num_steps, plans.num_steps)
    if loop.reverse:
        first, last = (first[0], last[0]), (last[0], 0)
    return _part(loop, plans.first, *first), _part(loop, plans.last, *last)


def _part(loop: Loop, plan: Plan, num_steps: int, start: int) -> Part:
    part = loop._replace(
        body=_from_row(loop.body, start) if start else loop.body,
        inverse=None,
        bound=num_steps,
        storage=plan,
        reporting=loop.reporting and loop.reporting._replace(runs=2 * loop.reporting.runs),
    )
    return Part(part, start)


@weakly_cached
def _from_row(body: ClosedJaxpr, start: int) -> ClosedJaxpr:
    """The body for rows that count from `start`."""
    function = jaxpr_as_fun(body)
    return trace(lambda row, *operands: function(row + start, *operands), body.in_avals)


def joined(loop: Loop, first: Outcome, last: Outcome) -> Outcome:
    """The results of the whole loop from those of its two parts; None for those that are unknown now."""
    rows = zip(last.ys, first.ys, strict=True) if loop.reverse else zip(first.ys, last.ys, strict=True)
    return last._replace(
        num_steps=first.num_steps + last.num_steps,
        ys=[None if front is None else _concatenated(front, back) for front, back in rows],
    )


def _concatenated(front: Any, back: Any) -> Any:
    return keep_bits(lambda *parts: jnp.concatenate(parts), front, back)
