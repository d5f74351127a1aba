"""`Sequential`: lanes run one after another, and every one is what it is alone, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import BOUND, LOOPS
from tests.support.progress_recorder import recorder
from tests.support.reference import assert_close

__all__ = ["recorder"]  # a fixture

LANES = 4
RANDOM = np.random.RandomState(3)
COUNTS = np.array([3, 0, BOUND, 1])
OWN = (RANDOM.randn(LANES, 3, 3) * 0.4, RANDOM.randn(LANES, 3), RANDOM.randn(LANES, BOUND, 3), COUNTS)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_every_lane_is_bit_by_bit_what_it_is_alone(loop):
    """Also where all lanes take the same steps."""
    program, own = LOOPS[loop][0](lx.Lax(), lanes="sequential"), OWN[:3]
    one = jax.jit(program)
    for counts in (COUNTS, np.full(LANES, 5)):
        found = jax.jit(jax.vmap(program))(*own, counts)
        np.testing.assert_array_equal(found, [one(*lane) for lane in zip(*own, counts, strict=True)])
    same = jax.jit(jax.vmap(program, (0, 0, 0, None)))(*own, 5)
    np.testing.assert_array_equal(same, found)


def test_a_lane_evaluates_its_own_steps_alone():
    steps = []

    def body(_, x):
        jax.debug.callback(lambda: steps.append(None))
        return x + 1.0

    run = jax.vmap(lambda n: lx.fori_loop(0, n, body, 0.0, lanes="sequential"))
    assert_close(jax.jit(run)(COUNTS), jnp.asarray(COUNTS, float))
    jax.effects_barrier()
    assert len(steps) == sum(COUNTS)


def test_lanes_share_the_memory_of_auto():
    """What all lanes store together is no more than one loop may."""
    kind = lx.Auto(memory=4000)
    loop = lambda h: lx.fori_loop(0, BOUND, lambda _, h: jnp.sin(h), h, kind=kind, lanes="sequential")
    explained = lx.explain(lambda hs: jax.vmap(loop)(hs).sum(), np.ones((LANES, 3)))
    assert "at most 1000 bytes" in " ".join(str(explained).split())


def test_cotangents_of_shared_weights_are_summed_in_place():
    """Beside the stored states there is one sum, and not one for each lane."""
    size, lanes = 64, 64
    loop = lambda w, h: lx.fori_loop(0, 3, lambda _, h: jnp.tanh(w @ h), h, kind="bounded", lanes="sequential")
    total = lambda w, hs: jax.vmap(loop, (None, 0))(w, hs).sum()
    memory = jax.jit(jax.grad(total)).lower(np.ones((size, size)), np.ones((lanes, size))).compile().memory_analysis()
    weights = 8 * size * size
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * weights + 8 * lanes * size * 8


def test_progress(recorder):
    """All lanes are reported as one loop."""
    run = jax.vmap(lambda n: lx.fori_loop(0, n, lambda _, x: x + 1.0, 0.0, lanes="sequential", progress=True))
    jax.block_until_ready(jax.jit(run)(COUNTS))
    assert {parts for _, _, parts, _ in recorder.begun} == {LANES}
    assert len(recorder.ended) == LANES
