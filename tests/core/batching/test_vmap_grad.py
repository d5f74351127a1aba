"""`vmap` of gradients and gradients of `vmap`, with any operands batched and a count for each lane."""

import functools as ft

import jax
import numpy as np
import pytest

from tests.support.problem import BOUND, KINDS, LOOPS, XS, H, W, name_of
from tests.support.reference import assert_close, for_each_lane

COUNTS = np.array([3, 0, BOUND])
SHARED = (*map(np.asarray, (W, H, XS)), np.int32(7))
LANES = (*(np.stack([x, x * factor, -x]) for x, factor in zip(SHARED[:3], (0.5, 2, 2), strict=True)), COUNTS)

SCAN_AXES = [
    (None, 0, None, None),
    (0, None, None, None),
    (None, None, 0, None),
    (None, None, None, 0),
    (None, 0, None, 0),
    (0, 0, 0, 0),
]
NAMES = ["w", "h", "xs", "n"]


def cases(order):
    """Scans with each operand batched and each kind, half of them in the fast part; in the other order, the other half.

    What is batched and how the loop stops meet in no rule: of the other loops, each has all operands batched with half
    of the kinds (of which one is in the fast part), and with the other half (in the slow part) the first operand.
    """
    for place, loop in enumerate(LOOPS):
        for a, axes in enumerate(SCAN_AXES if loop == "scan" else [(0, 0, 0, 0), (0, None, None, None)]):
            for k, kind in enumerate(KINDS):
                first = (a + k) % 2 == order
                if first or loop == "scan":
                    slow = not first if loop == "scan" else a == 1 or k // 2 != place % 2
                    batched = [name for name, axis in zip(NAMES, axes, strict=True) if axis is not None]
                    identity = f"{loop}-{'_'.join(batched)}-{name_of(kind)}"
                    yield pytest.param(loop, axes, kind, marks=pytest.mark.slow if slow else (), id=identity)


def arguments(axes):
    return tuple(lane if axis is not None else one for lane, one, axis in zip(LANES, SHARED, axes, strict=True))


@ft.cache
def expected_lanes(loop, axes):
    """Values and gradients, the same for all kinds and both orders of `vmap` and `grad`."""
    return for_each_lane(jax.value_and_grad(LOOPS[loop][1], (0, 1, 2)), axes, *arguments(axes))


@pytest.mark.parametrize(("loop", "axes", "kind"), list(cases(0)))
def test_vmap_of_grad(loop, axes, kind):
    gradient = jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2))
    assert_close(jax.jit(jax.vmap(gradient, axes))(*arguments(axes)), expected_lanes(loop, axes))


@pytest.mark.parametrize(("loop", "axes", "kind"), list(cases(1)))
def test_grad_of_vmap(loop, axes, kind):
    program, _ = LOOPS[loop]
    *args, n = arguments(axes)
    weights = np.array([1.0, 2.0, 3.0])

    @jax.jit
    def gradient(*args):
        return jax.grad(lambda *args: weights @ jax.vmap(program(kind), axes)(*args, n), (0, 1, 2))(*args)

    _, lanes = expected_lanes(loop, axes)
    wanted = [
        np.einsum("l,l...->l..." if axis is not None else "l,l...->...", weights, g)
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
@pytest.mark.parametrize(("loop", "kind"), list(zip(["scan", "while"] * 2, KINDS, strict=True)), ids=name_of)
def test_batches_of_none_and_one(loop, kind, size):
    args = tuple(x[:size] for x in LANES)
    actual = jax.jit(jax.vmap(jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2))))(*args)
    if size:
        assert_close(actual, jax.tree.map(lambda x: np.asarray(x)[:size], expected_lanes(loop, (0, 0, 0, 0))))
    else:
        assert [x.shape for x in jax.tree.leaves(actual)] == [(0,), (0, 3, 3), (0, 3), (0, BOUND, 3)]
