"""`jax.linearize`, and every transformation of its result; `jax.linear_transpose`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.derivatives import XS, H, W, derivatives
from tests.support.problem import KINDS, LOOPS, WITH_LAX, name_of
from tests.support.reference import assert_close
from tests.support.slow import each_kind

N = np.int32(6)
ARGS = (W, H, XS)
DOTS = (W * 0.2, H + 1.0, XS - 0.5)
CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS


def of_everything(kind):
    program = LOOPS["scan"][0](kind)
    return lambda w, h, xs: program(w, h, xs, N)


def of_start(kind):
    return lambda h: of_everything(kind)(W, h, XS)


def expected():
    return derivatives("scan", N)


def scaled(scale, tree):
    return jax.tree.map(lambda x: scale * x, tree)


def stacked(*trees):
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


@pytest.mark.parametrize("kind", [*each_kind(CHECKPOINTED), WITH_LAX[-1]], ids=name_of)
def test_the_linear_function(kind):
    """As it is, compiled, in a batch, and in agreement with `jax.jvp`, which runs apart."""
    f = of_everything(kind)
    value, linear = jax.linearize(f, *ARGS)
    wanted = expected().along(*DOTS)
    assert_close(value, expected().value)
    assert_close(linear(*DOTS), wanted)

    @jax.jit
    def transformed(linear, *dots):
        return linear(*dots), jax.vmap(linear)(*stacked_in_jit(dots)), jax.jvp(f, ARGS, dots)[1]

    assert_close(transformed(linear, *DOTS), (wanted, np.stack([wanted, 2 * wanted]), wanted))


def stacked_in_jit(dots):
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x]), dots)


@pytest.mark.parametrize("kind", each_kind(SLOTS, RESIDUALS), ids=name_of)
def test_its_transpose(kind):
    @jax.jit
    def transposed(*args):
        _, linear = jax.linearize(of_everything(kind), *args)
        batch = jax.linear_transpose(jax.vmap(linear), *stacked_in_jit(args))
        return jax.linear_transpose(linear, *args)(1.0), batch(jnp.array([1.0, 0.0]))

    wanted = expected().gradient
    assert_close(transposed(*ARGS), (wanted, stacked(wanted, scaled(0.0, wanted))))


@pytest.mark.parametrize("kind", each_kind(RESIDUALS)[::3], ids=name_of)
def test_its_transpose_without_jit(kind):
    _, linear = jax.linearize(of_everything(kind), *ARGS)
    assert_close(jax.linear_transpose(linear, *ARGS)(np.float64(1.0)), expected().gradient)


@pytest.mark.parametrize("kind", each_kind(CHECKPOINTED, RESIDUALS), ids=name_of)
def test_linearize_inside_jit_and_grad(kind):
    directional = lambda h: jax.linearize(of_start(kind), h)[1](jnp.cos(h))
    together = lambda h: (directional(h), jax.grad(directional)(h), jax.jvp(directional, (h,), (h,))[1])
    gradient, hessian = expected().of_start, expected().hessian
    slope = hessian @ np.cos(H) - gradient * np.sin(H)
    assert_close(jax.jit(together)(H), (gradient @ np.cos(H), slope, slope @ H))


@pytest.mark.parametrize("kind", each_kind(SLOTS, BOUNDED), ids=name_of)
def test_linearize_of_a_gradient(kind):
    @jax.jit
    def linearized(h):
        _, linear = jax.linearize(jax.grad(of_start(kind)), h)
        return linear(h), jax.linear_transpose(linear, h)(h)[0], jax.vmap(linear)(jnp.eye(3))

    hessian = expected().hessian
    assert_close(linearized(H), (hessian @ H, hessian.T @ H, hessian))


@pytest.mark.parametrize("kind", each_kind()[1:3], ids=name_of)
def test_linearize_of_a_gradient_without_jit(kind):
    _, linear = jax.linearize(jax.grad(of_start(kind)), H)
    assert_close(linear(H), expected().hessian @ H)


@pytest.mark.parametrize("kind", each_kind(CHECKPOINTED, BOUNDED), ids=name_of)
def test_vjp_functions(kind):
    """Made without `jit`, and called in it."""
    _, pullback = jax.vjp(of_everything(kind), *ARGS)
    wanted = expected().gradient
    both = jax.jit(lambda pullback, ones: (pullback(ones[0]), jax.vmap(pullback)(ones)))
    assert_close(both(pullback, np.array([1.0, 2.0])), (wanted, stacked(wanted, scaled(2.0, wanted))))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_transpose_of_a_linear_loop(kind):
    f = lambda h: lx.fori_loop(0, 4, lambda i, h: W @ h, h, kind=kind)
    assert_close(jax.linear_transpose(f, H)(H)[0], np.linalg.matrix_power(W, 4).T @ H)
