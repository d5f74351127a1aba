"""`vmap` of gradients and gradients of `vmap`, with any operands batched and a count for each lane."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

from tests.support.problem import BOUND, KINDS, LOOPS, XS, H, W, name_of
from tests.support.reference import assert_close, for_each_lane

COUNTS = jnp.array([3, 0, BOUND])
LANES = (jnp.stack([W, W * 0.5, -W]), jnp.stack([H, H * 2, -H]), jnp.stack([XS, XS * 2, -XS]), COUNTS)
SHARED = (W, H, XS, jnp.int32(7))

SCAN_AXES = [
    (None, 0, None, None),
    (0, None, None, None),
    (None, None, 0, None),
    (None, None, None, 0),
    (None, 0, None, 0),
    (0, 0, 0, 0),
]
CASES = [("scan", axes) for axes in SCAN_AXES] + [
    (loop, axes) for loop in LOOPS if loop != "scan" for axes in [(0, None, None, None), (0, 0, 0, 0)]
]


def arguments(axes):
    return tuple(lane if axis is not None else one for lane, one, axis in zip(LANES, SHARED, axes, strict=True))


@ft.cache
def expected_lanes(loop, axes):
    """Values and gradients, the same for all kinds and both orders of `vmap` and `grad`."""
    return for_each_lane(jax.value_and_grad(LOOPS[loop][1], (0, 1, 2)), axes, *arguments(axes))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize(("loop", "axes"), CASES)
def test_vmap_of_grad(loop, axes, kind):
    gradient = jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2))
    assert_close(jax.jit(jax.vmap(gradient, axes))(*arguments(axes)), expected_lanes(loop, axes))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize(("loop", "axes"), CASES)
def test_grad_of_vmap(loop, axes, kind):
    program, _ = LOOPS[loop]
    *args, n = arguments(axes)
    weights = jnp.array([1.0, 2.0, 3.0])

    @jax.jit
    def gradient(*args):
        return jax.grad(lambda *args: weights @ jax.vmap(program(kind), axes)(*args, n), (0, 1, 2))(*args)

    _, lanes = expected_lanes(loop, axes)
    wanted = [
        jnp.einsum("l,l...->l..." if axis is not None else "l,l...->...", weights, g)
        for g, axis in zip(lanes, axes, strict=False)
    ]
    assert_close(list(gradient(*args)), wanted)


def directional(program):
    return lambda w, h, xs, n: jax.jvp(lambda h: jax.grad(program, 1)(w, h, xs, n), (h,), (h + 1.0,))[1]


@ft.cache
def expected_directional():
    return for_each_lane(directional(LOOPS["scan"][1]), (0, 0, 0, 0), *LANES)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_jvp_of_vmap_of_grad(kind):
    """Forward over batched reverse, with a count for each lane."""
    actual = jax.jit(jax.vmap(directional(LOOPS["scan"][0](kind))))(*LANES)
    assert_close(actual, expected_directional())


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_batches_of_none_and_one(loop, kind, size):
    args = tuple(x[:size] for x in LANES)
    actual = jax.jit(jax.vmap(jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2))))(*args)
    if size:
        assert_close(actual, jax.tree.map(lambda x: x[:size], expected_lanes(loop, (0, 0, 0, 0))))
    else:
        assert [x.shape for x in jax.tree.leaves(actual)] == [(0,), (0, 3, 3), (0, 3), (0, BOUND, 3)]
