"""Solvers of Diffrax, whose loops are loopax's here (`conftest.py`): adaptive, implicit, with an event, in lanes."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from scipy.integrate import solve_ivp

START = jnp.array([1.0, 0.2])
PRECISE = diffrax.PIDController(rtol=1e-9, atol=1e-9)
COARSE = diffrax.PIDController(rtol=1e-6, atol=1e-6)


def van_der_pol(t, y, a):
    return jnp.stack([y[1], a[0] * (1.0 - y[0] ** 2) * y[1] - a[1] * y[0]])


def falling(t, y, a):
    return jnp.stack([y[1], -a[0] - a[1] * y[1]])


def adaptive(a):
    saved = diffrax.SaveAt(ts=jnp.linspace(0.2, 1.0, 3))
    options = {"stepsize_controller": PRECISE, "saveat": saved, "max_steps": 256}
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(van_der_pol), diffrax.Tsit5(), 0.0, 1.0, 0.1, START, args=a, **options
    )
    return (solution.ys**2).sum()


def implicit(a):
    """Steps that are solved for, by Newton's method."""
    options = {"stepsize_controller": COARSE, "max_steps": 4096}
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(van_der_pol), diffrax.Kvaerno3(), 0.0, 0.2, 0.1, START, args=a, **options
    )
    return (solution.ys**2).sum()


def event(a):
    """When a ball reaches the ground, and how fast."""
    ground = diffrax.Event(lambda t, y, args, **_: y[0], optx.Newton(1e-10, 1e-10))
    options = {"event": ground, "stepsize_controller": PRECISE, "max_steps": 256}
    start = jnp.array([1.0, 0.5])
    solution = diffrax.diffeqsolve(diffrax.ODETerm(falling), diffrax.Tsit5(), 0.0, 10.0, 0.1, start, args=a, **options)
    return solution.ts[-1] + solution.ys[-1, 1]


def events_of_lanes(a):
    return jax.vmap(lambda scale: event(a * scale))(jnp.array([1.0, 2.0])).sum()


def test_diffrax_has_our_loops():
    assert " loop[" in str(jax.make_jaxpr(adaptive)(START))


def by_scipy(function, end, start, a, **options):
    return solve_ivp(lambda t, y: np.array(function(t, y, a)), (0.0, end), start, rtol=1e-10, atol=1e-12, **options)


def test_values_are_those_of_another_solver():
    of_event = by_scipy(falling, 10.0, [1.0, 0.5], (9.8, 0.1), events=lambda t, y: y[0])
    at, speed = of_event.t_events[0][-1], of_event.y_events[0][-1][1]
    np.testing.assert_allclose(event(jnp.array([9.8, 0.1])), at + speed, rtol=1e-6)
    times = np.linspace(0.2, 1.0, 3)
    saved = by_scipy(van_der_pol, 1.0, START, (1.1, 0.7), t_eval=times).y
    np.testing.assert_allclose(adaptive(jnp.array([1.1, 0.7])), (saved**2).sum(), rtol=1e-6)
    last = by_scipy(van_der_pol, 0.2, START, (20.0, 0.7)).y[:, -1]
    np.testing.assert_allclose(implicit(jnp.array([20.0, 0.7])), (last**2).sum(), rtol=1e-4)


CASES = [(adaptive, (1.1, 0.7)), (implicit, (20.0, 0.7)), (event, (9.8, 0.1)), (events_of_lanes, (9.8, 0.1))]


@pytest.mark.parametrize(("solve", "at"), CASES)
def test_gradient(check, solve, at):
    check(solve, jnp.array(at))
