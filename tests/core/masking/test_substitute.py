"""Constants of lanes that are lent in stretches: the same results as lanes that run alone.

What decides is the size of the constants; here all that lanes have of their own counts as large.
"""

import jax
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.masking import substitute as lending
from tests.support.derivatives import XS, H, W, derivatives
from tests.support.problem import BOUND, KINDS, LOOPS, name_of
from tests.support.reference import assert_close

LANES = (np.stack([W, W * 0.5, -W]), np.stack([H, H * 2, -H]), np.stack([XS, XS * 2, -XS]), np.array([3, 0, BOUND]))
CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch):
    monkeypatch.setattr(lending, "LARGE_CONSTANTS_BYTES", 1)


def stretches(function, *args):
    """How many loops of the program lend constants in stretches."""
    return str(jax.make_jaxpr(function)(*args)).count("lent=Lent(")


def expected(loop, lengths=(3, 0, BOUND)):
    """Of every lane."""
    return [derivatives(loop, n, w, h, xs) for w, h, xs, n in zip(*LANES[:3], lengths, strict=True)]


def expected_gradients(loop):
    return tuple(map(np.stack, zip(*(lane.gradient for lane in expected(loop)), strict=True)))


@pytest.mark.parametrize("loop", LOOPS)
def test_forward(loop):
    """Before a gradient is taken all kinds are the same."""
    lanes = jax.vmap(LOOPS[loop][0](lx.Lax()))
    assert stretches(lanes, *LANES) == 1
    assert_close(jax.jit(lanes)(*LANES), np.stack([lane.value for lane in expected(loop)]))


# Each kind with a loop of known length and with a condition.
CASES = [*(("scan", kind) for kind in KINDS), ("reverse_stop", SLOTS), ("reverse_stop", BOUNDED)]
CASES += [("while", CHECKPOINTED), ("while", RESIDUALS)]
MORE = [("reverse_stop", CHECKPOINTED), ("reverse_stop", RESIDUALS), ("while", SLOTS), ("while", BOUNDED)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_gradients_of_each_lane(loop, kind):
    inside = jax.vmap(jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2)))
    assert stretches(inside, *LANES) == 2
    values = np.stack([lane.value for lane in expected(loop)])
    assert_close(jax.jit(inside)(*LANES), (values, expected_gradients(loop)))


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_gradients_of_all_lanes(loop, kind):
    lanes = jax.vmap(LOOPS[loop][0](kind))
    outside = jax.grad(lambda w, h, xs: lanes(w, h, xs, LANES[3]).sum(), (0, 1, 2))
    assert_close(jax.jit(outside)(*LANES[:3]), expected_gradients(loop))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_second_derivatives(kind):
    hessians = jax.jit(jax.vmap(jax.hessian(LOOPS["scan"][0](kind), 1)))(*LANES)
    assert_close(hessians, np.stack([lane.hessian for lane in expected("scan")]))


@pytest.mark.parametrize("kind", [SLOTS, RESIDUALS], ids=name_of)
def test_two_vmaps(kind):
    """Every lane (rows) with every length (columns)."""
    gradient = jax.grad(LOOPS["scan"][0](kind))
    twice = jax.vmap(jax.vmap(gradient, (None, None, None, 0)), (0, 0, 0, None))
    columns = [[lane.gradient[0] for lane in expected("scan", (n,) * 3)] for n in LANES[3]]
    assert_close(jax.jit(twice)(*LANES), np.stack(columns, 1))


@pytest.mark.parametrize("kind", [CHECKPOINTED, BOUNDED], ids=name_of)
def test_jax_checkpoint(kind):
    checkpointed = jax.vmap(jax.grad(jax.checkpoint(LOOPS["scan"][0](kind))))
    assert_close(jax.jit(checkpointed)(*LANES), expected_gradients("scan")[0])


def test_forward_mode_outside_of_the_batch():
    lanes = jax.vmap(LOOPS["while"][0](lx.Lax()))
    directional = lambda w: jax.jvp(lambda w: lanes(w, *LANES[1:]), (w,), (w + 1.0,))
    values = [lane.value for lane in expected("while")]
    tangents = [np.vdot(lane.gradient[0], w + 1.0) for lane, w in zip(expected("while"), LANES[0], strict=True)]
    assert_close(jax.jit(directional)(LANES[0]), (np.stack(values), np.stack(tangents)))


def test_small_constants_are_not_lent_in_stretches(monkeypatch):
    monkeypatch.setattr(lending, "LARGE_CONSTANTS_BYTES", 64 * 1024)
    assert stretches(jax.vmap(LOOPS["scan"][0](lx.Lax())), *LANES) == 0
