"""Rows that all lanes of a group walk are walked without masks."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loopax as lx
from loopax._src.core.jaxpr.util import trace
from loopax._src.core.lowering.rows import Body, LoopState, RowLoop, Steps
from loopax._src.core.masking import CommonRows, active_lanes, active_p, common_rows, unmasked
from loopax._src.jax_internals import jaxpr_as_fun

ROWS = 12


@cache
def compiled(walk):
    def step_of(kind):
        return lambda row, count: [count + 1, jnp.float32(kind)]

    def take(body, row, position, carry):
        count, kind = body(row, *carry)
        return [count], [kind]

    def run(start, end, first, behind):
        body = Body(step_of(-1), [], common=(CommonRows(first, behind), Body(step_of(1), [])))
        steps = Steps(body, take)
        progress = LoopState([jnp.int32(0)], [jnp.zeros(ROWS, jnp.float32)], start)
        return walk.run(steps, progress, end)

    return jax.jit(run)


def walked(walk, start, end, first, behind):
    """Which step each position took: 1 the common one, -1 the other one, 0 none."""
    progress = compiled(walk)(start, end, first, behind)
    assert int(progress.carry[0]) == np.count_nonzero(progress.ys[0])
    return np.asarray(progress.ys[0])


positions = st.integers(0, ROWS).map(np.int32)
limits = st.none() | positions


@settings(deadline=None, max_examples=60)
@given(st.tuples(positions, positions), limits, limits, st.booleans(), st.sampled_from([1, 3]))
def test_every_position_takes_its_own_step_once(limits, first, behind, reverse, unroll):
    low, high = sorted(limits)
    walk = RowLoop(reverse, unroll)
    start, end = (high - 1, low - 1) if reverse else (low, high)
    rows = np.arange(ROWS)
    common = (rows >= (0 if first is None else first)) & (rows < (ROWS if behind is None else behind))
    wanted = np.where((rows >= low) & (rows < high), np.where(common, 1, -1), 0)
    np.testing.assert_array_equal(walked(walk, np.int32(start), np.int32(end), first, behind), wanted)


@pytest.mark.parametrize("has_limits", [(True, True), (True, False), (False, True)])
def test_the_rows_are_those_in_which_all_lanes_are_active(has_limits):
    low, high = np.array([1, 3, 2], np.int32), np.array([7, 9, 8], np.int32)
    own = [x for x, keep in zip((low, high), has_limits, strict=True) if keep]
    ask = lambda row, *own: active_p.bind(row, *own, has_limits=has_limits, lanes=3)
    body = trace(ask, [jax.ShapeDtypeStruct((), jnp.int32), *map(jax.typeof, own)])
    rows = common_rows(body, own)
    assert rows is not None
    for row in range(ROWS):
        (active,) = active_lanes(jnp.int32(row), *own, has_limits=has_limits, lanes=3)
        np.testing.assert_array_equal(jaxpr_as_fun(body)(jnp.int32(row), *own)[0], active)
        inside = (rows.low is None or rows.low <= row) and (rows.high is None or row < rows.high)
        assert inside == bool(active.all())
    np.testing.assert_array_equal(jaxpr_as_fun(unmasked(body))(jnp.int32(0), *own)[0], [True] * 3)


def loops(jaxpr):
    """The bodies of innermost loops, and of sweeps, wherever they are in a program."""
    for eqn in jaxpr.eqns:
        inner = [value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")]
        found = [body for jaxpr in inner for body in loops(jaxpr)]
        is_loop = eqn.primitive.name in ("loop", "reverse_sweep", "linear_loop")
        yield from inner if is_loop and not found else found


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [lx.Checkpointed(), lx.Bounded(), lx.Checkpointed(3)])
def test_gradients_of_groups_see_who_is_active(kind, reverse):
    def f(w, xs, n):
        body = lambda h, x: (jnp.tanh(w @ h + x), None)
        return lx.scan(body, jnp.ones(3), xs, n, kind=kind, reverse=reverse, lanes=lx.Compact(min_lanes=2))[0].sum()

    w, xs, n = 0.3 * jnp.eye(3), jnp.ones((8, 6, 3)), jnp.array([1, 6, 3, 3, 2, 5, 6, 0])
    gradient = jax.grad(lambda w, xs, n: jax.vmap(f, (None, 0, 0))(w, xs, n).sum())
    found = list(loops(jax.make_jaxpr(gradient)(w, xs, n).jaxpr))
    assert len(found) >= 4
    assert all(any(eqn.primitive.name == "active_lanes" for eqn in body.eqns) for body in found)
