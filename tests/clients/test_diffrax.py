"""Solvers of Diffrax, whose loops are loopax's here (`conftest.py`): adaptive, implicit, with an event, in lanes."""

import diffrax
import jax
import jax.numpy as jnp
import optimistix as optx
import pytest

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


CASES = [(adaptive, (1.1, 0.7)), (implicit, (20.0, 0.7)), (event, (9.8, 0.1)), (events_of_lanes, (9.8, 0.1))]


@pytest.mark.parametrize(("solve", "at"), CASES)
def test_gradient(check, solve, at):
    check(solve, jnp.array(at))
