"""Bodies that call functions of JAX which are equations with rules of their own.

From JAX 0.12 on, `jnp.searchsorted`, one-argument `jnp.where`, `jnp.frexp`, `jnp.ldexp` and all that calls them are
such equations ("high-level"): JAX lowers them when it compiles. Before, they are made of ordinary equations.
"""

from functools import cache

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

GRID = jnp.array([0.0, 0.4, 0.9, 1.7, 3.0])
ROOTS = jnp.sqrt(GRID)
INDEX = jnp.array([3, 1, 1, 0])
LANES = np.array([[0.3, 1.1, 0.8, 1.9], [0.5, 1.3, 0.1, 1.6], [1.2, 0.2, 0.6, 1.45]])
COUNTS = np.array([0, 2, 1])
BOUND = 3


def large(x):
    return x > 0.7


def at(x, indices):
    """The sum of what stands there: a number that has a derivative."""
    return x[indices].sum() * jnp.ones(4)


def counts(x):
    return x.astype(jnp.float64) / 7.0


def chosen(x, **options):
    """A choice by probabilities that depend on the carry, which has no derivative itself."""
    key = jax.random.wrap_key_data(jnp.array([3, 5], jnp.uint32))
    return at(x, jax.random.choice(key, 4, (2,), p=jax.lax.stop_gradient(x / x.sum()), **options))


FUNCTIONS = {
    # Those that search.
    "interp": lambda x: jnp.interp(x, GRID, ROOTS),
    "searchsorted": lambda x: ROOTS[jnp.searchsorted(GRID, x)] * x,
    "choice": chosen,
    "expm": lambda x: jax.scipy.linalg.expm(jnp.outer(x, x) / 9.0)[0],
    # Those that collect the places of what is not zero.
    "nonzero": lambda x: at(x, jnp.nonzero(large(x), size=2, fill_value=0)[0]),
    "where": lambda x: at(x, jnp.where(large(x), size=3, fill_value=1)[0]),
    "unique": lambda x: x[jnp.unique(x, return_inverse=True, size=4)[1]],
    "repeat": lambda x: jnp.repeat(x, INDEX, total_repeat_length=4),
    # Those that take numbers apart.
    "ldexp": lambda x: jnp.ldexp(x, INDEX - 2),
    "frexp": lambda x: x * counts(jnp.frexp(jax.lax.stop_gradient(x))[1]),
}
EACH_RULE = ["interp", "nonzero", "ldexp", "frexp"]
REST = [name for name in FUNCTIONS if name not in EACH_RULE]
FUNCTIONS["every rule"] = lambda x: sum((FUNCTIONS[name](x) for name in EACH_RULE), jnp.zeros(4)) / 3.0


def step(name):
    return lambda x: 0.3 * x + 0.4 * jnp.abs(FUNCTIONS[name](x))


def scalar(x):
    return (x * jnp.arange(1.0, 5.0)).sum()


def loop(name, **options):
    return lambda x, n: scalar(lx.fori_loop(0, n, lambda _, x: step(name)(x), x, max_steps=BOUND, **options))


def expected(name):
    """All steps that any lane takes; a lane of fewer has the value after them."""

    def with_all(x, n):
        def one(x, i):
            return jnp.where(i < n, step(name)(x), x), None

        return scalar(jax.lax.scan(one, x, np.arange(max(COUNTS)))[0])

    return with_all


def every_first_derivative(f):
    """Value, forward and reverse mode of a batch whose lanes take different numbers of steps."""

    def each(x, n):
        along = lambda x: f(x, n)
        return *jax.jvp(along, (x,), (jnp.cos(x),)), jax.grad(along)(x)

    return each


# Reverse mode begins with forward mode.
CASES = [(name, every_first_derivative) for name in EACH_RULE]
CASES += [pytest.param(name, jax.value_and_grad, marks=pytest.mark.slow) for name in REST]


@pytest.mark.parametrize(("name", "derivatives"), CASES)
def test_first_derivatives(name, derivatives):
    both = [jax.vmap(derivatives(f)) for f in (loop(name), expected(name))]
    assert_close(*jax.jit(lambda *lanes: [f(*lanes) for f in both])(LANES, COUNTS))


def every_second_derivative(f):
    return lambda x, n: (
        jax.grad(jax.checkpoint(lambda x: f(x, n)))(x),
        jax.hessian(f)(x, n),
        jax.jacrev(jax.grad(f))(x, n),
    )


@cache
def expected_second_derivatives():
    f = expected("every rule")

    def each(x, n):
        hessian = jax.hessian(f)(x, n)
        return jax.grad(f)(x, n), hessian, hessian

    return jax.jit(jax.vmap(each))(LANES, COUNTS)


FAST = (KINDS[3],)
EACH_KIND = [pytest.param(kind, marks=[pytest.mark.slow] if kind not in FAST else []) for kind in KINDS]


@pytest.mark.parametrize("kind", EACH_KIND, ids=name_of)
def test_second_derivatives(kind):
    f = loop("every rule", kind=kind, lanes="compact")
    actual = jax.jit(jax.vmap(every_second_derivative(f)))(LANES, COUNTS)
    assert_close(actual, expected_second_derivatives())
