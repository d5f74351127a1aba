"""Which lanes are active: one of many, and the largest of many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.masking.all_active import an_active, over_lanes


@pytest.mark.parametrize("lanes", [1, 7, 1024, 1500])
def test_an_active_lane_is_found(lanes):
    find = jax.jit(an_active)
    for place in {0, lanes // 2, lanes - 1}:
        assert find(np.arange(lanes) == place) == place
        assert find(np.arange(lanes) >= place) >= place
    assert 0 <= find(np.zeros(lanes, bool)) < lanes


@pytest.mark.parametrize("lanes", [1, 7, 1024, 1500])
def test_the_largest_of_many_lanes(lanes):
    values = np.random.RandomState(0).permutation(lanes)
    assert jax.jit(lambda x: over_lanes(jnp.max, x))(values) == lanes - 1
    assert not jax.jit(lambda x: over_lanes(jnp.any, x))(values < 0)
