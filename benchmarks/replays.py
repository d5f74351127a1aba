"""Gradients whose replays store residuals, against saving every carry, and against scans nested by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import loopax as lx
from benchmarks.groups import EVERY_CARRY, LAX_SCAN, Group, Target
from benchmarks.measure import Case

Step = Callable[[Any], Any]

OURS = "loopax Checkpointed()"
NESTED = "lax.scan of jax.checkpoint, three nested"
PRODUCT_STEPS, SOLVER_STEPS = 400, 400
CABLE = (14, 14, 13)  # scans in each other; 2548 steps
COMPARTMENTS = 20


def product(weights: Any) -> Step:
    """One product of a matrix and a vector, and `tanh`."""
    return lambda x: jnp.tanh(weights @ x)


def implicit(x: Any) -> Any:
    """Three Newton steps of implicit Euler for `x' = -x**3 + cos x`."""
    y = x
    for _ in range(3):
        residual = y - x - 0.05 * (jnp.cos(y) - y**3)
        y = y - residual / (1.0 + 0.05 * (jnp.sin(y) + 3.0 * y**2))
    return y


def cable(state: Any) -> Any:
    """Half-implicit step of a cable of compartments, with one gate each: a tridiagonal solve."""
    v, gate = state
    opens = 0.1 * (v + 40.0) / (1.0 - jnp.exp(-(v + 40.01) / 10.0))
    gate = gate + 0.025 * (opens * (1.0 - gate) - 4.0 * jnp.exp(-(v + 65.0) / 18.0) * gate)
    conductance = 1.2 * gate**3
    coupling = -0.0125 * jnp.ones(COMPARTMENTS)
    diagonal = 1.025 + 0.025 * (conductance + 0.03)
    current = 10.0 * (jnp.arange(COMPARTMENTS) == 0)
    right = v + 0.025 * (50.0 * conductance - 0.6 + current)
    return _tridiagonal(coupling, diagonal, coupling, right), gate


def _tridiagonal(lower: Any, diagonal: Any, upper: Any, right: Any) -> Any:
    """Gaussian elimination, by two scans."""

    def eliminate(carry: Any, row: Any) -> Any:
        below, diagonal, above, right = row
        factor, value = carry
        pivot = diagonal - below * factor
        carry = above / pivot, (right - below * value) / pivot
        return carry, carry

    def substitute(x: Any, row: Any) -> Any:
        factor, value = row
        x = value - factor * x
        return x, x

    _, rows = lax.scan(eliminate, (0.0, 0.0), (lower, diagonal, upper, right))
    return lax.scan(substitute, 0.0, rows, reverse=True)[1]


def _gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    def energy(state: Any, *arguments: Any) -> Any:
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(run(state, *arguments)))

    return jax.grad(energy)


def _programs(make: Callable[..., Step], steps: int) -> dict[str, Callable[..., Any]]:
    def of_loopax(kind: lx.Kind) -> Callable[..., Any]:
        return lambda state, *a: lx.fori_loop(0, steps, lambda _, s: make(*a)(s), state, kind=kind)

    def of_scan(wrap: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda state, *a: lax.scan(wrap(lambda s, _: (make(*a)(s), None)), state, None, steps)[0]

    return {
        OURS: of_loopax(lx.Checkpointed()),
        EVERY_CARRY: of_scan(jax.checkpoint),
        LAX_SCAN: of_scan(lambda f: f),
        "loopax Checkpointed(10)": of_loopax(lx.Checkpointed(10)),
        "loopax Bounded()": of_loopax(lx.Bounded()),
        "loopax Residuals()": of_loopax(lx.Residuals()),
    }


def _nested(state: Any) -> Any:
    """Three scans in each other, of which the two inner ones are checkpointed."""
    outer, middle, inner = CABLE
    of_inner = jax.checkpoint(lambda s, _: (lax.scan(lambda s, _: (cable(s), None), s, None, inner)[0], None))
    of_middle = jax.checkpoint(lambda s, _: (lax.scan(of_inner, s, None, middle)[0], None))
    return lax.scan(of_middle, state, None, outer)[0]


def _group(
    name: str, programs: dict[str, Callable[..., Any]], arguments: tuple[Any, ...], targets: list[Target]
) -> Group:
    return Group(f"Replays: {name}", [Case(key, _gradient(f), arguments) for key, f in programs.items()], targets)


def groups() -> list[Group]:
    """All tables."""
    weights = jax.random.normal(jax.random.key(0), (1024, 1024)) / 32.0
    vector = jax.random.normal(jax.random.key(1), (1024,))
    start = jnp.full(COMPARTMENTS, -60.0), jnp.full(COMPARTMENTS, 0.05)
    of_cable = _programs(lambda: cable, CABLE[0] * CABLE[1] * CABLE[2])
    every_carry = [
        Target("time", OURS, EVERY_CARRY, 1.15),
        Target("temporary memory", OURS, EVERY_CARRY, 0.5, "temporary_mib"),
    ]
    nested = [Target("time", OURS, NESTED, 1.0), Target("temporary memory", OURS, NESTED, 1.0, "temporary_mib")]
    return [
        _group("a product of 1024 x 1024, n=400", _programs(product, PRODUCT_STEPS), (vector, weights), every_carry),
        _group(
            "an implicit solver, 2000 equations, n=400",
            _programs(lambda: implicit, SOLVER_STEPS),
            (jnp.linspace(-1.0, 2.0, 2000),),
            every_carry,
        ),
        _group("a cable of 20 compartments, n=2548", {NESTED: _nested, **of_cable}, (start,), nested),
    ]
