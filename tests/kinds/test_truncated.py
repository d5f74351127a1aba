"""`Truncated` against Python loops with `jax.lax.stop_gradient`, in both modes, and what it evaluates and stores."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from loopax import Truncated
from tests.support.compiled import temporary as temporary_bytes
from tests.support.counted import counting, evaluations
from tests.support.problem import XS, H, W, mixed
from tests.support.reference import assert_close


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("transform", [jax.jit, pytest.param(jax.checkpoint, marks=pytest.mark.slow)])
def test_lanes_of_a_program_that_has_been_traced(transform: Any, reverse: bool) -> None:
    """JAX takes a rule for lanes where the function has them. There are as many lanes as rows: shapes are the same."""
    lengths, weights = jnp.array([0, 4, 1, 3]), jnp.arange(16.0).reshape(4, 4)
    step = lambda c, x: ((new := jnp.sin(c * x)), new)

    def loss(h: Array, length: Any, weights: Array) -> Array:
        return (
            lx.scan(step, h, XS[:4, 0], length=length, reverse=reverse, derivative=Truncated(last=2))[1] * weights
        ).sum()

    args = jnp.arange(1.0, 5.0), lengths, weights
    of_batch = lambda f: jax.jit(jax.grad(lambda h: jax.vmap(f)(h, *args[1:]).sum()))(args[0])
    each = jnp.stack([jax.grad(loss)(*lane) for lane in zip(*args, strict=True)])
    assert_close(of_batch(transform(loss)), each)


@pytest.mark.parametrize("options", [{"last": 3}, {"window": 4}], ids=str)
@pytest.mark.parametrize("is_static", [True, False])
def test_indices_and_keys_are_those_of_the_loop(options: dict[str, Any], is_static: bool) -> None:
    """A `fori_loop` and a reversed `scan` with keys, against scans of the numbers that they read."""
    derivative, key, n = Truncated(**options), jax.random.key(0), 9
    numbers = jnp.arange(2.0, n + 2)
    noise = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(jnp.arange(n))

    def scan(a: Array, xs: Array, reverse: bool) -> Array:
        return lx.scan(lambda h, x: (jnp.sin(a * x * h), None), 0.3, xs, derivative=derivative, reverse=reverse)[0]

    def by_index(a: Array, n: Any) -> Array:
        body = lambda i, h: jnp.sin(a * i * h)
        return lx.fori_loop(2, n + 2, body, 0.3, max_steps=9 if is_static else 12, derivative=derivative)

    def by_key(a: Array, n: Any) -> Array:
        body = lambda h, _, *, key: (jnp.sin(a * jax.random.normal(key) * h), None)
        bound = None if is_static else 12
        return lx.scan(body, 0.3, length=n, max_steps=bound, reverse=True, key=key, derivative=derivative)[0]

    length = n if is_static else jnp.int32(n)
    assert_close(jax.value_and_grad(by_index)(0.9, length), jax.value_and_grad(scan)(0.9, numbers, False))
    assert_close(jax.value_and_grad(by_key)(0.9, length), jax.value_and_grad(scan)(0.9, noise, True))


def test_while_loops_without_a_bound() -> None:
    def value(w: Array, derivative: Any) -> Array:
        body = lambda c: (jnp.tanh(w @ c[0] + 0.1), c[1] + 1)
        return mixed(lx.while_loop(lambda c: c[1] < 9, body, (H, 0), derivative=derivative)[0])

    for options in ({"last": 3}, {"window": 4}):
        kept = 3 if "last" in options else 1
        held = lx.fori_loop(0, 9 - kept, lambda i, h: jnp.tanh(W @ h + 0.1), H)

        def rest(w: Array, held: Array = held, kept: int = kept) -> Array:
            return mixed(lx.fori_loop(0, kept, lambda i, h: jnp.tanh(w @ h + 0.1), held))

        assert_close(jax.jit(jax.grad(lambda w, o=options: value(w, Truncated(**o))))(W), jax.grad(rest)(W))


class TestCosts:
    @pytest.mark.parametrize(("is_static", "expected"), [(True, 20), (False, 20 + 5)])
    def test_steps_are_evaluated(self, is_static: bool, expected: int) -> None:
        """The last five once more where the length is known only when the loop runs."""

        def gradient(count: Callable[[], None], n: Any) -> Any:
            def body(h: Array, x: Array) -> Any:
                return jnp.tanh(W @ counting(count, h) + x), None

            xs = jnp.zeros((20, 3))
            return jax.grad(lambda h: lx.scan(body, h, xs, length=n, derivative=Truncated(last=5))[0].sum())(H)

        assert evaluations(gradient, None if is_static else jnp.int32(20)) == expected

    @pytest.mark.parametrize("is_static", [True, False])
    def test_memory_is_that_of_the_last_steps(self, is_static: bool) -> None:
        def temporary(rows: int) -> int:
            def loss(w: Array, h: Array, n: Any) -> Array:
                body = lambda i, h: jnp.tanh(w @ h)
                return lx.fori_loop(
                    0, rows if is_static else n, body, h, max_steps=rows, derivative=Truncated(last=5)
                ).sum()

            args = jnp.eye(64), jnp.ones(64), jnp.int32(rows)
            return temporary_bytes(jax.jit(jax.grad(loss)).lower(*args).compile())

        assert temporary(10_000) <= temporary(100) + 64


@pytest.mark.parametrize("derivative", [lx.Truncated(last=2), lx.Implicit()])
def test_a_gradient_of_a_batch_whose_body_calls_a_custom_vjp(derivative: lx.Derivative) -> None:
    """JAX has no batch of such a derivative; alone there is one."""
    sine: Any = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct,))
    loop = lambda function, x, n: lx.fori_loop(0, 40 + n, lambda i, c: 0.5 * function(c) + x, x, derivative=derivative)
    assert_close(*(jax.jit(jax.grad(partial(loop, f)))(0.3, 3) for f in (sine, jnp.sin)))
    counts = jnp.array([1, 3])
    total = lambda function: jax.grad(lambda x: jax.vmap(partial(loop, function), (None, 0))(x, counts).sum())
    assert jnp.isfinite(total(jnp.sin)(0.3))
    with pytest.raises(TypeError, match="custom_vjp function") as raised:
        total(sine)(0.3)
    assert "Give the function a jax.custom_jvp" in raised.value.__notes__[0]
