"""Gradients that store one carry: by an inverse, with a tape, and by the equation of a fixed point."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax
import optimistix
from jax import lax

import loopax as lx
from benchmarks.groups import Group, Target
from benchmarks.measure import Case

BODIES, BODY_STEPS = 64, 1000
GRID, WAVE_STEPS = 128, 1000
UNITS, LANES, MOST_STEPS = 64, 1024, 4000
GMRES = lineax.GMRES(rtol=1e-5, atol=1e-5)

REVERSIBLE, CHECKPOINTED, BY_HAND = (
    "loopax Reversible",
    "loopax Checkpointed()",
    "lax.scan with jax.custom_vjp, by hand",
)
TAPE, TWENTY = "loopax Reversible with a tape", "loopax Checkpointed(20)"
IMPLICIT, OPTIMISTIX = "loopax Implicit", "optimistix fixed_point, ImplicitAdjoint"
LANES_OF_IMPLICIT, LANES_OF_OPTIMISTIX = (
    "loopax Implicit, lanes compact",
    "vmapped optimistix fixed_point, ImplicitAdjoint",
)


# ---- bodies that attract each other

DT = 1e-3


def force(positions: Any) -> Any:
    """Softened gravity between all pairs."""
    apart = positions - positions[:, None]
    return (apart / (jnp.sum(apart**2, -1, keepdims=True) + 0.01) ** 1.5).sum(1) / BODIES


def leapfrog(state: Any) -> Any:
    """A step of a symplectic integrator."""
    q, p = state
    q = q + 0.5 * DT * p
    p = p + DT * force(q)
    return q + 0.5 * DT * p, p


def back(state: Any) -> Any:
    """A step back."""
    q, p = state
    q = q - 0.5 * DT * p
    p = p - DT * force(q)
    return q - 0.5 * DT * p, p


@jax.custom_vjp
def _by_hand(start: Any) -> Any:
    return lax.scan(lambda s, _: (leapfrog(s), None), start, None, BODY_STEPS)[0]


def _forward(start: Any) -> Any:
    end = _by_hand(start)
    return end, end


def _backward(end: Any, ct: Any) -> Any:
    def step(pair: Any, _: Any) -> Any:
        before = back(pair[0])
        return (before, jax.vjp(leapfrog, before)[1](pair[1])[0]), None

    return (lax.scan(step, (end, ct), None, BODY_STEPS)[0][1],)


_by_hand.defvjp(_forward, _backward)


def bodies() -> Group:
    """By an inverse, against checkpoints and against what an expert writes."""
    start = (jax.random.normal(jax.random.key(0), (BODIES, 3)), 0.1 * jax.random.normal(jax.random.key(1), (BODIES, 3)))
    of_loopax = lambda kind: lambda s: lx.fori_loop(0, BODY_STEPS, lambda _, s: leapfrog(s), s, kind=kind)
    programs = {
        REVERSIBLE: of_loopax(lx.Reversible(lambda _, s: back(s))),
        CHECKPOINTED: of_loopax(lx.Checkpointed()),
        BY_HAND: _by_hand,
        "loopax Bounded()": of_loopax(lx.Bounded()),
    }
    energy = lambda run: jax.grad(lambda s: sum((leaf**2).sum() for leaf in run(s)))
    return Group(
        f"Storeless: leapfrog of {BODIES} bodies, n={BODY_STEPS}",
        [Case(name, energy(run), (start,)) for name, run in programs.items()],
        [
            Target("time", REVERSIBLE, CHECKPOINTED, 1.05),
            Target("time", REVERSIBLE, BY_HAND, 1.1),
            Target("temporary memory", REVERSIBLE, BY_HAND, 1.1, "temporary_mib"),
        ],
    )


# ---- electromagnetic waves with an absorbing boundary


def edges(field: Any) -> Any:
    """The outermost rows and columns, of which an absorbing boundary loses the values."""
    return field[0], field[-1], field[:, 0], field[:, -1]


def with_edges(field: Any, rows: Any) -> Any:
    """The field with others."""
    top, bottom, left, right = rows
    return field.at[:, 0].set(left).at[:, -1].set(right).at[0].set(top).at[-1].set(bottom)


def waves(permittivity: Any, kind_of: Callable[[Any, Any], lx.Kind], num_steps: int = WAVE_STEPS) -> Any:
    """The energy that passes a point, of waves in two dimensions that leave at Mur's first-order boundary."""
    size, dt = permittivity.shape[0], 0.5
    rate, absorbed = dt / permittivity[1:-1, 1:-1], (dt - 1) / (dt + 1)

    def electric(i: Any, e: Any, hx: Any, hy: Any, sign: int) -> Any:
        curl = (hy[1:, 1:-1] - hy[:-1, 1:-1]) - (hx[1:-1, 1:] - hx[1:-1, :-1])
        e = e.at[1:-1, 1:-1].add(sign * rate * curl)
        return e.at[size // 4, size // 2].add(sign * jnp.exp(-(((i.astype(e.dtype) - 30.0) / 10.0) ** 2)))

    def magnetic(e: Any, hx: Any, hy: Any, sign: int) -> Any:
        return hx - sign * dt * (e[:, 1:] - e[:, :-1]), hy + sign * dt * (e[1:] - e[:-1])

    def boundary(old: Any, new: Any) -> Any:
        inner = lambda field: (field[1], field[-2], field[:, 1], field[:, -2])
        rows = zip(inner(old), inner(new), edges(old), strict=True)
        return with_edges(new, [a + absorbed * (b - edge) for a, b, edge in rows])

    def step(i: Any, state: Any) -> Any:
        e, hx, hy, energy = state
        hx, hy = magnetic(e, hx, hy, 1)
        new = boundary(e, electric(i, e, hx, hy, 1))
        return new, hx, hy, energy + new[3 * size // 4, size // 2] ** 2

    def undo(i: Any, state: Any, lost: Any) -> Any:
        e, hx, hy, energy = state
        e = with_edges(electric(i, e, hx, hy, -1), lost)
        return e, *magnetic(e, hx, hy, -1), energy

    start = jnp.zeros_like(permittivity)
    kind = kind_of(undo, lambda i, before, after: edges(before[0]))
    state = (start, start[:, 1:], start[1:], jnp.zeros((), permittivity.dtype))
    return lx.fori_loop(0, num_steps, step, state, kind=kind)[3]


def permittivity(size: int = GRID) -> Any:
    """A lens."""
    x = jnp.arange(float(size)) - size / 2
    return 1 + 0.5 * jnp.exp(-(x[:, None] ** 2 + x[None] ** 2) / (size / 8) ** 2)


def _waves() -> Group:
    kinds = {
        TAPE: lambda undo, record: lx.Reversible(undo, record=record),
        f"{TAPE}, 19 checkpoints": lambda undo, record: lx.Reversible(undo, record=record, checkpoints=19),
        TWENTY: lambda undo, record: lx.Checkpointed(20),
        CHECKPOINTED: lambda undo, record: lx.Checkpointed(),
        "loopax Bounded()": lambda undo, record: lx.Bounded(),
    }
    return Group(
        f"Storeless: electromagnetic waves, {GRID} x {GRID}, absorbing boundary, n={WAVE_STEPS}",
        [Case(name, jax.grad(lambda e, k=k: waves(e, k)), (permittivity(),)) for name, k in kinds.items()],
        [Target("time", TAPE, TWENTY, 0.9)],
    )


# ---- a fixed point


def equilibrium(x: Any, scale: Any, weights: Any, y: Any) -> Any:
    """A layer of a deep-equilibrium model; how fast it converges depends on the scale of its weights."""
    return jnp.tanh(scale * (weights @ y) + x)


def _by_loopax(x: Any, scale: Any, weights: Any, solver: Any = None, lanes: Any = "lockstep") -> Any:
    step = lambda y: equilibrium(x, scale, weights, y)

    def goes_on(state: Any) -> Any:
        y, old, num_steps = state
        scaled = (y - old) / (1e-6 + 1e-5 * jnp.abs(y))
        return (num_steps < 2) | (jnp.sqrt(jnp.mean(scaled**2)) >= 1)

    derivative = lx.Implicit(solver, fixed_point=lambda state: state[0])
    state = (jnp.zeros_like(x), jnp.ones_like(x), 0)
    body = lambda state: (step(state[0]), state[0], state[2] + 1)
    (y, *_) = lx.while_loop(goes_on, body, state, max_steps=MOST_STEPS, derivative=derivative, lanes=lanes)
    return (y**2).sum()


def _by_optimistix(x: Any, scale: Any, weights: Any) -> Any:
    solver = optimistix.FixedPointIteration(rtol=1e-5, atol=1e-6, norm=optimistix.rms_norm)
    found = optimistix.fixed_point(
        lambda y, args: equilibrium(args[0], args[1], args[2], y),
        solver,
        jnp.zeros_like(x),
        (x, scale, weights),
        adjoint=optimistix.ImplicitAdjoint(GMRES),
        max_steps=MOST_STEPS,
    )
    return (found.value**2).sum()


def _equilibria() -> list[Group]:
    weights = jax.random.normal(jax.random.key(0), (UNITS, UNITS)) / jnp.sqrt(UNITS) / 2.2
    x = 0.1 * jax.random.normal(jax.random.key(1), (UNITS,))
    xs = 0.1 * jax.random.normal(jax.random.key(2), (LANES, UNITS))
    # The scales with which the linear part converges in so many steps, which are log-normal.
    steps = jnp.clip(24.0 * jnp.exp(jax.random.normal(jax.random.key(3), (LANES,))), 4.0, 192.0)
    radius = jnp.abs(jnp.linalg.eigvals(weights)).max()
    scales = jnp.exp(-jnp.log(1e5) / steps) / radius
    alone = {IMPLICIT: partial(_by_loopax, solver=GMRES), OPTIMISTIX: _by_optimistix}
    of_lanes = {
        LANES_OF_IMPLICIT: partial(_by_loopax, lanes="compact"),
        f"{LANES_OF_IMPLICIT}, GMRES": partial(_by_loopax, solver=GMRES, lanes="compact"),
        LANES_OF_OPTIMISTIX: _by_optimistix,
    }

    def batch(run: Any) -> Any:
        return jax.grad(lambda xs, scales, w: jax.vmap(run, (0, 0, None))(xs, scales, w).sum(), (0, 2))

    return [
        Group(
            f"Storeless: a fixed point of {UNITS} units, by the same solver",
            [Case(name, jax.grad(run, (0, 2)), (x, 0.9, weights)) for name, run in alone.items()],
            [Target("time", IMPLICIT, OPTIMISTIX, 1.05)],
        ),
        Group(
            f"Storeless: {LANES} fixed points, log-normal numbers of steps",
            [Case(name, batch(run), (xs, scales, weights)) for name, run in of_lanes.items()],
            [Target("time", LANES_OF_IMPLICIT, LANES_OF_OPTIMISTIX, 0.2)],
            rounds=5,
        ),
    ]


def groups() -> list[Group]:
    """All tables."""
    return [bodies(), _waves(), *_equilibria()]
