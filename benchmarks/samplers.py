"""NUTS of BlackJAX, as it is: chains that wait for each other, and free ones.

Step sizes are fixed, so that every way takes the same leapfrogs. Chains differ much for eight schools in the centred
form, and little for a logistic regression with few observations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks.groups import Group, Target
from benchmarks.measure import Case

CHAINS, DRAWS, DOUBLINGS, FEATURES = 64, 40, 8, 25
VMAP, LOCKSTEP, FREE = "jax.vmap", "loopax rewrite_loops", 'loopax rewrite_loops(lanes="free")'

EFFECTS = np.array([28, 8, -3, 7, -1, 1, 18, 12], np.float32)
ERRORS = np.array([15, 10, 16, 11, 9, 11, 10, 18], np.float32)


def eight_schools(q: Array) -> Array:
    """The logarithm of the density of the mean, the logarithm of the spread, and the effects (Rubin 1981)."""
    mean, log_spread, effects = q[0], q[1], q[2:]
    spread = jnp.exp(log_spread)
    prior = -0.5 * (mean / 5) ** 2 - jnp.log1p((spread / 5) ** 2) + log_spread
    schools = (-0.5 * ((effects - mean) / spread) ** 2 - log_spread).sum()
    return prior + schools - 0.5 * (((EFFECTS - effects) / ERRORS) ** 2).sum()


def logistic_regression(observations: int) -> Callable[[Array], Array]:
    """The logarithm of the density of the weights."""
    random = np.random.RandomState(0)
    inputs = jnp.asarray(random.randn(observations, FEATURES), jnp.float32)
    chance = 1 / (1 + np.exp(-(inputs @ np.linspace(-1, 1, FEATURES))))
    outcomes = jnp.asarray(random.rand(observations) < chance)

    def log_density(q: Array) -> Array:
        z = inputs @ q
        return -0.5 * (q**2).sum() - jnp.where(outcomes, jax.nn.softplus(-z), jax.nn.softplus(z)).sum()

    return log_density


def chain(log_density: Callable[[Array], Array], step_size: float, key: Array, start: Array) -> Any:
    """Draws, and the leapfrogs of each."""
    from blackjax import nuts as make_nuts

    make: Any = make_nuts
    masses = jnp.ones(len(start))
    nuts = make(log_density, step_size=step_size, inverse_mass_matrix=masses, max_num_doublings=DOUBLINGS)

    def draw(state: Any, key: Array) -> Any:
        state, info = nuts.step(key, state)
        return state, (state.position, info.num_integration_steps)

    return lax.scan(draw, nuts.init(start), jax.random.split(key, DRAWS))[1]


POSTERIORS: dict[str, tuple[Callable[[Array], Array], int, float, float]] = {
    "eight schools": (eight_schools, 10, 0.15, 0.6),
    "logistic regression, 1024 observations": (logistic_regression(1024), FEATURES, 0.08, 0.65),
    "logistic regression, 16 observations": (logistic_regression(16), FEATURES, 0.3, 0.95),
}


def of_posterior(name: str) -> Group:
    """The ways to run the chains."""
    log_density, size, step_size, bound = POSTERIORS[name]
    lane = partial(chain, log_density, step_size)
    starts = jnp.asarray(np.random.RandomState(0).randn(CHAINS, size) * 0.3, jnp.float32)
    arguments = jax.random.split(jax.random.key(1), CHAINS), starts
    programs = {VMAP: lane, LOCKSTEP: lx.rewrite_loops(lane), FREE: lx.rewrite_loops(lane, lanes="free")}
    return Group(
        f"NUTS of BlackJAX, {name}: {CHAINS} chains of {DRAWS} draws",
        [Case(key, jax.vmap(program), arguments) for key, program in programs.items()],
        [
            Target("time", FREE, VMAP, bound),
            Target("time", LOCKSTEP, VMAP, 1.0),
            Target("trace and compile", FREE, VMAP, 4.0, "compile_seconds"),
        ],
        rounds=9,
    )


def groups() -> list[Group]:
    """All tables."""
    return list(map(of_posterior, POSTERIORS))
