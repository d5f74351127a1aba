"""Constants of lanes that are filled once for each set of active lanes: the same results as lanes that run alone.

What decides is the size of the constants; here all that lanes have of their own counts as large. Bodies of mere
arithmetic are filled in derivatives alone; here they count as others do, but in the tests that say so.
"""

import gc

import jax
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.batching import lockstep as lockstep_loop
from loopax._src.core.batching import lockstep as masked_step
from loopax._src.core.lowering import rows as active_sets
from tests.support.derivatives import XS, H, W, derivatives
from tests.support.problem import BOUND, KINDS, LOOPS, name_of
from tests.support.reference import assert_close

LANES = (np.stack([W, W * 0.5, -W]), np.stack([H, H * 2, -H]), np.stack([XS, XS * 2, -XS]), np.array([3, 0, BOUND]))
CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS
# That forward, and those back; a reverse sweep has one or two that evaluate states again, and one that goes back.
LOOPS_OF_A_GRADIENT = {"Checkpointed": 3, "Checkpointed3": 4, "Bounded": 2, "Residuals": 2}


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch):
    monkeypatch.setattr(active_sets, "LARGE_CONSTANTS_BYTES", 1)


@pytest.fixture
def always(monkeypatch):
    """Finished lanes never compute with operands of their own."""
    for module in (masked_step, lockstep_loop):
        monkeypatch.setattr(module, "when_filled", lambda body, mapped: "always")


def counted(monkeypatch, function, *args):
    """How many loops of a program fill constants for each set of active lanes; and its results."""
    found = []
    filled = active_sets.Body.filled
    monkeypatch.setattr(active_sets.Body, "filled", lambda self, *args: found.append(self) or filled(self, *args))
    lowered = jax.jit(function).lower(*args)
    return len(found), lowered.compile()(*args)


def expected(loop, lengths=(3, 0, BOUND)):
    """Of every lane."""
    return [derivatives(loop, n, w, h, xs) for w, h, xs, n in zip(*LANES[:3], lengths, strict=True)]


def expected_gradients(loop):
    return tuple(map(np.stack, zip(*(lane.gradient for lane in expected(loop)), strict=True)))


@pytest.mark.parametrize("loop", LOOPS)
def test_forward(loop, monkeypatch, always):
    """Before a gradient is taken all kinds are the same."""
    loops, values = counted(monkeypatch, jax.vmap(LOOPS[loop][0](lx.Lax())), *LANES)
    assert loops == 1
    assert_close(values, np.stack([lane.value for lane in expected(loop)]))


# Each kind with a loop of known length, and each loop.
CASES = [*(("scan", kind) for kind in KINDS), ("reverse_stop", SLOTS), ("while", CHECKPOINTED)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in (("reverse_stop", BOUNDED), ("while", RESIDUALS))]


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_gradients_of_each_lane(loop, kind, monkeypatch, always):
    inside = jax.vmap(jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2)))
    loops, found = counted(monkeypatch, inside, *LANES)
    assert loops == LOOPS_OF_A_GRADIENT[name_of(kind)]
    values = np.stack([lane.value for lane in expected(loop)])
    assert_close(found, (values, expected_gradients(loop)))


def test_small_constants_are_filled_in_each_step(monkeypatch):
    monkeypatch.setattr(active_sets, "LARGE_CONSTANTS_BYTES", 64 * 1024)
    assert counted(monkeypatch, jax.vmap(LOOPS["scan"][0](lx.Lax())), *LANES)[0] == 0


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_mere_arithmetic_is_filled_in_no_step(loop, monkeypatch):
    """Neither forward nor in a gradient of each lane; what finished lanes compute there meets nothing else."""
    jax.clear_caches()  # nor what a test with `always` has traced, and nobody has collected yet
    gc.collect()
    loops, values = counted(monkeypatch, jax.vmap(LOOPS[loop][0](lx.Lax())), *LANES)
    assert loops == 0
    assert_close(values, np.stack([lane.value for lane in expected(loop)]))
    loops, found = counted(monkeypatch, jax.vmap(jax.grad(LOOPS[loop][0](RESIDUALS), (0, 1, 2))), *LANES)
    assert loops == 0
    assert_close(found, expected_gradients(loop))
