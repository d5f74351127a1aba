"""A kind of a user's own that gives loops another derivative than that of their steps, by public names alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

import loopax as lx
from loopax import kinds
from tests.support.reference import assert_close


@dataclass(frozen=True)
class OneMoreStep(lx.Kind):
    """The derivative of one more step from the last carry, which is held: a phantom gradient."""

    derivative = "another"

    def plan(self, loop: kinds.LoopFacts) -> kinds.Plan:
        return kinds.NoReverseMode(AssertionError, "the steps of the loop are not differentiated")

    def run(self, call: kinds.LoopCall) -> kinds.Outcome:
        out = call.at(lax.stop_gradient(call.operands)).run()
        more = call.step(out.num_steps, lax.stop_gradient(out.carry)).carry
        with_slope = lambda c, m: c + (m - lax.stop_gradient(m)) if jnp.issubdtype(c.dtype, jnp.floating) else c
        return out._replace(carry=[with_slope(*pair) for pair in zip(out.carry, more, strict=True)])


def step(a: Array, x: Array) -> Array:
    return 0.5 * jnp.cos(a * x)


def settled(c: Any) -> Array:
    return (c[1] < 80) & (abs(c[0] - c[2]) > 1e-12).any()


def while_loop(a: Array, kind: Any, **options: Any) -> Array:
    body = lambda c: (step(a, c[0]), c[1] + 1, c[0])
    return lx.while_loop(settled, body, (jnp.ones_like(a), 0, jnp.zeros_like(a)), kind=kind, **options)[0]


def fori_loop(a: Array, kind: Any, **options: Any) -> Array:
    return lx.fori_loop(0, 80, lambda i, x: step(a, x), jnp.ones_like(a), kind=kind, **options)


def wanted(loop: Any) -> Callable[[Array], Array]:
    def value(a: Array) -> Array:
        before = lax.stop_gradient(loop(lax.stop_gradient(a), "lax"))
        return step(a, before)

    return value


LOOPS = {"while_loop": while_loop, "fori_loop": fori_loop}
A = jnp.array([0.3, 0.9, 1.7])


@pytest.mark.parametrize("loop", ["fori_loop", pytest.param("while_loop", marks=pytest.mark.slow)])
def test_every_mode_has_that_derivative(loop: str) -> None:
    with jax.enable_x64(True):
        a = A.astype(jnp.float64)
        run, other = LOOPS[loop], wanted(LOOPS[loop])
        found = lambda a: run(a, OneMoreStep())
        assert_close(found(a), other(a))
        for transform in (jax.jacfwd, jax.jacrev):
            assert_close(transform(found)(a), transform(other)(a))
            assert_close(jax.jit(jax.jacfwd(transform(found)))(a), jax.jacfwd(transform(other))(a))
        assert_close(jax.vmap(jax.grad(found))(a), jnp.diag(jax.jacrev(other)(a)))
        assert_close(jax.jacrev(jax.vmap(found))(a), jax.jacrev(other)(a))


def test_inside_another_loop_and_in_compact_lanes() -> None:
    def outer(a: Array, kind: Any) -> Array:
        return lx.fori_loop(0, 2, lambda i, a: a + while_loop(a, kind, lanes="compact"), a, kind="bounded").sum()

    found = jax.grad(lambda a: outer(a, OneMoreStep()))(A)
    by_python = lambda a: (first := a + wanted(while_loop)(a)) + wanted(while_loop)(first)
    assert_close(found, jax.grad(lambda a: by_python(a).sum())(A))
