"""The example computes what it says: `loopax.scan`, the masked `jax.lax.scan` and a plain Python loop agree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.example_files import assert_nearly

pytestmark = pytest.mark.slow

# The example is in float32, where different orders of the same sums differ by about 1e-7 of the largest term.
TOLERANCE = 5e-6


@pytest.fixture
def batch(example):
    """The shortest and the longest utterance, and some between them."""
    _, test = example.load()
    order = np.argsort(test.lengths)
    return test.take(order[[0, 80, 160, 240, -1]])


@pytest.fixture
def model(example):
    return example.Classifier(12, key=jax.random.key(1))


def python_scan(step, init, frames, length, reverse, key):
    """One utterance, in Python."""
    carry = init
    for i in reversed(range(length)) if reverse else range(length):
        carry, _ = step(carry, frames[i], key=jax.random.fold_in(key, i))
    return carry


@pytest.mark.parametrize("dropout", [True, False])
def test_ragged_equals_masked(example, model, batch, dropout):
    loss_and_gradient = eqx.filter_jit(eqx.filter_value_and_grad(example.loss))
    model = eqx.nn.inference_mode(model, not dropout)
    key = jax.random.key(2)
    ours = loss_and_gradient(model, batch, key, example.ragged_scan)
    assert_nearly(ours, loss_and_gradient(model, batch, key, example.masked_scan), TOLERANCE)


def test_ragged_equals_python(example, model, batch):
    model = eqx.nn.inference_mode(model)  # the unrolled loop would compile its random numbers for seconds
    loss_and_gradient = eqx.filter_jit(eqx.filter_value_and_grad(example.utterance_loss))
    frames, label, length, key = batch.frames[0], batch.labels[0], int(batch.lengths[0]), jax.random.key(3)
    ours = loss_and_gradient(model, frames, jnp.int32(length), label, key, example.ragged_scan)
    assert_nearly(ours, loss_and_gradient(model, frames, length, label, key, python_scan), TOLERANCE)
