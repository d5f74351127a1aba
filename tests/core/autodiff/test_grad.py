"""Values and first derivatives against the Python loop, for every loop, kind and number of steps."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

from tests.support.problem import BOUND, KINDS, LOOPS, WITH_LAX, XS, H, W, expected_gradient, name_of
from tests.support.reference import assert_close

# A block has 4 steps: none, one, within, at and around the ends of blocks, and at the bound.
COUNTS = [0, 1, 2, 3, 4, 5, 7, 8, 9, BOUND]


@ft.lru_cache
def compiled(loop, kind):
    return jax.jit(jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2)))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", LOOPS)
def test_values_and_gradients(loop, kind):
    for n in COUNTS:
        assert_close(compiled(loop, kind)(W, H, XS, jnp.int32(n)), expected_gradient(loop, n))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", LOOPS)
def test_without_jit(loop, kind):
    gradient = jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2))
    assert_close(gradient(W, H, XS, jnp.int32(6)), expected_gradient(loop, 6))


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
@pytest.mark.parametrize("loop", LOOPS)
def test_forward_mode(loop, kind):
    program = LOOPS[loop][0](kind)
    dots = (W * 0.3, H + 1.0, XS * 0.7)
    actual = jax.jit(lambda n: jax.jvp(lambda *args: program(*args, n), (W, H, XS), dots))(jnp.int32(6))
    assert_close(actual, jax.jvp(lambda *args: LOOPS[loop][1](*args, 6), (W, H, XS), dots))


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_static_length(kind):
    gradient = jax.jit(jax.value_and_grad(LOOPS["scan"][0](kind), (0, 1, 2)), static_argnums=3)
    for n in (0, 1, 6, BOUND):
        assert_close(gradient(W, H, XS, n), expected_gradient("scan", n))


@pytest.mark.parametrize("unroll", [2, 3, 16])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_unroll(kind, unroll):
    import loopax as lx
    from tests.support.problem import mixed, scan_step

    @jax.jit
    @jax.value_and_grad
    def gradient(w, n):
        (h, _), ys = lx.scan(scan_step(w), (H, 0), XS, length=n, unroll=unroll, kind=kind)
        return mixed((h, ys))

    for n in (0, 1, 5, BOUND):
        value, (dw, _, _) = expected_gradient("scan", n)
        assert_close(gradient(W, jnp.int32(n)), (value, dw))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_bound_below_the_rows(kind):
    import loopax as lx
    from tests.support.problem import mixed, scan_step

    @jax.jit
    @jax.value_and_grad
    def gradient(xs, n):
        (h, _), ys = lx.scan(scan_step(W), (H, 0), xs, length=n, max_steps=6, kind=kind)
        return mixed((h, ys))

    for n in (0, 4, 6):
        value, (_, _, dxs) = expected_gradient("scan", n)
        assert_close(gradient(XS, jnp.int32(n)), (value, dxs))
