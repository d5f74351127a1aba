"""Derivatives of roots that users of other libraries asked for and did not get: jax#33872 and optimistix#151."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import lineax
import pytest
from jax import Array
from jax.scipy.sparse.linalg import gmres

import loopax as lx
from tests.support.reference import assert_close

A = jnp.array([[2.0, -1.0, 0.3], [0.4, 1.5, -0.2], [0.1, 0.7, 1.2]])
P = jnp.array([0.3, -0.4, 0.8])


def by_gmres(matvec: Any, b: Any) -> Any:
    return gmres(matvec, b, tol=1e-12, atol=1e-12)[0]


def root(p: Array, solver: Any) -> Array:
    """The root of y + sin y = A p, by 20 Newton steps whose systems are solved by GMRES, as in jax#33872."""
    residual = lambda y: y + jnp.sin(y) - A @ p

    def newton(state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, y = state
        slope = lambda v: jax.jvp(residual, (y,), (v,))[1]
        return i + 1, y - by_gmres(slope, residual(y))

    kind = lx.Implicit(solver, fixed_point=lambda state: (state[1], residual(state[1])), rtol=1e-9)
    return lx.while_loop(lambda s: s[0] < 20, newton, (jnp.int32(0), jnp.zeros(3)), kind=kind)[1]


def slopes(y: Array) -> Array:
    return 1 / (1 + jnp.cos(y))


@pytest.mark.parametrize("solver", [by_gmres, lineax.GMRES(rtol=1e-12, atol=1e-12)], ids=["jax", "lineax"])
def test_a_root_by_gmres(solver: Any) -> None:
    """Both modes; reverse mode of `jax.lax.custom_root` with GMRES raises NotImplementedError."""
    expected = slopes(root(P, solver))[:, None] * A
    for mode in (jax.jacfwd, jax.jacrev):
        assert_close(jax.jit(mode(lambda p: root(p, solver)))(P), expected)


ORDERS = [
    pytest.param(outer, inner, marks=[] if outer is inner is jax.jacrev else [pytest.mark.slow])
    for outer, inner in product([jax.jacfwd, jax.jacrev], repeat=2)
]


@pytest.mark.parametrize(("outer", "inner"), ORDERS)
def test_second_derivatives_of_a_root(outer: Any, inner: Any) -> None:
    """All four orders of modes: of optimistix's root_find, two failed from JAX 0.7 on."""
    solver = lineax.GMRES(rtol=1e-12, atol=1e-12)
    y = root(P, solver)
    # From y + sin y = A p: dy = slope A dp, and d slope = slope**2 sin(y) dy.
    expected = jnp.einsum("i,ij,ik->ijk", jnp.sin(y) * slopes(y) ** 3, A, A)
    assert_close(outer(inner(lambda p: root(p, solver)))(P), expected, 1e-8)


@pytest.mark.slow
def test_a_hessian_of_a_fixed_point() -> None:
    """`jax.hessian`, as in optimistix#151, of a scalar fixed point: y = cos(a y)."""

    def fixed_point(a: Any) -> Array:
        goes_on = lambda s: jnp.abs(s[0] - s[1]) > 1e-14
        kind = lx.Implicit(fixed_point=lambda s: s[0], rtol=1e-9)
        return lx.while_loop(goes_on, lambda s: (jnp.cos(a * s[0]), s[0]), (0.5, 1.0), kind=kind)[0]

    def slope(a: Any) -> Array:
        y = fixed_point(a)
        return -y * jnp.sin(a * y) / (1 + a * jnp.sin(a * y))

    assert_close(jax.grad(fixed_point)(0.9), slope(0.9), 1e-8)
    expected = (slope(0.9 + 1e-5) - slope(0.9 - 1e-5)) / 2e-5
    assert_close(jax.hessian(fixed_point)(0.9), expected, 1e-7)
