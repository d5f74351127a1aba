"""`jax.linearize`, and every transformation of its result; `jax.linear_transpose`."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.problem import KINDS, LOOPS, WITH_LAX, XS, H, W, name_of
from tests.support.reference import assert_close

N = jnp.int32(6)
ARGS = (W, H, XS)
DOTS = (W * 0.2, H + 1.0, XS - 0.5)


def at_n(program):
    return lambda w, h, xs: program(w, h, xs, N)


EXPECTED = at_n(LOOPS["scan"][1])


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_the_linear_function(kind):
    value, linear = jax.linearize(at_n(LOOPS["scan"][0](kind)), *ARGS)
    expected_value, wanted = jax.jvp(EXPECTED, ARGS, DOTS)
    assert_close(value, expected_value)
    assert_close(linear(*DOTS), wanted)
    assert_close(jax.jit(linear)(*DOTS), wanted)
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), DOTS)
    assert_close(jax.vmap(linear)(*both), jnp.stack([wanted, 2 * wanted]))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_its_transpose(kind):
    _, linear = jax.linearize(at_n(LOOPS["scan"][0](kind)), *ARGS)
    wanted = jax.grad(EXPECTED, (0, 1, 2))(*ARGS)
    assert_close(jax.linear_transpose(linear, *ARGS)(jnp.ones(())), wanted)
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), DOTS)
    batched = jax.linear_transpose(jax.vmap(linear), *both)(jnp.array([1.0, 0.0]))
    assert_close(jax.tree.map(lambda x: x[0], batched), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_linearize_inside_jit_and_grad(kind):
    f = at_n(LOOPS["scan"][0](kind))
    directional = lambda f: lambda h: jax.linearize(lambda h: f(W, h, XS), h)[1](jnp.cos(h))
    assert_close(jax.jit(directional(f))(H), directional(EXPECTED)(H))
    assert_close(jax.grad(directional(f))(H), jax.grad(directional(EXPECTED))(H))
    assert_close(jax.jvp(directional(f), (H,), (H,)), jax.jvp(directional(EXPECTED), (H,), (H,)))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_linearize_of_a_gradient(kind):
    f, n = LOOPS["scan"][0](kind), N
    _, linear = jax.linearize(jax.grad(lambda h: f(W, h, XS, n)), H)
    hessian = jax.hessian(lambda h: EXPECTED(W, h, XS))(H)
    assert_close(linear(H), hessian @ H)
    assert_close(jax.linear_transpose(linear, H)(H)[0], hessian.T @ H)
    assert_close(jax.vmap(linear)(jnp.eye(3)), hessian)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_vjp_functions(kind):
    _, pullback = jax.vjp(at_n(LOOPS["scan"][0](kind)), *ARGS)
    wanted = jax.grad(EXPECTED, (0, 1, 2))(*ARGS)
    assert_close(jax.jit(pullback)(jnp.ones(())), wanted)
    both = jax.vmap(pullback)(jnp.array([1.0, 2.0]))
    assert_close(jax.tree.map(lambda x: x[1], both), jax.tree.map(lambda x: 2 * x, wanted))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_transpose_of_a_linear_loop(kind):
    f = lambda h: lx.fori_loop(0, 4, lambda i, h: W @ h, h, kind=kind)
    assert_close(jax.linear_transpose(f, H)(H)[0], jnp.linalg.matrix_power(W, 4).T @ H)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_linear_function_agrees_with_jvp(kind):
    """For tangents of everything at once."""
    f = at_n(LOOPS["scan"][0](kind))
    dots = (W * 0.0 + 1.0, H, XS)
    _, linear = jax.linearize(f, *ARGS)
    assert_close(linear(*dots), jax.jvp(f, ARGS, dots)[1])
