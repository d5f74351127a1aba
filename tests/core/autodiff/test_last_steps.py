"""A gradient that stores residuals of the last steps on the way forward: a loop made of two."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax._src.core.ir.linear_loop import linear_loop_p
from tests.core.lowering.test_memory import STATE, WEIGHTS
from tests.support.reference import assert_close

FEW, MANY = lx.Checkpointed(9), lx.Checkpointed(15)
OTHER = lx.Bounded()
XS = jnp.sin(jnp.arange(20.0 * 64).reshape(20, 64))


def program(kind, reverse=False):
    """A scan whose rows of outputs come from both loops; the carry has a counter."""

    def run(h, weights, xs):
        def step(carry, x):
            h, count = carry
            h = jnp.tanh(weights @ h + x) * (1.0 + 0.01 * count)
            return (h, count + 1), (h * x, count)

        (h, _), (ys, _) = lx.scan(step, (h, 0), xs, kind=kind, reverse=reverse)
        return (h**2).sum() + (ys**3).sum()

    return run


def gradient(kind, reverse):
    return jax.jit(jax.value_and_grad(program(kind, reverse), (0, 1, 2)))(STATE, WEIGHTS, XS)


expected_gradient = ft.cache(ft.partial(gradient, OTHER))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [FEW, MANY, lx.Checkpointed(20)], ids=repr)
def test_gradients(kind, reverse):
    assert_close(gradient(kind, reverse), expected_gradient(reverse))


def test_the_second_loop_has_the_indices_of_its_steps():
    loop = lambda kind: lambda h: lx.fori_loop(0, 20, lambda i, h: jnp.tanh(WEIGHTS @ h + 0.1 * i), h, kind=kind).sum()
    assert_close(*(jax.jit(jax.value_and_grad(loop(kind)))(STATE) for kind in (MANY, OTHER)))


def test_it_is_made_of_two_loops():
    linear = jax.make_jaxpr(lambda h: jax.linearize(lambda h: program(MANY)(h, WEIGHTS, XS), h)[1](h))(STATE)
    assert [eqn.params["bound"] for eqn in linear.jaxpr.eqns if eqn.primitive is linear_loop_p] == [6, 14]


@pytest.mark.parametrize(
    ("kind", "carries", "evaluations"),
    [
        (MANY, 15, 26),
        # Residuals of all steps do not fit in fewer bytes than theirs; those of some do.
        *((lx.Auto(memory=n * (STATE.nbytes + 8)), n, counted) for n, counted in ((9, 33), (15, 26), (20, 20))),
    ],
    ids=repr,
)
def test_what_is_stored_and_evaluated(kind, carries, evaluations):
    (loop,) = lx.explain(lambda h: program(kind)(h, WEIGHTS, XS), STATE).loops
    assert loop.stored is not None
    assert loop.stored.carries <= carries
    assert loop.stored.evaluations == evaluations
