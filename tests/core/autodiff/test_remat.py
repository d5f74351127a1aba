"""`jax.checkpoint` around loops, inside their bodies, with and without a policy."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.problem import KINDS, LOOPS, XS, H, W, expected_gradient, expected_hessian, name_of
from tests.support.reference import assert_close

POLICIES = [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable]


@pytest.mark.parametrize("policy", POLICIES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", ["scan", "reverse_stop", "while"])
def test_gradient(loop, kind, policy):
    f = jax.checkpoint(LOOPS[loop][0](kind), policy=policy)
    actual = jax.jit(jax.grad(f, (0, 1, 2)))(W, H, XS, jnp.int32(6))
    assert_close(actual, expected_gradient(loop, 6)[1])


@pytest.mark.parametrize("order", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_hessian(kind, order):
    f = jax.checkpoint(lambda h: LOOPS["scan"][0](kind)(W, h, XS, jnp.int32(6)))
    hessian = jax.hessian(f) if order == "forward over reverse" else jax.jacrev(jax.jacrev(f))
    assert_close(jax.jit(hessian)(H), expected_hessian("scan", 6))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradient_of_a_checkpointed_gradient(kind):
    """The reverse sweep itself under `jax.checkpoint`."""
    program, expected = LOOPS["scan"]
    inner = jax.checkpoint(lambda h: jax.grad(lambda h: program(kind)(W, h, XS, jnp.int32(6)))(h) @ jnp.cos(h))
    plain = lambda h: jax.grad(lambda h: expected(W, h, XS, 6))(h) @ jnp.cos(h)
    assert_close(jax.jit(jax.grad(inner))(H), jax.grad(plain)(H))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_checkpointed_body(kind):
    body = jax.checkpoint(lambda i, h: jnp.sin(W @ h))
    f = lambda h: lx.fori_loop(0, 6, body, h, kind=kind).sum()
    plain = lambda h: jax.lax.fori_loop(0, 6, lambda i, h: jnp.sin(W @ h), h).sum()
    assert_close(jax.jit(jax.grad(f))(H), jax.grad(plain)(H))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_vmap_of_checkpoint(kind):
    program, expected = LOOPS["while"]
    counts = jnp.array([2, 0, 9])
    f = jax.checkpoint(lambda h, n: program(kind)(W, h, XS, n))
    wanted = jnp.stack([jax.grad(lambda h, n=n: expected(W, h, XS, n))(H) for n in counts])
    assert_close(jax.jit(jax.vmap(jax.grad(f), (None, 0)))(H, counts), wanted)
