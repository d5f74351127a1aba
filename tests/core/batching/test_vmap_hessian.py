"""Second derivatives inside, outside and on both sides of `vmap`; two nested `vmap`s."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import BOUND, KINDS, LOOPS, XS, H, W, name_of
from tests.support.reference import assert_close

STARTS = np.stack([H, H * 2, -H])
COUNTS = np.array([3, 0, BOUND])


def of_start(program):
    return lambda h, n: program(W, h, XS, n)


@ft.cache
def expected_hessians(expected):
    return np.stack(
        [jax.hessian(lambda h, n=n: of_start(expected)(h, n))(h) for h, n in zip(STARTS, COUNTS, strict=True)]
    )


@ft.cache
def expected_gradients(expected):
    """Of every start (rows) with every count (columns)."""
    return np.stack([np.stack([jax.grad(lambda h, n=n: of_start(expected)(h, n))(h) for n in COUNTS]) for h in STARTS])


INSIDE = {
    "forward over reverse": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
}
OUTSIDE = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
}


# Slots take long; `lowering/test_checkpoints.py` has lanes of Hessians, and Hessians of lanes, with both schedules.
WITHOUT_SLOTS = [kind for kind in KINDS if kind != lx.Checkpointed(3)]


def cases(*loops):
    """In the fast part, each loop in one of the two orders: the first with each kind, the others with one."""
    for i, loop in enumerate(loops):
        for k, kind in enumerate(WITHOUT_SLOTS):
            for o, order in enumerate(INSIDE):
                yield pytest.param(
                    loop, kind, order, marks=pytest.mark.slow if (i + k + o) % 2 or i not in (0, k) else ()
                )


@pytest.mark.parametrize(("loop", "kind", "order"), list(cases("scan", "while", "reverse_stop")), ids=name_of)
def test_vmap_of_hessian(loop, kind, order):
    program, expected = LOOPS[loop]
    actual = jax.jit(jax.vmap(INSIDE[order](of_start(program(kind)))))(STARTS, COUNTS)
    assert_close(actual, expected_hessians(expected))


@pytest.mark.parametrize(("loop", "kind", "order"), list(cases("while", "scan")), ids=name_of)
def test_hessian_of_vmap(loop, kind, order):
    program, expected = LOOPS[loop]
    summed = lambda starts: jax.vmap(of_start(program(kind)))(starts, COUNTS).sum()
    hessian = np.asarray(jax.jit(OUTSIDE[order](summed))(STARTS))
    assert_close(np.stack([hessian[i, :, i] for i in range(3)]), expected_hessians(expected))
    assert_close(hessian[0, :, 1], np.zeros((3, 3)))


# How the loop stops, and what is stored, meet in no rule of a second `vmap`.
PAIRS = [*zip(("scan", "while", "reverse_stop"), WITHOUT_SLOTS, strict=True), ("scan", WITHOUT_SLOTS[2])]


@pytest.mark.parametrize(("loop", "kind"), PAIRS, ids=name_of)
def test_two_vmaps(loop, kind):
    """Every start with every count: gradients inside, between and outside."""
    program, expected = LOOPS[loop]
    f = of_start(program(kind))
    wanted = expected_gradients(expected)

    @jax.jit
    def found(starts, counts):
        inside = jax.vmap(jax.vmap(jax.grad(f), (None, 0)), (0, None))(starts, counts)
        between = jax.vmap(jax.grad(lambda h, n: jax.vmap(f, (None, 0))(h, n).sum()), (0, None))(starts, counts)
        outside = jax.grad(lambda h: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(h, counts).sum())(starts)
        return inside, between, outside

    assert_close(found(STARTS, COUNTS), (wanted, wanted.sum(1), wanted.sum(1)))


@ft.cache
def expected_chain():
    _, expected = LOOPS["while"]

    def by_hand(h, n):
        s = jnp.ones(())
        for _ in range(2):
            s = jnp.sin(s * expected(W, h, XS, n))
        return s

    return jax.hessian(lambda h: sum(by_hand(h, n) for n in COUNTS))(H)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_forward_over_reverse_of_lanes_inside_lax_scan(kind):
    """The primal gradient stays unbatched under the `vmap` over tangents."""
    f = LOOPS["while"][0](kind)
    lane = lambda h, n: jax.lax.scan(lambda s, _: (jnp.sin(s * f(W, h, XS, n)), None), jnp.ones(()), None, length=2)[0]
    summed = lambda h: jax.vmap(lane, (None, 0))(h, COUNTS).sum()
    assert_close(jax.jit(jax.hessian(summed))(H), expected_chain())
