"""Programs of solvers, beside loops, for the cells of `docs/comparison.md`.

A program takes the name of a row, and returns the word that the cell must have.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import loopax as lx
from tests.project.comparison_programs import MODES, NO, WHILE_LOOPS, YES, has_no_argument, peer, works


def runge_kutta(a: Any) -> Any:
    """One unit of time of y' = -a y in four steps, in a loop that ends by a condition."""

    def step(carry: Any) -> Any:
        t, y = carry
        k1 = -a * y
        k2 = -a * (y + k1 / 8)
        k3 = -a * (y + k2 / 8)
        k4 = -a * (y + k3 / 4)
        return t + 0.25, y + (k1 + 2 * k2 + 2 * k3 + k4) / 24

    return lx.while_loop(lambda carry: carry[0] < 1.0, step, (jnp.zeros(()), jnp.ones(())))[1]


def solution(adjoint: str, a: Any, max_steps: int | None = 64, **options: Any) -> Any:
    diffrax = peer("diffrax")
    name = adjoint.replace(" ", "")
    name = name if name == "ForwardMode" else f"{name}Adjoint"
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, a: -a * y),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.25,
        y0=jnp.ones(()),
        args=a,
        max_steps=max_steps,
        adjoint=getattr(diffrax, name)(),
        **options,
    )


def decay(row: str, **options: Any) -> Callable[[Any], Any]:
    if row == "loopax":
        return runge_kutta
    return lambda a: solution(row.removeprefix("Diffrax "), a, **options).ys[0]


def of_decay(mode: str, row: str) -> str:
    """Derivatives of exp(-a)."""
    sign = -1.0 if mode in {"reverse", "forward"} else 1.0
    return works(lambda: jax.jit(MODES[mode](decay(row)))(jnp.asarray(0.7)), sign * np.exp(-0.7), rtol=1e-3)


def optimistix_solution(adjoint: str, a: Any, max_steps: int = 64, **options: Any) -> Any:
    optimistix = peer("optimistix")
    return optimistix.fixed_point(
        lambda x, a: jnp.cos(a * x),
        optimistix.FixedPointIteration(rtol=1e-10, atol=1e-10),
        jnp.ones(()),
        a,
        adjoint=getattr(optimistix, f"{adjoint.replace(' ', '')}Adjoint")(),
        max_steps=max_steps,
        **options,
    )


def fixed_point(row: str, **options: Any) -> Callable[[Any], Any]:
    if not row.startswith("loopax"):
        return lambda a: optimistix_solution(row.removeprefix("optimistix "), a, **options).value
    implicit = row == "loopax Implicit"
    kind = lx.Implicit(fixed_point=lambda carry: carry[0]) if implicit else lx.Checkpointed()

    def by_loopax(a: Any) -> Any:
        body = lambda carry: (jnp.cos(a * carry[0]), jnp.abs(jnp.cos(a * carry[0]) - carry[0]))
        init = (jnp.ones(()), jnp.ones(()))
        return lx.while_loop(lambda carry: carry[1] > 1e-10, body, init, max_steps=64, kind=kind)[0]

    return by_loopax


def of_fixed_point(mode: str, row: str) -> str:
    """Derivatives of x = cos(a x), against those of Newton's method on x - cos(a x), unrolled."""

    def newton(a: Any) -> Any:
        x = jnp.asarray(0.8)
        for _ in range(6):
            x = x - (x - jnp.cos(a * x)) / (1 + a * jnp.sin(a * x))
        return x

    a = jnp.asarray(0.7)
    return works(lambda: jax.jit(MODES[mode](fixed_point(row)))(a), MODES[mode](newton)(a), rtol=1e-4)


# A bound that is too low.


def to_100(row: str, **options: Any) -> Any:
    return WHILE_LOOPS[row](lambda x: x < 100, lambda x: x + 1, jnp.zeros((), int), 10, **options)


def raises(program: Callable[[], Any], message: str) -> str:
    try:
        program()
    except RuntimeError as error:
        if message not in str(error):
            raise
        return YES
    return NO


def error_at_bound(row: str) -> str:
    if row == "Diffrax":
        return raises(lambda: decay("Diffrax Direct", max_steps=2)(0.7), "maximum number of solver steps")
    if row == "optimistix":
        return raises(lambda: fixed_point("optimistix Implicit", max_steps=2)(0.7), "maximum number of")
    found = raises(lambda: to_100(row), "max_steps=10 stopped a loop")
    assert found == YES or to_100(row) == 10
    return found


def flag_at_bound(row: str) -> str:
    if row == "loopax":
        result, info = to_100(row, throw=False, info=True)
        return YES if result == 10 and info.limit_reached else NO
    if row == "Diffrax":
        results = peer("diffrax").RESULTS
        return YES if solution("Direct", 0.7, max_steps=2, throw=False).result == results.max_steps_reached else NO
    if row == "optimistix":
        results = peer("optimistix").RESULTS
        found = optimistix_solution("Implicit", 0.7, max_steps=2, throw=False).result
        return YES if found == results.nonlinear_max_steps_reached else NO
    return has_no_argument(row)
