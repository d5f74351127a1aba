"""Bodies and functions with rules of JAX's own: high-level equations, linear solves, batches by a custom rule."""

from functools import cache

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

GRID = jnp.array([0.0, 0.4, 0.9, 1.7, 3.0])
ROOTS = jnp.sqrt(GRID)
INDEX = jnp.array([3, 1, 1, 0])
LANES = np.array([[0.3, 1.1, 0.8, 1.9], [0.5, 1.3, 0.1, 1.6], [1.2, 0.2, 0.6, 1.45]])
COUNTS = np.array([0, 2, 1])
BOUND = 3


def large(x):
    return x > 0.7


def at(x, indices):
    """The sum of what stands there: a number that has a derivative."""
    return x[indices].sum() * jnp.ones(4)


def counts(x):
    return x.astype(jnp.float64) / 7.0


def chosen(x, **options):
    """A choice by probabilities that depend on the carry, which has no derivative itself."""
    key = jax.random.wrap_key_data(jnp.array([3, 5], jnp.uint32))
    return at(x, jax.random.choice(key, 4, (2,), p=jax.lax.stop_gradient(x / x.sum()), **options))


FUNCTIONS = {
    # Those that search.
    "interp": lambda x: jnp.interp(x, GRID, ROOTS),
    "searchsorted": lambda x: ROOTS[jnp.searchsorted(GRID, x)] * x,
    "choice": chosen,
    "expm": lambda x: jax.scipy.linalg.expm(jnp.outer(x, x) / 9.0)[0],
    # Those that collect the places of what is not zero.
    "nonzero": lambda x: at(x, jnp.nonzero(large(x), size=2, fill_value=0)[0]),
    "where": lambda x: at(x, jnp.where(large(x), size=3, fill_value=1)[0]),
    "unique": lambda x: x[jnp.unique(x, return_inverse=True, size=4)[1]],
    "repeat": lambda x: jnp.repeat(x, INDEX, total_repeat_length=4),
    # Those that take numbers apart.
    "ldexp": lambda x: jnp.ldexp(x, INDEX - 2),
    "frexp": lambda x: x * counts(jnp.frexp(jax.lax.stop_gradient(x))[1]),
}
EACH_RULE = ["interp", "nonzero", "ldexp", "frexp"]
REST = [name for name in FUNCTIONS if name not in EACH_RULE]
FUNCTIONS["every rule"] = lambda x: sum((FUNCTIONS[name](x) for name in EACH_RULE), jnp.zeros(4)) / 3.0


def step(name):
    return lambda x: 0.3 * x + 0.4 * jnp.abs(FUNCTIONS[name](x))


def scalar(x):
    return (x * jnp.arange(1.0, 5.0)).sum()


def loop(name, **options):
    return lambda x, n: scalar(lx.fori_loop(0, n, lambda _, x: step(name)(x), x, max_steps=BOUND, **options))


def expected(name):
    """All steps that any lane takes; a lane of fewer has the value after them."""

    def with_all(x, n):
        def one(x, i):
            return jnp.where(i < n, step(name)(x), x), None

        return scalar(jax.lax.scan(one, x, np.arange(max(COUNTS)))[0])

    return with_all


def every_first_derivative(f):
    """Value, forward and reverse mode of a batch whose lanes take different numbers of steps."""

    def each(x, n):
        along = lambda x: f(x, n)
        return *jax.jvp(along, (x,), (jnp.cos(x),)), jax.grad(along)(x)

    return each


# Reverse mode begins with forward mode.
CASES = [(name, every_first_derivative) for name in EACH_RULE]
CASES += [pytest.param(name, jax.value_and_grad, marks=pytest.mark.slow) for name in REST]


@pytest.mark.parametrize(("name", "derivatives"), CASES)
def test_first_derivatives(name, derivatives):
    both = [jax.vmap(derivatives(f)) for f in (loop(name), expected(name))]
    assert_close(*jax.jit(lambda *lanes: [f(*lanes) for f in both])(LANES, COUNTS))


def every_second_derivative(f):
    return lambda x, n: (
        jax.grad(jax.checkpoint(lambda x: f(x, n)))(x),
        jax.hessian(f)(x, n),
        jax.jacrev(jax.grad(f))(x, n),
    )


@cache
def expected_second_derivatives():
    f = expected("every rule")

    def each(x, n):
        hessian = jax.hessian(f)(x, n)
        return jax.grad(f)(x, n), hessian, hessian

    return jax.jit(jax.vmap(each))(LANES, COUNTS)


FAST = (KINDS[3],)
EACH_KIND = [pytest.param(kind, marks=[pytest.mark.slow] if kind not in FAST else []) for kind in KINDS]


@pytest.mark.parametrize("kind", EACH_KIND, ids=name_of)
def test_second_derivatives(kind):
    f = loop("every rule", kind=kind, lanes="compact")
    actual = jax.jit(jax.vmap(every_second_derivative(f)))(LANES, COUNTS)
    assert_close(actual, expected_second_derivatives())


# ---- functions that JAX hands to rules


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
