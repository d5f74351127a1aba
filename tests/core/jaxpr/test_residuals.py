"""Residuals that are literals: numbers that a body's known part returns, where others return a variable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.jaxpr.cost import without_recomputed
from loopax._src.jax_internals import Literal, jaxpr_as_fun
from tests.support.reference import assert_close

INNER, STEPS, X = 3, 4, 1.3


def known_part():
    """Of an input x: a literal, x + 1, and twice that."""

    def function(x):
        y = x + 1
        return 2.0, y, 2 * y

    closed = jax.make_jaxpr(function)(np.ones(4))
    assert isinstance(closed.jaxpr.outvars[0], Literal)
    return closed


@pytest.mark.parametrize(("given", "left"), [([], [1]), ([0], [])])
def test_a_literal_is_never_stored(given, left):
    found, recompute = without_recomputed(known_part(), given, [0, 1, 2], [])
    assert found == left
    x = np.arange(4.0)
    assert recompute is not None
    again = jaxpr_as_fun(recompute)(*[x for _ in given], *[x + 1 for _ in left])
    assert_close(dict(zip([p for p in (0, 1, 2) if p not in left], again, strict=True))[0], 2.0)


def sines(inner, x):
    """A step with a loop in it, and a choice that is made when it is traced."""
    return jnp.where(True, inner(lambda c, _: (jnp.sin(c), None), x, None, INNER)[0], 0.0)


def of_while(kind, inner, x):
    body = lambda c: (c[0] + 1, sines(inner, c[1]))
    return lx.while_loop(lambda c: c[0] < STEPS, body, (0, x), kind=kind)[1]


def of_fori(kind, inner, x):
    return lx.fori_loop(0, STEPS, lambda i, c: sines(inner, c), x, kind=kind)


def of_scan(kind, inner, x):
    return lx.scan(lambda c, _: (sines(inner, c), None), x, None, STEPS, kind=kind)[0]


def expected(x):
    for _ in range(INNER * STEPS):
        x = jnp.sin(x)
    return x


LOOPS = [of_while, of_fori, of_scan]
KINDS = [lx.Checkpointed(3), lx.Checkpointed(), lx.Auto()]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_gradients_of_steps_with_constants(loop, kind):
    f = lambda x: loop(kind, lax.scan, x)
    assert_close(jax.grad(f)(X), jax.grad(expected)(X))
