"""An agent learns to balance a pole: every episode is as long as it gets, and the gradient goes through all of them.

A cart is pushed left or right, fifty times a second, so that the pole on it stays upright. An episode is a
`loopax.rollout` of a policy in this environment which stops when the pole falls, and `jax.vmap` of it is a batch of
episodes of different length. The policy drops half of its hidden units at random, anew at each step: the keys come from
`key=`, so that the gradient sees the units that acted. Learning is REINFORCE, which raises the probability of
actions after which an episode went on for longer than others did at the same step.

`python examples/reinforcement_learning.py` trains for half a minute on two cores, prints how the episodes get longer
and what their batch costs, and draws `examples/reinforcement_learning.png`. It fails if the agent has not learned.

The cart and the pole, here without friction: A. G. Barto, R. S. Sutton and C. W. Anderson, "Neuronlike adaptive
elements that can solve difficult learning control problems", IEEE Transactions on Systems, Man, and Cybernetics 13
(1983). REINFORCE: R. J. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
learning", Machine Learning 8 (1992).
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

HIDDEN = 32
DROPOUT = 0.5
LEARNING_RATE = 1e-2
EPISODES = 256  # in a batch
LONGEST = 500  # steps, which are ten seconds
UPDATES = 60
SEED = 0
NEEDED_STEPS = 400  # on average, of 500

GRAVITY, CART_MASS, POLE_MASS = 9.8, 1.0, 0.1  # m/s², kg, kg
HALF_LENGTH = 0.5  # of the pole, m
FORCE, TIME_STEP = 10.0, 0.02  # N, s
FARTHEST, STEEPEST = 2.4, np.deg2rad(12)  # m, rad


# The environment -----------------------------------------------------------------------------------------


class CartPole(NamedTuple):
    """Where the cart is on its track, how the pole leans, and how fast both change."""

    position: Float[Array, ""]
    velocity: Float[Array, ""]
    angle: Float[Array, ""]  # 0 is upright
    turning: Float[Array, ""]


def start(key: PRNGKeyArray) -> CartPole:
    return CartPole(*jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05))


def pushed(state: CartPole, force: Float[Array, ""]) -> CartPole:
    """A fiftieth of a second later (equations of the appendix of Barto, Sutton & Anderson 1983)."""
    sin, cos, mass = jnp.sin(state.angle), jnp.cos(state.angle), CART_MASS + POLE_MASS
    thrust = (force + POLE_MASS * HALF_LENGTH * state.turning**2 * sin) / mass
    turn = (GRAVITY * sin - cos * thrust) / (HALF_LENGTH * (4 / 3 - POLE_MASS * cos**2 / mass))
    push = thrust - POLE_MASS * HALF_LENGTH * turn * cos / mass
    changes = CartPole(state.velocity, push, state.turning, turn)
    return jax.tree.map(lambda value, change: value + TIME_STEP * change, state, changes)


def is_over(state: CartPole, _: Any) -> Bool[Array, ""]:
    return (jnp.abs(state.position) > FARTHEST) | (jnp.abs(state.angle) > STEEPEST)


# The agent -----------------------------------------------------------------------------------------------


class Policy(eqx.Module):
    """The log-odds of a push to the right."""

    inward: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    outward: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        """Initialize the weights."""
        inward, outward = jax.random.split(key)
        self.inward = eqx.nn.Linear(4, HIDDEN, key=inward)
        self.dropout = eqx.nn.Dropout(DROPOUT)
        self.outward = eqx.nn.Linear(HIDDEN, "scalar", key=outward)

    def __call__(self, state: CartPole, *, key: PRNGKeyArray) -> Float[Array, ""]:
        """With other units dropped for every key."""
        hidden = jnp.tanh(self.inward(jnp.stack(state)))
        return self.outward(self.dropout(hidden, key=key))


def act(policy: Policy, state: CartPole, key: PRNGKeyArray) -> tuple[CartPole, Float[Array, ""]]:
    """Push one way or the other, at random: the next state, and the logarithm of the probability of that push."""
    mask_key, push_key = jax.random.split(key)
    log_odds = policy(state, key=mask_key)
    to_right = jax.random.bernoulli(push_key, jax.nn.sigmoid(log_odds))
    sign = jnp.where(to_right, 1.0, -1.0)
    return pushed(state, sign * FORCE), jax.nn.log_sigmoid(sign * log_odds)


def episode(policy: Policy, key: PRNGKeyArray) -> lx.Rollout:
    """Act until the pole falls; the outputs are the log-probabilities of the pushes, zero after the end."""
    start_key, key = jax.random.split(key)
    return lx.rollout(partial(act, policy), start(start_key), LONGEST, stop=is_over, key=key)


# Learning ------------------------------------------------------------------------------------------------


def advantages(num_steps: Int[Array, " episodes"]) -> Float[Array, "episodes steps"]:
    """How much longer each episode goes on, at each of its steps, than those that have come as far do on average."""
    ahead = jnp.maximum(num_steps[:, None] - jnp.arange(LONGEST), 0).astype(float)
    goes_on = ahead > 0
    mean = ahead.sum(axis=0) / jnp.maximum(goes_on.sum(axis=0), 1)
    return jnp.where(goes_on, ahead - mean, 0.0) / LONGEST


def loss(policy: Policy, keys: PRNGKeyArray) -> tuple[Float[Array, ""], Int[Array, " episodes"]]:
    """A scalar whose gradient is that of REINFORCE, and the lengths of the episodes."""
    episodes = jax.vmap(episode, in_axes=(None, 0))(policy, keys)
    weights = advantages(episodes.num_steps)
    return -(weights * episodes.outputs).sum() / len(keys), episodes.num_steps


def train(updates: int, key: PRNGKeyArray) -> tuple[Policy, Int[np.ndarray, "updates episodes"]]:
    """A policy, and how long the episodes were from which it has learned."""
    model_key, key = jax.random.split(key)
    policy, optimizer = Policy(model_key), optax.adam(LEARNING_RATE)

    @eqx.filter_jit
    def update(policy: Policy, memory: Any, key: PRNGKeyArray) -> Any:
        keys = jax.random.split(key, EPISODES)
        gradient, num_steps = eqx.filter_grad(loss, has_aux=True)(policy, keys)
        changes, memory = optimizer.update(gradient, memory)
        return eqx.apply_updates(policy, changes), memory, num_steps

    memory, lengths = optimizer.init(eqx.filter(policy, eqx.is_array)), []
    for number in range(updates):
        policy, memory, num_steps = update(policy, memory, jax.random.fold_in(key, number))
        lengths.append(np.asarray(num_steps))
    return policy, np.stack(lengths)


# The results ---------------------------------------------------------------------------------------------


def print_table(lengths: Int[np.ndarray, "updates episodes"]) -> None:
    """Some updates, and how much of what their batch computes is of use: as it runs, and with `lanes="compact"`."""
    table = Table("update", "mean steps", "shortest", "longest", "lockstep", "compact")
    for update in np.linspace(0, len(lengths) - 1, 7).astype(int):
        steps, report = lengths[update], lx.lane_report(lengths[update])
        shares = [f"{report.share(stretches):.0%}" for stretches in (report.lockstep, report.stages)]
        table.add_row(f"{update + 1}", f"{steps.mean():.0f}", f"{steps.min()}", f"{steps.max()}", *shares)
    Console().print(table)


def draw(lengths: Int[np.ndarray, "updates episodes"]) -> Figure:
    """The learning curve, and the lanes of the batch whose longest episode is longest beside the others."""
    figure = Figure(figsize=(5, 5), layout="constrained", dpi=150)
    learning, lanes = figure.subplots(2, 1)
    draw_learning(learning, lengths)
    update = np.argmin(lengths.mean(axis=1) / lengths.max(axis=1))
    report = lx.lane_report(lengths[update])
    report.plot(report.lockstep, lanes)
    lanes.set_title(f"Episodes of update {update + 1}: {report.share(report.lockstep):.0%} useful")
    return figure


def draw_learning(axes: Axes, lengths: Int[np.ndarray, "updates episodes"]) -> None:
    updates, (low, high) = np.arange(1, len(lengths) + 1), np.percentile(lengths, [10, 90], axis=1)
    axes.fill_between(updates, low, high, alpha=0.25, linewidth=0, label="80% of the episodes")
    axes.plot(updates, lengths.mean(axis=1), label="mean")
    axes.set(title="Steps until the pole falls", xlabel="update", ylabel="steps")
    axes.legend(frameon=False, loc="upper left")


def main() -> None:
    """Train, test without dropout, draw."""
    policy, lengths = train(UPDATES, jax.random.key(SEED))
    print_table(lengths)
    keys = jax.random.split(jax.random.key(SEED + 1), EPISODES)
    _, num_steps = eqx.filter_jit(loss)(eqx.nn.inference_mode(policy), keys)
    draw(lengths).savefig(FIGURE)
    print(f"Without dropout: {num_steps.mean():.0f} steps of at most {LONGEST}. Figure: {FIGURE.name}")
    if num_steps.mean() < NEEDED_STEPS:
        raise SystemExit(f"the pole falls after fewer than {NEEDED_STEPS} steps on average")


if __name__ == "__main__":
    main()
