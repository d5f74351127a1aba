"""Leaves in named groups, and programs without dead code."""

import jax
import jax.numpy as jnp
import pytest

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import LoopOutputs
from loopax._src.core.jaxpr.util import flatten, unflatten

GROUPS = LoopOutputs(["a"], ["b", "c", "d"])


@pytest.mark.parametrize("leaves", ["abc", "abcde"])
def test_unflatten_refuses_another_number_of_leaves(leaves):
    """Fewer leaves would make a group shorter than its types, more would be lost."""
    assert unflatten(GROUPS, flatten(GROUPS)) == GROUPS
    with pytest.raises(AssertionError):
        unflatten(GROUPS, leaves)


def test_a_program_without_dead_code_stays_the_same():
    """So that caches know it. In an inner program, there may be some."""
    inner = jax.jit(lambda x: (jnp.cos(x), jnp.sin(x))[1])
    closed = jax.make_jaxpr(lambda x: inner(x) * 2.0)(1.0)
    less, used = jaxi.dce(closed, [True], False)
    assert used == [True]
    assert "cos" in str(closed)
    assert "cos" not in str(less)
    assert jaxi.dce(less, [True], False)[0] is less
    unused = jax.make_jaxpr(lambda x, y: (x * 2.0, y * 2.0))(1.0, 1.0)
    assert jaxi.dce(unused, [True, True], False)[0] is unused
    assert jaxi.dce(unused, [True, False], True)[0] is not unused
