"""Loops in functions that JAX hands to rules of its own: linear solves, roots, closures, batches by a custom rule."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import name_of
from tests.support.reference import assert_close

MATRIX = np.array([[4.0, 1.0, 0.0], [1.0, 5.0, 0.5], [0.0, 0.5, 6.0]])
RIGHT = np.array([1.0, 2.0, 3.0])
DIAGONAL = np.diag(MATRIX)
STEPS = 40  # enough for the solves to converge
AUTO, CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = (
    lx.Auto(),
    lx.Checkpointed(),
    lx.Checkpointed(3),
    lx.Bounded(),
    lx.Residuals(),
)


def per_kind(*fast, slow):
    """The rules are those of JAX, the same for all kinds."""
    kinds = [*fast, pytest.param(slow, marks=pytest.mark.slow)]
    return pytest.mark.parametrize("kind", kinds, ids=name_of)


def every_derivative(f, *args):
    """Value, both modes, the Hessian, and a batch of gradients, all by the last argument."""
    *fixed, x = args
    of_x = lambda x: f(*fixed, x)
    loss = lambda x: (of_x(x) ** 2).sum()
    batch = jnp.stack([x, 1.5 * x])
    return (
        of_x(x),
        jax.jvp(of_x, (x,), (x,))[1],
        jax.grad(loss)(x),
        jax.hessian(loss)(x),
        jax.vmap(jax.grad(loss))(batch),
    )


def product(matrix, kind):
    """A matrix times a vector, as a loop over rows."""
    return lambda v: lx.scan(lambda c, row: (c, (row * v).sum()), 0.0, matrix, kind=kind)[1]


def jacobi(kind):
    """A linear solver with a loop that asks after every step."""

    def solve(matvec, right):
        step = lambda c: (c[0] + (right - matvec(c[0])) / DIAGONAL, c[1] + 1)
        return lx.while_loop(lambda c: c[1] < STEPS, step, (jnp.zeros(3), 0), max_steps=STEPS + 1, kind=kind)[0]

    return solve


by_matrix = jax.grad(lambda solve, matrix: solve(matrix, RIGHT).sum(), 1)


def every_derivative_of_a_solve(solve):
    return jax.jit(lambda: (every_derivative(solve, MATRIX, RIGHT), by_matrix(solve, MATRIX)))()


@cache
def expected_of_a_solve():
    return every_derivative_of_a_solve(jnp.linalg.solve)


def check_linear_solve(symmetric, kind):
    solver = jacobi(kind)

    def solve(matrix, right):
        other = None if symmetric else solver
        return jax.lax.custom_linear_solve(product(matrix, kind), right, solver, other, symmetric)

    assert_close(every_derivative_of_a_solve(solve), expected_of_a_solve())


@per_kind(CHECKPOINTED, slow=BOUNDED)
def test_custom_linear_solve(kind):
    check_linear_solve(False, kind)


def sines(x, w, steps):
    for _ in range(steps):
        x = jnp.sin(w * x)
    return x


@per_kind(BOUNDED, slow=AUTO)
def test_custom_vmap(kind):
    """A rule with a loop of its own, in the body of another loop too."""

    def loop(x, n):
        return lx.fori_loop(0, n, lambda _, y: jnp.sin(0.7 * y), x, max_steps=3, kind=kind)

    @jax.custom_batching.custom_vmap
    def call(x, n):
        return loop(x, n)

    @call.def_vmap
    def _(size, batched, x, n):
        xs, ns = (a if is_batched else jnp.full(size, a) for a, is_batched in zip((x, n), batched, strict=True))
        return lx.lanes_map(lambda x_n: loop(*x_n), (xs, ns), num_lanes=2), True

    along = lambda f, x: jax.jvp(f, (x,), (x,))[1]
    # JAX wants both mapped: else it adds an axis, whatever the rule does.
    tangents = lambda x, n: along(lambda x: call(x, 3), x)
    in_body = lambda x, n: lx.fori_loop(0, n, lambda _, y: call(y, 1), x, max_steps=3, kind=kind)
    xs, ns = np.array([0.7, 0.8, 0.9]), np.array([1, 3, 0])

    def together(xs, ns):
        expected = jnp.stack([sines(x, 0.7, n) for x, n in zip(xs, (1, 3, 0), strict=True)])
        wanted = expected, expected, along(lambda x: sines(x, 0.7, 3), xs)
        return tuple(jax.vmap(f)(xs, ns) for f in (call, in_body, tangents)), wanted

    assert_close(*jax.jit(together)(xs, ns))
