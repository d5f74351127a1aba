"""Optimisers with line searches: gradients of where few of their steps end."""

from functools import partial

import jax.numpy as jnp
import jaxopt
import optax
from jax import lax

import loopax as lx

STIFFNESS = 5.0


def rosenbrock(point, stiffness):
    return jnp.sum(stiffness * (point[1:] - point[:-1] ** 2) ** 2 + (1.0 - point[:-1]) ** 2)


def descent(stiffness):
    """With a line search that goes back, in a loop of its own."""
    solver = jaxopt.GradientDescent(rosenbrock, maxiter=4, tol=0.0, implicit_diff=False)
    return solver.run(jnp.array([-1.2, 1.0]), stiffness).params.sum()


def quasi_newton(stiffness):
    solver = jaxopt.LBFGS(rosenbrock, maxiter=4, tol=0.0, implicit_diff=False, linesearch="backtracking")
    return solver.run(jnp.array([-1.2, 1.0]), stiffness).params.sum()


def line_searches(stiffness, scan=lax.scan):
    """Three steps of descent, each in a loop."""
    optimiser = optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=15, store_grad=True)
    )
    loss = lambda point: rosenbrock(point, stiffness)
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        point, state = carry
        value, grad = value_and_grad(point, state=state)
        update, state = optimiser.update(grad, state, point, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(point, update), state), value

    start = jnp.array([-1.2, 1.0])
    (point, _), _ = scan(step, (start, optimiser.init(start)), length=3)
    return point.sum()


def test_gradient_descent_of_jaxopt(check):
    check(lx.rewrite_loops(descent, max_steps=30), STIFFNESS, original=descent)


def test_lbfgs_of_jaxopt(check):
    check(lx.rewrite_loops(quasi_newton, max_steps=30), STIFFNESS, original=quasi_newton, step=1e-6)


def test_line_searches_of_optax(check):
    ours = partial(line_searches, scan=lx.scan)
    check(lx.rewrite_loops(ours, max_steps=30), STIFFNESS, original=line_searches)
