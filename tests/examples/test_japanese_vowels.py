"""The example computes what it says: `loopax.scan` and the masked `jax.lax.scan` agree."""

import equinox as eqx
import jax
import numpy as np
import pytest

from tests.support.example_files import assert_nearly

pytestmark = pytest.mark.slow

# The example is in float32, where different orders of the same sums differ by about 1e-7 of the largest term.
TOLERANCE = 5e-6


@pytest.mark.parametrize("dropout", [True, False])
def test_ragged_equals_masked(example, dropout):
    """Of the shortest and the longest utterance, and some between them."""
    _, test = example.load()
    batch = test.take(np.argsort(test.lengths)[[0, 80, 160, 240, -1]])
    model = eqx.nn.inference_mode(example.Classifier(12, key=jax.random.key(1)), not dropout)
    loss_and_gradient = eqx.filter_jit(eqx.filter_value_and_grad(example.loss))
    ours, theirs = (
        loss_and_gradient(model, batch, jax.random.key(2), scan) for scan in (example.ragged_scan, example.masked_scan)
    )
    assert_nearly(ours, theirs, TOLERANCE)
