"""Residuals that are literals: numbers that a body's known part returns, where others return a variable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.cost import classified, without_recomputed
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


def test_what_is_cheap_to_compute_from_a_residual_is_not_stored():
    """The second costs more to compute from the first than to store, the third does not from the second."""

    def function(x):
        y = jnp.sin(x)
        z = jnp.sin(jnp.exp(jnp.cos(y)))
        return y, z, 2 * z

    assert without_recomputed(jax.make_jaxpr(function)(np.ones(4)), [], [0, 1, 2], [])[0] == [0, 1]


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


def test_few_looks_at_a_program_with_many_residuals(monkeypatch):
    """All but one of fifty constants can be computed before the loop: that one may not end."""

    def known(row, w, x):
        endless = lax.while_loop(lambda y: y < w[0], lambda y: y + w[1], w[2])
        return [x * w[0], *(jnp.sin(w[k % 3]) * k for k in range(25)), endless, *(jnp.cos(w[0]) * k for k in range(25))]

    closed = jax.make_jaxpr(known)(jnp.int32(0), jnp.ones(3), jnp.ones(()))
    looks, dce = [], jaxi.dce
    monkeypatch.setattr(jaxi, "dce", lambda *arguments: looks.append(0) or dce(*arguments))
    residuals = classified(closed, [1, 1, 0], range(1, 52))
    assert [r.hoisted for r in residuals] == [True] * 25 + [False] + [True] * 25
    assert len(looks) < 15


@pytest.mark.parametrize("at_most_once", [False, True])
def test_residuals_that_are_numbers(at_most_once):
    closed = jax.make_jaxpr(lambda row, w, x: (x * w, 2.0, w, jnp.sin(w)))(jnp.int32(0), 3.0, 1.0)
    residuals = classified(closed, [1, 1, 0], [1, 2, 3], at_most_once)
    assert [r.hoisted for r in residuals] == [True, True, not at_most_once]
