"""Values and first derivatives against the Python loop, for every loop, kind and number of steps."""

from itertools import cycle

import jax
import numpy as np
import pytest

import loopax as lx
from tests.support.derivatives import XS, H, W, derivatives
from tests.support.problem import BOUND, KINDS, LOOPS, WITH_LAX, expected_gradient, mixed, name_of, scan_step
from tests.support.reference import assert_close

# A block has 4 steps: none, one, within, at and around the ends of blocks, and at the bound.
COUNTS = [0, 1, 2, 3, 4, 5, 7, 8, 9, BOUND]


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", LOOPS)
def test_values_and_gradients(loop, kind):
    compiled = jax.jit(jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2)))
    for n in COUNTS:
        assert_close(compiled(W, H, XS, np.int32(n)), derivatives(loop, n)[:2])


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_expected_is_what_python_loops_give(loop):
    for n in (0, 1, 6, BOUND):
        assert_close(derivatives(loop, n)[:2], expected_gradient(loop, n))


# Without `jit` what runs is the same for all loops, and for all kinds: each once.
@pytest.mark.parametrize(("loop", "kind"), list(zip(LOOPS, cycle(KINDS), strict=False)), ids=name_of)
def test_without_jit(loop, kind):
    gradient = jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2))
    assert_close(gradient(W, H, XS, np.int32(6)), derivatives(loop, 6)[:2])


# Forward mode stores nothing: each loop with a kind, and one loop with all of them.
FORWARD = [*zip(LOOPS, cycle(WITH_LAX), strict=False), *(("scan", kind) for kind in WITH_LAX[1:])]


@pytest.mark.parametrize(("loop", "kind"), FORWARD, ids=name_of)
def test_forward_mode(loop, kind):
    program = LOOPS[loop][0](kind)
    dots = (W * 0.3, H + 1.0, XS * 0.7)
    expected = derivatives(loop, 6)
    actual = jax.jit(lambda n: jax.jvp(lambda *args: program(*args, n), (W, H, XS), dots))(np.int32(6))
    assert_close(actual, (expected.value, expected.along(*dots)))


def gradients_of_static_lengths(kind, lengths):
    program = jax.value_and_grad(LOOPS["scan"][0](kind), (0, 1, 2))
    actual = jax.jit(lambda *args: [program(*args, n) for n in lengths])(W, H, XS)
    assert_close(actual, [derivatives("scan", n)[:2] for n in lengths])


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_static_length(kind):
    gradients_of_static_lengths(kind, [0, 6])


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_static_length_of_one_step_and_of_all(kind):
    gradients_of_static_lengths(kind, [1, BOUND])


CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS
UNROLLED = [(CHECKPOINTED, 3), (SLOTS, 2), (BOUNDED, 3), (RESIDUALS, 16)]
UNROLLED += [pytest.param(kind, n, marks=pytest.mark.slow) for kind, n in ((CHECKPOINTED, 16), (RESIDUALS, 2))]


@pytest.mark.parametrize(("kind", "unroll"), UNROLLED, ids=name_of)
def test_unroll(kind, unroll):
    @jax.jit
    @jax.value_and_grad
    def gradient(w, n):
        (h, _), ys = lx.scan(scan_step(w), (H, 0), XS, length=n, unroll=unroll, kind=kind)
        return mixed((h, ys))

    for n in (0, 1, 5, BOUND):
        value, (dw, _, _), _ = derivatives("scan", n)
        assert_close(gradient(W, np.int32(n)), (value, dw))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_bound_below_the_rows(kind):
    @jax.jit
    @jax.value_and_grad
    def gradient(xs, n):
        (h, _), ys = lx.scan(scan_step(W), (H, 0), xs, length=n, max_steps=6, kind=kind)
        return mixed((h, ys))

    for n in (0, 4, 6):
        value, (_, _, dxs), _ = derivatives("scan", n)
        assert_close(gradient(XS, np.int32(n)), (value, dxs))
