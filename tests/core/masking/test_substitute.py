"""Constants of lanes that are filled once for each set of active lanes: the same results as lanes that run alone.

What decides is the size of the constants; here all that lanes have of their own counts as large.
"""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax._src.core.lowering import active_sets
from tests.support.problem import BOUND, KINDS, LOOPS, WITH_LAX, XS, H, W, name_of
from tests.support.reference import assert_close, for_each_lane

LANES = (jnp.stack([W, W * 0.5, -W]), jnp.stack([H, H * 2, -H]), jnp.stack([XS, XS * 2, -XS]), jnp.array([3, 0, BOUND]))
EVERY_AXIS = (0, 0, 0, 0)
# That forward, and those back; a reverse sweep has one or two that evaluate states again, and one that goes back.
LOOPS_OF_A_GRADIENT = {"Checkpointed": 3, "Checkpointed3": 4, "Bounded": 2, "Residuals": 2}


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch):
    monkeypatch.setattr(active_sets, "LARGE_CONSTANTS_BYTES", 1)


def loops_filled_outside(monkeypatch, function, *args):
    """How many loops of the compiled program fill constants for each set of active lanes."""
    found = []
    at = active_sets.FilledOutside.at
    monkeypatch.setattr(active_sets.FilledOutside, "at", lambda self, *args: found.append(self) or at(self, *args))
    jax.jit(function).lower(*args)
    return len(found)


@ft.cache
def expected_lanes(loop):
    """Values and gradients, the same for all kinds."""
    return for_each_lane(jax.value_and_grad(LOOPS[loop][1], (0, 1, 2)), EVERY_AXIS, *LANES)


@ft.cache
def expected_hessians():
    return for_each_lane(jax.hessian(LOOPS["scan"][1], 1), EVERY_AXIS, *LANES)


@ft.cache
def expected_gradients():
    """Of every lane (rows) with every length (columns)."""
    lengths = (None, None, None, 0)
    gradient = jax.grad(LOOPS["scan"][1])
    return jnp.stack([for_each_lane(gradient, lengths, *lane, LANES[3]) for lane in zip(*LANES[:3], strict=True)])


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
@pytest.mark.parametrize("loop", LOOPS)
def test_forward(loop, kind, monkeypatch):
    lanes = jax.vmap(LOOPS[loop][0](kind))
    assert loops_filled_outside(monkeypatch, lanes, *LANES) == 1
    assert_close(jax.jit(lanes)(*LANES), expected_lanes(loop)[0])


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", ["scan", "reverse_stop", "while"])
def test_gradients(loop, kind, monkeypatch):
    program, _ = LOOPS[loop]
    inside = jax.vmap(jax.grad(program(kind), (0, 1, 2)))
    outside = jax.grad(lambda w, h, xs: jax.vmap(program(kind))(w, h, xs, LANES[3]).sum(), (0, 1, 2))
    _, wanted = expected_lanes(loop)
    assert loops_filled_outside(monkeypatch, inside, *LANES) == LOOPS_OF_A_GRADIENT[name_of(kind)]
    assert_close(jax.jit(inside)(*LANES), wanted)
    assert_close(jax.jit(outside)(*LANES[:3]), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_second_derivatives_and_two_vmaps(kind):
    program, _ = LOOPS["scan"]
    assert_close(jax.jit(jax.vmap(jax.hessian(program(kind), 1)))(*LANES), expected_hessians())
    twice = jax.vmap(jax.vmap(jax.grad(program(kind)), (None, None, None, 0)), (0, 0, 0, None))
    assert_close(jax.jit(twice)(*LANES), expected_gradients())
    checkpointed = jax.vmap(jax.grad(jax.checkpoint(program(kind))))
    assert_close(jax.jit(checkpointed)(*LANES), expected_lanes("scan")[1][0])


def test_forward_mode_outside_of_the_batch():
    program, expected = LOOPS["while"]
    directional = lambda f: jax.jvp(lambda w: f(w, *LANES[1:]), (LANES[0],), (LANES[0] + 1.0,))
    by_lane = lambda *args: for_each_lane(expected, EVERY_AXIS, *args)
    assert_close(jax.jit(lambda: directional(jax.vmap(program(lx.Lax()))))(), directional(by_lane))


def test_gradients_outside_of_the_batch_fill_constants_once_as_well(monkeypatch):
    program, _ = LOOPS["scan"]
    outside = jax.grad(lambda w, h, xs: jax.vmap(program(lx.Checkpointed()))(w, h, xs, LANES[3]).sum(), (0, 1, 2))
    assert loops_filled_outside(monkeypatch, outside, *LANES[:3]) == 3


def test_small_constants_are_filled_in_each_step(monkeypatch):
    monkeypatch.setattr(active_sets, "LARGE_CONSTANTS_BYTES", 64 * 1024)
    assert loops_filled_outside(monkeypatch, jax.vmap(LOOPS["scan"][0](lx.Lax())), *LANES) == 0
