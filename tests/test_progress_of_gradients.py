"""Gradients report their forward pass, and inner loops are not reported again."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.progress_recorder import KINDS, both, expected, once, powers, recorder, same

__all__ = ["recorder"]  # a fixture


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_shows_the_forward_pass(recorder, kind):
    options = {"kind": KINDS[kind], "max_steps": 64}
    same(both(lambda progress: jax.grad(powers(35, progress, **options)), 0.7))
    once(recorder, 35)


def test_gradient_without_a_bound(recorder):
    def f(x, progress):
        keep = lambda c: c[0] < 35
        return lx.while_loop(keep, lambda c: (c[0] + 1, jnp.sin(c[1] * x)), (0, x), progress=progress)[1]

    same(both(lambda progress: jax.grad(lambda x: f(x, progress)), 0.7))
    once(recorder, 35, -1)


@pytest.mark.parametrize("transform", [jax.hessian, jax.jacfwd, jax.value_and_grad])
def test_higher_derivatives(recorder, transform):
    same(both(lambda progress: transform(powers(25, progress)), 0.7))
    once(recorder, 25)


def test_jax_checkpoint(recorder):
    same(both(lambda progress: jax.value_and_grad(jax.checkpoint(powers(25, progress))), 0.7))
    once(recorder, 25)


@pytest.mark.parametrize("transform", [lambda f: jax.grad(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))])
def test_a_forward_pass_that_nobody_needs_shows_nothing(recorder, transform):
    """Other loops evaluate the steps again, with what the derivative needs of them."""
    same(both(lambda progress: transform(powers(25, progress, kind="checkpointed")), 0.7))
    assert recorder.begun == []


def test_linearize_then_apply(recorder):
    _, derivative = jax.linearize(powers(25, True), 0.7)
    once(recorder, 25)
    derivative(1.0)
    once(recorder, 25)


# ---- loops in loops


def nested(progress, outer=4, inner=12, **options):
    def value(x):
        def step(i, c):
            return lx.fori_loop(0, inner, lambda j, c: jnp.sin(c * x), c, progress=progress)

        return lx.fori_loop(0, outer, step, x, **options)

    return value


def test_inner_loops(recorder):
    jax.block_until_ready(jax.jit(nested(True))(0.7))
    assert [end for _, end in recorder.ended] == [12] * 4
    assert recorder.steps == expected(12) * 4


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("few", "bounded")]


@pytest.mark.parametrize("kind", ["checkpointed", *SLOW, "residuals"])
def test_inner_loops_in_a_gradient_are_not_replayed(recorder, kind):
    same(both(lambda progress: jax.grad(nested(progress, kind=KINDS[kind])), 0.7))
    assert [end for _, end in recorder.ended] == [12] * 4


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x)])
def test_inner_loops_inside_something_else(recorder, wrap):
    def value(x):
        step = wrap(lambda c: lx.fori_loop(0, 12, lambda j, c: jnp.sin(c * 0.9), c, progress=True))
        return lx.fori_loop(0, 4, lambda i, c: step(c), x)

    jax.block_until_ready(jax.jit(jax.grad(value))(0.7))
    assert [end for _, end in recorder.ended] == [12] * 4
