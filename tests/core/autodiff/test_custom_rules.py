"""Bodies with `custom_jvp` and `custom_vjp` functions, also with a backward function that is not linear."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.problem import KINDS, H, W, name_of
from tests.support.reference import assert_close


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


sine.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def sine_backward(x):
    return jnp.sin(x)


sine_backward.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, g: (cosine * g,))


@jax.custom_vjp
def soft_clip(x):
    """The identity, whose cotangent is squashed: as people clip gradients in recurrent networks."""
    return x


soft_clip.defvjp(lambda x: (x, x), lambda x, g: (jnp.tanh(g) * jnp.cos(x),))

FUNCTIONS = [sine, sine_backward, jax.jit(sine_backward), jax.nn.relu, lambda x: jnp.sin(soft_clip(x))]
NAMES = ["custom_jvp", "custom_vjp", "jit of custom_vjp", "relu", "not linear backward"]


def program(function, kind):
    return lambda h: lx.fori_loop(0, 6, lambda i, h: function(W @ h) + 0.5 * h, h, kind=kind)[0]


def expected(function):
    return lambda h: jax.lax.scan(lambda h, _: (function(W @ h) + 0.5 * h, None), h, None, length=6)[0][0]


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_first_derivatives(kind, function):
    f, wanted = program(function, kind), jax.grad(expected(function))
    starts = jnp.stack([H, -H])
    assert_close(jax.jit(jax.grad(f))(H), wanted(H))
    assert_close(jax.jit(jax.grad(jax.checkpoint(f)))(H), wanted(H))
    assert_close(jax.jit(jax.vmap(jax.grad(f)))(starts), jax.vmap(wanted)(starts))


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_reverse_over_reverse(kind, function):
    actual = jax.jit(jax.jacrev(jax.grad(program(function, kind))))(H)
    assert_close(actual, jax.jacrev(jax.grad(expected(function)))(H))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_forward_over_reverse_of_custom_jvp(kind):
    assert_close(jax.jit(jax.hessian(program(sine, kind)))(H), jax.hessian(expected(sine))(H))
