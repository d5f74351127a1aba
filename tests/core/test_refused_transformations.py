"""Transformations of JAX that do not look into loops are refused by name, also in batches and gradients."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify, jet

import loopax as lx
from tests.support.limited_loops import raises

LANES = jnp.arange(1.0, 4.0)


def loop(x):
    return lx.fori_loop(0, 3, lambda _, y: jnp.log(y), x, max_steps=3)


def until_large(x):
    return lx.while_loop(lambda y: y < 9.0, lambda y: y * y + 1.0, x, max_steps=9, lanes="compact")


PROGRAMS = [
    (loop, 1.0),
    (jax.jit(loop), 1.0),
    (jax.grad(loop), 1.0),
    (jax.vmap(until_large), LANES),
    (jax.vmap(jax.grad(until_large)), LANES),
]


@pytest.mark.parametrize(("program", "x"), PROGRAMS)
def test_jet(program, x):
    with raises(NotImplementedError, "jax.experimental.jet has no rule for loops", "Nest jax.jvp instead"):
        jet.jet(program, (x,), ([jnp.ones_like(x), jnp.zeros_like(x)],))


@pytest.mark.parametrize(("program", "x"), PROGRAMS)
@pytest.mark.parametrize("errors", [checkify.float_checks, checkify.index_checks, checkify.all_checks])
def test_automatic_checks(program, x, errors):
    with raises(NotImplementedError, "does not look into loops", "errors=checkify.user_checks", "jax.debug_nans"):
        checkify.checkify(program, errors=errors)(x)


def checked(x):
    def body(_, y):
        checkify.check(y < 2.0, "too large")
        return y * y

    return lx.fori_loop(0, 3, body, x)


@pytest.mark.parametrize(("program", "x"), [(checked, 1.0), (jax.jit(checked), 1.0), (jax.vmap(checked), LANES)])
def test_a_check_in_a_body(program, x):
    with raises(NotImplementedError, "the body of a loop calls checkify.check", "equinox.error_if"):
        checkify.checkify(program)(x)


def test_a_check_outside_of_loops():
    def program(x):
        checkify.check(x > 2.0, "too small")
        return until_large(x)

    error, value = checkify.checkify(program)(1.0)
    assert "too small" in (error.get() or "")
    assert value == 26.0
    error, values = checkify.checkify(jax.vmap(program))(LANES + 2.0)
    assert error.get() is None
    assert values.tolist() == [10.0, 17.0, 26.0]
