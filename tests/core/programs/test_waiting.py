"""Which blocks run where lanes are at different ones (`core/waiting.py`), and what that saves a nest in free lanes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loopax as lx
from loopax._src.core.waiting import blocks_to_run, lanes_wait
from tests.core.batching.counting import LaneCounter, alone
from tests.support.reference import assert_close

COSTS = 100.0, 100.0, 2.0  # of two dear blocks and a cheap one
OF_ITERATION = 10.0


def chosen(at, lost, costs=COSTS):
    """For lanes that are each at one block: which blocks run, and what lanes at each have lost."""
    places = np.eye(len(costs), dtype=bool)[np.array(at)]
    waits = lanes_wait(costs, (True, *(False for _ in costs[1:])))
    of_lane = lambda place, lost: blocks_to_run(list(place), lost, [*costs, OF_ITERATION], waits)
    runs, lost = jax.jit(jax.vmap(of_lane, (0, None)))(places, jnp.asarray(lost, jnp.float32))
    runs, lost = np.stack(runs, 1), np.asarray(lost)
    assert (runs == runs[0]).all()  # a block runs for all lanes or for none
    assert (lost == lost[0]).all()
    return runs[0].tolist(), lost[0].tolist()


def test_a_block_runs_when_its_lanes_have_lost_half_of_what_it_takes():
    runs, lost = chosen([0, 0, 0, 1], [0, 0, 0])
    assert runs == [True, False, True]  # the one with the most lanes, and what is cheap
    assert lost == [0, (COSTS[0] + COSTS[2] + OF_ITERATION) / 4, 0]
    assert chosen([0, 0, 0, 1], [0, 49, 0])[0] == [True, False, True]
    runs, lost = chosen([0, 0, 0, 1], [0, 50, 0])
    assert runs == [True, True, True]
    assert lost == [0, 0, 0]


def test_a_block_without_lanes_does_not_run_for_what_others_have_lost():
    assert chosen([0, 0], [0, 99, 0])[0] == [True, False, True]


def test_nobody_waits_where_only_innermost_steps_are_dear():
    runs, lost = chosen([0, 0, 0, 1], [0, 0, 0], (100.0, 4.0, 2.0))
    assert runs == [True, True, True]
    assert lost == [0, 0, 0]


def test_lanes_wait_where_only_an_outer_step_is_dear():
    runs, lost = chosen([0, 0, 0, 1], [0, 0, 0], (4.0, 100.0, 2.0))
    assert runs == [True, False, True]
    assert lost[1] > 0


def test_a_lane_alone_waits_for_nobody():
    runs, lost = blocks_to_run([jnp.array(False)] * 3, jnp.zeros(3, jnp.float32), [*COSTS, OF_ITERATION], [True] * 3)
    assert all(runs)
    assert not lost.any()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 2), min_size=7, max_size=7), st.lists(st.floats(0, 200, width=32), min_size=3, max_size=3)
)
def test_a_lane_moves_in_every_iteration(at, lost):
    runs, after = chosen(at, lost)
    assert any(runs[place] for place in at)
    for block, (ran, before, now) in enumerate(zip(runs, lost, after, strict=True)):
        assert now == 0 if ran else now >= before, block


def test_lanes_of_all_axes_are_counted():
    at = jnp.eye(2, dtype=bool)[jnp.array([[0, 0, 0], [1, 1, 0]])]
    of_lane = lambda at, lost: blocks_to_run(list(at), lost, [100.0, 100.0, OF_ITERATION], [True] * 2)
    runs, _ = jax.vmap(jax.vmap(of_lane, (0, None)), (0, None))(at, jnp.zeros(2, jnp.float32))
    assert np.stack(runs, -1).reshape(-1, 2).tolist() == [[True, False]] * 6


# A nest whose outer step is as dear as an inner one.

COUNTER = LaneCounter()
LENGTHS = np.random.RandomState(0).randint(0, 9, (16, 12))


def dear(w, x):
    for _ in range(3):
        x = jnp.tanh(w @ x)
    return x


def nest(w, x, lengths, lanes):
    def step(x, n):
        x = dear(w, x + COUNTER(x[0]))
        return lx.fori_loop(0, n, lambda _, x: dear(w, x) * 1.1, x, max_steps=8), x.sum()

    return lx.scan(step, x, lengths, lanes=lanes)


STARTS = np.random.RandomState(1).randn(16, 8)
WEIGHTS = np.random.RandomState(2).randn(8, 8)


def test_a_dear_outer_step_waits_for_lanes():
    batch = lambda lanes: jax.jit(jax.vmap(partial(nest, WEIGHTS, lanes=lanes)))
    found, wanted = batch("free")(STARTS, LENGTHS), batch("lockstep")(STARTS, LENGTHS)
    assert_close(found, wanted)
    at_once = max(int(np.maximum(lane, 1).sum()) for lane in LENGTHS)  # in nearly each of them, a lane is at it
    evaluations, _ = COUNTER.of(batch("free"), STARTS, LENGTHS)
    assert LENGTHS.shape[1] < evaluations < 0.75 * at_once


@pytest.mark.parametrize("order", ["gradient of a batch", "batch of gradients", "tangents of a batch"])
def test_derivatives_where_lanes_wait(order):
    """Reverse mode waits for nobody, forward mode does; a bound of the single loop holds without waiting alone."""
    f = lambda w, x, lengths, lanes="free": nest(w, x, lengths, lanes)[0].sum()
    alone_f = partial(f, lanes="lockstep")
    wanted = alone(lambda x, n: jax.grad(alone_f, (0, 1))(WEIGHTS, x, n), STARTS, LENGTHS)
    if order == "gradient of a batch":
        total = lambda w, x: jax.vmap(f, (None, 0, 0))(w, x, LENGTHS).sum()
        assert_close(jax.jit(jax.grad(total, (0, 1)))(WEIGHTS, STARTS), (wanted[0].sum(0), wanted[1]))
    elif order == "batch of gradients":
        gradients = jax.vmap(jax.grad(f, (0, 1)), (None, 0, 0))
        assert_close(jax.jit(gradients)(WEIGHTS, STARTS, LENGTHS), wanted)
    else:
        batch = lambda x: jax.vmap(f, (None, 0, 0))(WEIGHTS, x, LENGTHS)
        _, dots = jax.jit(lambda x: jax.jvp(batch, (x,), (jnp.ones_like(x),)))(STARTS)
        assert_close(dots, wanted[1].sum(-1))
