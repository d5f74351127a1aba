"""Second and third derivatives, every composition of the two modes."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

from tests.support.problem import KINDS, LOOPS, XS, H, W, expected_hessian, name_of
from tests.support.reference import assert_close

COMPOSITIONS = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


def of_start(program):
    return lambda h, n: program(W, h, XS, n)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", ["scan", "reverse_stop", "while"])
def test_hessian(loop, kind, composition):
    hessian = jax.jit(COMPOSITIONS[composition](of_start(LOOPS[loop][0](kind))))
    for n in (0, 6):
        assert_close(hessian(H, jnp.int32(n)), expected_hessian(loop, n))


@pytest.mark.parametrize("composition", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_without_jit(kind, composition):
    hessian = COMPOSITIONS[composition](of_start(LOOPS["scan"][0](kind)))
    assert_close(hessian(H, jnp.int32(6)), expected_hessian("scan", 6))


FLAT, UNRAVEL = ravel_pytree((W, H, XS[:5]))


def of_everything(program):
    return lambda v, n: program(*UNRAVEL(v), n)


@ft.cache
def expected_hessian_of_everything():
    return jax.hessian(of_everything(LOOPS["scan"][1]))(FLAT, 5)


@pytest.mark.parametrize("composition", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_hessian_of_everything(kind, composition):
    """With respect to constants, carry and rows at once."""
    hessian = jax.jit(COMPOSITIONS[composition](of_everything(LOOPS["scan"][0](kind))))
    assert_close(hessian(FLAT, jnp.int32(5)), expected_hessian_of_everything())


def third(f):
    return jax.grad(lambda h: jax.grad(lambda h: jax.grad(f)(h).sum())(h) @ h)


@ft.cache
def expected_third():
    return third(lambda h: of_start(LOOPS["scan"][1])(h, 6))(H)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_third_derivative_in_reverse(kind):
    f = of_start(LOOPS["scan"][0](kind))
    actual = jax.jit(lambda h, n: third(lambda h: f(h, n))(h))(H, jnp.int32(6))
    assert_close(actual, expected_third())
