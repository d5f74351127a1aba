"""NUTS of BlackJAX and of NumPyro: trees of unknown depth, of which only loopax has a reverse mode."""

import blackjax
import jax
import jax.numpy as jnp
from jax import lax
from numpyro.infer.hmc import hmc

import loopax as lx
from tests.clients.gradients import check_gradient

START = jnp.array([0.3, -0.2, 0.5])
SCALE = 0.3


def potential(scale, position):
    return 0.5 * jnp.sum(jnp.exp(scale) * position**2)


def two_steps_of_blackjax(scale):
    density = lambda position: -potential(scale, position)
    nuts = blackjax.nuts(density, step_size=0.4, inverse_mass_matrix=jnp.ones(3), max_num_doublings=4)
    step = lambda state, key: (nuts.step(key, state)[0], None)
    last, _ = lax.scan(step, nuts.init(START), jax.random.split(jax.random.key(3), 2))
    return jnp.sin(last.position).sum()


def two_steps_of_numpyro(scale):
    init, sample = hmc(potential_fn=lambda position: potential(scale, position), algo="NUTS")
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False, "max_tree_depth": 3}
    state = init(START, num_warmup=0, step_size=0.4, rng_key=jax.random.key(1), **fixed)
    for _ in range(2):
        state = sample(state)
    return jnp.sin(state.z).sum()


def test_blackjax():
    check_gradient(lx.rewrite_loops(two_steps_of_blackjax, max_steps=16), SCALE, original=two_steps_of_blackjax)


def test_numpyro():
    check_gradient(lx.rewrite_loops(two_steps_of_numpyro, max_steps=16), SCALE, original=two_steps_of_numpyro)
