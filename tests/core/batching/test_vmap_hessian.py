"""Second derivatives inside, outside and on both sides of `vmap`; two nested `vmap`s."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.problem import BOUND, KINDS, LOOPS, XS, H, W, name_of
from tests.support.reference import assert_close

STARTS = jnp.stack([H, H * 2, -H])
COUNTS = jnp.array([3, 0, BOUND])


def of_start(program):
    return lambda h, n: program(W, h, XS, n)


@ft.cache
def expected_hessians(expected):
    return jnp.stack(
        [jax.hessian(lambda h, n=n: of_start(expected)(h, n))(h) for h, n in zip(STARTS, COUNTS, strict=True)]
    )


@ft.cache
def expected_gradients(expected):
    """Of every start (rows) with every count (columns)."""
    return jnp.stack(
        [jnp.stack([jax.grad(lambda h, n=n: of_start(expected)(h, n))(h) for n in COUNTS]) for h in STARTS]
    )


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
CASES = [(loop, kind) for loop in ("scan", "while", "reverse_stop") for kind in WITHOUT_SLOTS]


@pytest.mark.parametrize("order", INSIDE)
@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_vmap_of_hessian(loop, kind, order):
    program, expected = LOOPS[loop]
    actual = jax.jit(jax.vmap(INSIDE[order](of_start(program(kind)))))(STARTS, COUNTS)
    assert_close(actual, expected_hessians(expected))


@pytest.mark.parametrize("order", OUTSIDE)
@pytest.mark.parametrize("kind", WITHOUT_SLOTS, ids=name_of)
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_hessian_of_vmap(loop, kind, order):
    program, expected = LOOPS[loop]
    summed = lambda starts: jax.vmap(of_start(program(kind)))(starts, COUNTS).sum()
    hessian = jax.jit(OUTSIDE[order](summed))(STARTS)
    assert_close(jnp.stack([hessian[i, :, i] for i in range(3)]), expected_hessians(expected))
    assert_close(hessian[0, :, 1], jnp.zeros((3, 3)))


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_two_vmaps(loop, kind):
    """Every start with every count: gradients inside, between and outside."""
    program, expected = LOOPS[loop]
    f = of_start(program(kind))
    wanted = expected_gradients(expected)
    inside = jax.vmap(jax.vmap(jax.grad(f), (None, 0)), (0, None))(STARTS, COUNTS)
    between = jax.vmap(jax.grad(lambda h, n: jax.vmap(f, (None, 0))(h, n).sum()), (0, None))(STARTS, COUNTS)
    outside = jax.grad(lambda h: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(h, COUNTS).sum())(STARTS)
    assert_close(inside, wanted)
    assert_close(between, wanted.sum(1))
    assert_close(outside, wanted.sum(1))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_forward_over_reverse_of_lanes_inside_lax_scan(kind):
    """The primal gradient stays unbatched under the `vmap` over tangents."""
    program, expected = LOOPS["while"]

    def chained(f):
        def lane(h, n):
            return jax.lax.scan(lambda s, _: (jnp.sin(s * f(W, h, XS, n)), None), jnp.ones(()), None, length=2)[0]

        return lane

    def by_hand(h, n):
        s = jnp.ones(())
        for _ in range(2):
            s = jnp.sin(s * expected(W, h, XS, n))
        return s

    summed = lambda h: jax.vmap(chained(program(kind)), (None, 0))(h, COUNTS).sum()
    assert_close(jax.jit(jax.hessian(summed))(H), jax.hessian(lambda h: sum(by_hand(h, n) for n in COUNTS))(H))
