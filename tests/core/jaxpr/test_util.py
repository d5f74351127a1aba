"""Leaves in named groups."""

import pytest

from loopax._src.core.ir.loop import LoopOutputs
from loopax._src.core.jaxpr.util import flatten, unflatten

GROUPS = LoopOutputs(["a"], ["b", "c", "d"])


@pytest.mark.parametrize("leaves", ["abc", "abcde"])
def test_unflatten_refuses_another_number_of_leaves(leaves):
    """Fewer leaves would make a group shorter than its types, more would be lost."""
    assert unflatten(GROUPS, flatten(GROUPS)) == GROUPS
    with pytest.raises(AssertionError):
        unflatten(GROUPS, leaves)
