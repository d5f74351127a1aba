"""Loops in other people's code that have no reverse mode, and have it under `rewrite_loops`.

Gradients in both modes, and under `jax.vmap`, against forward mode of the unchanged program and finite differences.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.scipy.sparse import linalg as sparse  # the loops themselves: the public functions have rules
from jax.experimental import ode
from jax.scipy.optimize import minimize

import loopax as lx
from tests.support.reference import assert_close

MATRIX = jnp.array([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 5.0]])
RIGHT = jnp.array([1.0, -2.0, 0.5])


def rosenbrock(x, a):
    return jnp.sum(a * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def bfgs(a):
    """The Rosenbrock function's minimum does not depend on `a`, but where few iterations end does."""
    options = {"maxiter": 4}
    return minimize(rosenbrock, jnp.array([-1.2, 1.0]), (a,), method="BFGS", options=options).x.sum()


def conjugate_gradients(a):
    matvec = lambda x: a * (MATRIX @ x) + jnp.sin(a) * x
    solve: Any = sparse._cg_solve
    return solve(matvec, RIGHT, jnp.zeros(3), maxiter=3, M=lambda x: x).sum()


def gmres(a):
    b = RIGHT * a
    norm = jnp.linalg.norm(b)
    A = lambda x: MATRIX @ x + 0.1 * a * x  # noqa: N806
    start = (jnp.zeros(3), b / norm, norm, jnp.zeros(()), 2)
    return sparse._gmres_incremental(A, b, *start, lambda x: x)[0].sum()


def adaptive_steps(a):
    """An embedded Runge-Kutta method of order 5 that chooses its own steps."""
    times = jnp.array([0.0, 0.5, 2.0])
    pendulum = lambda y, _, a: jnp.stack([y[1], -a * jnp.sin(y[0])])
    found: Any = ode._odeint.fun(  # pyright: ignore[reportAttributeAccessIssue]
        pendulum, 1e-4, 1e-4, 1000, jnp.inf, jnp.array([1.0, 0.0]), times, a
    )
    return found.sum()


class Newton(NamedTuple):
    """The state of a root search."""

    x: Any
    error: Any


def newton(a):
    """A hand-written root search: x exp(x) = a."""
    step = lambda s: s.x - (s.x * jnp.exp(s.x) - a) / (jnp.exp(s.x) * (1.0 + s.x))
    body = lambda s: Newton(step(s), jnp.abs(step(s) - s.x))
    return lax.while_loop(lambda s: s.error > 1e-10, body, Newton(jnp.ones(()), jnp.ones(()))).x


FALLING_SPHERE = """
<mujoco>
  <option timestep="0.002" solver="CG" iterations="8" ls_iterations="8"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .095"><freejoint/><geom type="sphere" size=".1" mass="1"/></body>
  </worldbody>
</mujoco>
"""


def step_of_mjx(velocity):
    """With the CG solver and eight iterations: a sphere that touches the ground."""
    mujoco, mjx = pytest.importorskip("mujoco"), pytest.importorskip("mujoco.mjx")
    model = mjx.put_model(mujoco.MjModel.from_xml_string(FALLING_SPHERE))
    start = mjx.make_data(model)
    moving = start.replace(qvel=start.qvel.at[2].set(velocity).at[0].set(0.3 * velocity))
    return (mjx.step(model, moving).qvel ** 2).sum()


def transition_of_nuts(scale):
    """From BlackJAX, with respect to the target's scale: the tree of doublings is as deep as each lane needs."""
    blackjax = pytest.importorskip("blackjax")
    log_density = lambda x: -0.5 * jnp.sum(scale * x**2) - 0.1 * jnp.sum(x**4)
    kernel = blackjax.nuts(log_density, step_size=0.3, inverse_mass_matrix=jnp.ones(2), max_num_doublings=4)
    return kernel.step(jax.random.key(1), kernel.init(jnp.array([0.5, -0.3])))[0].position.sum()


LARGE = [bfgs, gmres, adaptive_steps, step_of_mjx, transition_of_nuts]  # derivatives of searches inside searches
PROGRAMS = [conjugate_gradients, newton, *(pytest.param(f, marks=pytest.mark.slow) for f in LARGE)]
POINTS = np.array([0.9, 1.7, 2.5])


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_gradients_of_loops_that_had_none(f):
    rewritten, points = lx.rewrite_loops(f), -POINTS if f is step_of_mjx else POINTS
    forward = jax.jit(lambda a: jax.jvp(f, (a,), (1.0,)))
    values, slopes = np.asarray([forward(a) for a in points]).T
    both = jax.value_and_grad(rewritten)
    in_lanes, gradients = jax.jit(jax.vmap(both))(points)
    assert_close(in_lanes, values)
    tolerances: Any = {"rtol": 1e-6 if f in (step_of_mjx, transition_of_nuts) else 1e-7, "atol": 1e-9}
    np.testing.assert_allclose(gradients, slopes, **tolerances)
    if f in (conjugate_gradients, newton, gmres, adaptive_steps):
        value, gradient = jax.jit(both)(points[1])
        assert_close(value, values[1])
        np.testing.assert_allclose(gradient, slopes[1], **tolerances)
        forwards = jax.jit(jax.vmap(jax.jacfwd(rewritten)))(points)
        np.testing.assert_allclose(forwards, slopes, **tolerances)
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.eval_shape(jax.grad(f), points[1])


WITH_RULES = {
    "gamma": lambda a: jax.random.gamma(jax.random.key(0), a, dtype=jnp.float64),
    "gammainc": lambda a: jax.scipy.special.gammainc(a, 1.3),
    "cg": lambda a: jax.scipy.sparse.linalg.cg(lambda x: a * (MATRIX @ x), RIGHT)[0].sum(),
    "odeint": lambda a: ode.odeint(lambda y, _, a: -a * jnp.sin(y), jnp.ones(2), jnp.array([0.0, 1.0]), a).sum(),
}


@pytest.mark.parametrize("name", WITH_RULES)
@jax.numpy_dtype_promotion("standard")
def test_functions_with_rules_for_derivatives_stay_as_they_are(name):
    """Also in reverse mode, which the loops inside them would not have."""
    both = lambda f: jax.jit(jax.vmap(jax.value_and_grad(f)))(POINTS)
    f = WITH_RULES[name]
    for new, old in zip(both(lx.rewrite_loops(f)), both(f), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-12, atol=1e-14)
