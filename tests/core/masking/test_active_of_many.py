"""Which lanes are active: one of many, and the largest of many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.masking import an_active, over_lanes


@pytest.mark.parametrize("lanes", [1, 7, 1024, 1500])
def test_an_active_lane_is_found(lanes):
    find = jax.jit(an_active)
    for place in {0, lanes // 2, lanes - 1}:
        assert find(np.arange(lanes) == place) == place
        assert find(np.arange(lanes) >= place) >= place
    assert 0 <= find(np.zeros(lanes, bool)) < lanes


@pytest.mark.parametrize("lanes", [1, 7, 1024, 1500])
def test_the_largest_of_many_lanes(lanes):
    largest, is_any = (jax.jit(lambda x, reduce=reduce: over_lanes(reduce, x)) for reduce in (jnp.max, jnp.any))
    for place in {0, lanes // 2, lanes - 1}:
        values = np.roll(np.arange(lanes), place + 1)
        assert values[place] == largest(values) == lanes - 1
        assert is_any(np.arange(lanes) == place)
    assert not is_any(np.zeros(lanes, bool))
