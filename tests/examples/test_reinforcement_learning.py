"""The example computes what it says: episodes in lanes, and their gradient, are those of plain Python, one by one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.example_files import assert_nearly, load_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]

# The example is in float32, where different orders of the same sums differ by about 1e-7 of the largest term.
TOLERANCE = 1e-5
EPISODES = 6


@pytest.fixture(scope="module")
def example():
    """With episodes that are over early, by themselves or at the limit."""
    module = load_example("reinforcement_learning")
    vars(module).update(LONGEST=24, EPISODES=64)
    return module


@pytest.fixture
def policy(example):
    return example.Policy(jax.random.key(1))


@pytest.fixture
def keys():
    return jax.random.split(jax.random.key(2), EPISODES)


@pytest.fixture(scope="module")
def lanes(example):
    return eqx.filter_jit(jax.vmap(example.episode, in_axes=(None, 0)))


@pytest.fixture(scope="module")
def python_episode(example):
    """One episode in Python: all states, and the log-probabilities of the pushes."""
    act = eqx.filter_jit(example.act)

    def run(policy, key):
        start_key, key = jax.random.split(key)
        states, outputs = [example.start(start_key)], []
        while len(outputs) < example.LONGEST:
            state, output = act(policy, states[-1], jax.random.fold_in(key, len(outputs)))
            states.append(state)
            outputs.append(output)
            if example.is_over(state, output):
                break
        return states, outputs

    return run


def test_lanes_are_episodes_one_by_one(example, lanes, python_episode, policy, keys):
    episodes = lanes(policy, keys)
    assert episodes.num_steps.min() < episodes.num_steps.max() == example.LONGEST
    for i, key in enumerate(keys):
        states, outputs = python_episode(policy, key)
        assert episodes.num_steps[i] == len(outputs)
        assert_nearly(jax.tree.map(lambda x, i=i: x[i], episodes.state), states[-1], TOLERANCE)
        assert_nearly(episodes.outputs[i, : len(outputs)], jnp.stack(outputs), TOLERANCE)
        assert (episodes.outputs[i, len(outputs) :] == 0).all()


@pytest.mark.parametrize("options", [{}, {"lanes": "compact"}, {"kind": lx.Checkpointed(3)}], ids=str)
def test_gradient_is_that_of_a_python_loop(example, monkeypatch, python_episode, policy, keys, options):
    """Whatever a gradient stores: each step drops the units again that it has dropped when it acted."""
    rollout = lx.rollout
    monkeypatch.setattr(example.lx, "rollout", lambda *args, **given: rollout(*args, **given, **options))
    gradient, num_steps = eqx.filter_jit(eqx.filter_grad(example.loss, has_aux=True))(policy, keys)
    weights = example.advantages(num_steps)

    def python_loss(policy):
        pairs = zip(keys, weights, strict=True)
        terms = [weight[i] * output for key, weight in pairs for i, output in enumerate(python_episode(policy, key)[1])]
        return -sum(terms) / len(keys)

    assert_nearly(gradient, eqx.filter_grad(python_loss)(policy), TOLERANCE)


def test_masks_of_the_gradient_are_those_of_the_acts(example):
    """With units that all do the same, a slope counts the ones that are not dropped, as the value does."""
    policy = example.Policy(jax.random.key(3))
    ones = lambda x: jnp.ones(example.HIDDEN)
    policy = eqx.tree_at(lambda p: (p.inward, p.outward.bias), policy, (ones, jnp.zeros(1)))

    def total(weights, key, kind):
        steered = eqx.tree_at(lambda p: p.outward.weight, policy, weights)
        step = lambda state, key: (state, steered(state, key=key))
        start = example.start(jax.random.key(0))
        return lx.rollout(step, start, jnp.int32(9), max_steps=20, key=key, kind=kind).outputs.sum()

    weights, key = jnp.ones((1, example.HIDDEN)), jax.random.key(4)
    for kind in (lx.Checkpointed(2), lx.Checkpointed(), lx.Residuals()):
        value, slopes = jax.value_and_grad(total)(weights, key, kind)
        assert len(set(slopes[0].tolist())) > 3
        np.testing.assert_allclose(value, (slopes * weights).sum(), rtol=1e-6)


def test_advantages(example):
    """What is ahead, less what is ahead of those that have come as far."""
    weights = example.advantages(jnp.array([3, 1])) * example.LONGEST
    assert weights[:, :4].tolist() == pytest.approx(np.array([[1, 0, 0, 0], [-1, 0, 0, 0]]))


def test_a_pole_that_leans_falls_and_a_push_catches_it(example):
    leaning = example.CartPole(*(jnp.float32(x) for x in (0.0, 0.0, 0.05, 0.0)))
    zero = jnp.float32(0.0)
    assert example.pushed(leaning, zero).turning > 0
    assert example.pushed(leaning, zero + example.FORCE).turning < 0
    assert example.pushed(leaning, zero + example.FORCE).velocity > 0
    upright = jax.tree.map(jnp.zeros_like, leaning)
    assert_nearly(example.pushed(upright, zero), upright, TOLERANCE)
    for state, over in [
        (upright, False),
        (upright._replace(angle=0.22), True),
        (upright._replace(position=-2.5), True),
    ]:
        assert bool(example.is_over(state, None)) is over


def test_episodes_get_longer(example, monkeypatch):
    monkeypatch.setattr(example, "LONGEST", 100)
    monkeypatch.setattr(example, "LEARNING_RATE", 3e-2)
    _, lengths = example.train(25, jax.random.key(0))
    assert lengths.shape == (25, example.EPISODES)
    assert lengths[-5:].mean() > 1.5 * lengths[:5].mean()
