"""The example computes what it says: episodes in lanes, and their gradient, are those of plain Python, one by one."""

import equinox as eqx
import jax
import pytest

import loopax as lx
from tests.support.example_files import assert_nearly

pytestmark = pytest.mark.slow

# The example is in float32, where different orders of the same sums differ by about 1e-7 of the largest term.
TOLERANCE = 1e-5
EPISODES = 6


@pytest.fixture
def example(example):
    """With episodes that are over early, by themselves or at the limit."""
    vars(example).update(LONGEST=24, EPISODES=64)
    return example


@pytest.fixture
def policy(example):
    return example.Policy(jax.random.key(1))


@pytest.fixture
def keys():
    return jax.random.split(jax.random.key(2), EPISODES)


@pytest.fixture
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
