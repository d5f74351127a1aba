"""Extended dtypes that are no PRNG keys: Flax's scales of 8-bit floats, whose cotangents add up to the largest.

Their zero is minus infinity. The references are `lax.scan`, and a Python loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.fp8_ops import fp32_max_grad
from jax import lax

import loopax as lx

KINDS = ["auto", "lax", "bounded", "residuals", "checkpointed", lx.Checkpointed(2)]
X, SCALE = jnp.array([0.3, -0.5], jnp.float32), jnp.float32(0.2)
XS, SCALES = jnp.stack([X, 2 * X, X * X]), jnp.array([0.2, -0.3, 1.0], jnp.float32)
LENGTHS = [2, 4, 0]
ROWS = jnp.arange(1.0, 5.0, dtype=jnp.float32)


def to_scale(x: Any) -> Any:
    return lax.convert_element_type(x, fp32_max_grad)


def to_number(x: Any) -> Any:
    return lax.convert_element_type(x, jnp.float32)


@jax.custom_vjp
def observed(x: Any, scale: Any) -> Any:
    """`x`; the cotangent of the scale is negative for some steps, so that a zero among them would show."""
    del scale
    return x * 1


def _observe(residuals: Any, ct: Any) -> Any:
    x, scale = residuals
    return ct, to_scale(jnp.max(ct * x) - 5 * to_number(scale))


observed.defvjp(lambda x, scale: (x * 1, (x, scale)), _observe)


def as_constant(scan: Any, **options: Any) -> Callable[..., Any]:
    step = lambda scale: lambda x, row: (jnp.sin(observed(x, scale)) * row, None)
    return lambda x, scale: scan(step(scale), x, ROWS, **options)[0].sum()


def in_carry(scan: Any, **options: Any) -> Callable[..., Any]:
    """Two scales that change places, and rows of them."""

    def step(carry: Any, row: Any) -> Any:
        x, a, b = carry
        return (jnp.sin(observed(x, a)) * row, b, a), a

    def f(x: Any, scale: Any) -> Any:
        (x, a, _), rows = scan(step, (x, scale, scale), ROWS, **options)
        return scan(lambda x, scale: (observed(x, scale), None), observed(x, a), rows, **options)[0].sum()

    return f


def traced_length(**options: Any) -> Callable[..., Any]:
    """The same twice, with the scale in the carry and without."""

    def f(x: Any, scale: Any, n: Any) -> Any:
        both = lambda _, c: (jnp.sin(observed(c[0], c[1])), c[2], c[1])
        x = lx.fori_loop(0, n, both, (x, scale, scale), max_steps=4, **options)[0]
        return lx.fori_loop(0, n, lambda _, x: jnp.sin(observed(x, scale)), x, max_steps=4, **options).sum()

    return f


def unrolled(x: Any, scale: Any, n: int) -> Any:
    for _ in range(2 * n):
        x = jnp.sin(observed(x, scale))
    return x.sum()


def slopes(f: Callable[..., Any], *arguments: Any) -> Any:
    """Gradients with respect to an array and to a scale, as numbers."""
    return jax.jit(jax.grad(lambda x, s: f(x, to_scale(s), *arguments), argnums=(0, 1)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("program", [as_constant, in_carry])
def test_gradient_in_every_kind(program: Any, kind: Any) -> None:
    found = slopes(program(lx.scan, kind=kind))(X, SCALE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, slopes(program(lax.scan))(X, SCALE))


@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential"])
@pytest.mark.parametrize("kind", ["bounded", lx.Checkpointed(2)], ids=str)
def test_lanes_and_their_gradients(kind: Any, lanes: Any) -> None:
    f, n = traced_length(kind=kind, lanes=lanes), jnp.array(LENGTHS)
    alone = [slopes(unrolled, n)(x, s) for x, s, n in zip(XS, SCALES, LENGTHS, strict=True)]
    of_x, of_scale = map(jnp.stack, zip(*alone, strict=True))
    of_scale = of_scale.at[2].set(-jnp.inf)  # no step: nothing adds up to the zero of the dtype, which JAX leaves out
    of_lanes = jax.vmap(lambda x, s, n: jax.grad(lambda x, s: f(x, to_scale(s), n), argnums=(0, 1))(x, s))
    of_batch = jax.grad(lambda x, s: jax.vmap(f)(x, to_scale(s), n).sum(), argnums=(0, 1))
    for found in (jax.jit(of_lanes)(XS, SCALES, n), jax.jit(of_batch)(XS, SCALES)):
        np.testing.assert_allclose(found[0], of_x, rtol=1e-5)
        np.testing.assert_allclose(found[1], of_scale, rtol=1e-4)


def test_rows_that_no_step_has_written_are_zeros_of_the_dtype() -> None:
    step = lambda c, row: (c, to_scale(row))
    none = [1, 2, -np.inf, -np.inf]
    for options in ({"length": 2}, {"length": jnp.array(2)}, {"stop": lambda _, y: to_number(y) > 1}):
        rows = jax.jit(lambda options=options: to_number(lx.scan(step, 0, ROWS, **options)[1]))()
        np.testing.assert_array_equal(rows, none)
