"""NUTS with chains that do not wait: the same draws, and the derivatives of the posteriors' data."""

import jax
import numpy as np
import pytest

pytest.importorskip("blackjax")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]


@pytest.mark.parametrize("name", ["eight schools", "rats"])
def test_draws_are_those_of_chains_that_wait(example, name):
    start, log_density = example.POSTERIORS[name]
    parameters = {"step_size": 0.2, "inverse_mass_matrix": np.full(sum(x.size for x in jax.tree.leaves(start)), 0.05)}
    example.ROUNDS = 1
    waiting, free = example.both(example.of_blackjax(example.Posterior(start, log_density), parameters, 6), 5, start)
    assert (waiting.leapfrogs == free.leapfrogs).all()
    assert len(set(waiting.leapfrogs.ravel().tolist())) > 3  # trees differ
    for parameter, draws in waiting.draws.items():
        np.testing.assert_allclose(draws, free.draws[parameter], rtol=1e-6, atol=1e-8)
