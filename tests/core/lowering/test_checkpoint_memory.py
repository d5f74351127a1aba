"""How much memory a budget of checkpoints takes, with and without a bound, as the compiler reports it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.core.lowering.test_memory import STATE, carries, temporary


@cache
def unbounded(checkpoints, loop=lx.fori_loop):
    """Temporary memory of the gradient of a loop without a bound, in carries."""
    if loop is lx.fori_loop:
        f = lambda h, n: lx.fori_loop(0, n, lambda i, h: jnp.tanh(1.1 * h), h, kind=lx.Checkpointed(checkpoints)).sum()
    else:
        body = lambda c: (jnp.tanh(1.1 * c[0]), c[1] + 1)
        f = lambda h, n: lx.while_loop(lambda c: c[1] < n, body, (h, 0), kind=lx.Checkpointed(checkpoints))[0].sum()
    return temporary(jax.grad(f), STATE, np.int32(9)) / STATE.nbytes


@pytest.mark.parametrize("loop", [lx.fori_loop, lx.while_loop])
def test_memory_is_the_number_of_checkpoints(loop):
    """Beside what does not depend on them: the current carry, its cotangent, copies of both, the step's residuals."""
    working = unbounded(2, loop) - 2
    assert working <= 7
    for checkpoints in (1, 10, 64):
        # A slot also has the number of its step, and more for the online schedule: up to 28 bytes beside 512.
        assert unbounded(checkpoints, loop) - working <= 1.06 * checkpoints


# One slot, and many; two levels, and too few slots for them.
BUDGETS = [(100, 20), (100, 100), (400, 1), (400, 50), (2500, 5), (2500, 100)]
MORE = [(100, 1), (100, 50), (400, 20), (400, 100), (2500, 1), (2500, 50)]


@pytest.mark.parametrize(
    ("steps", "checkpoints"), [*BUDGETS, *(pytest.param(*m, marks=pytest.mark.slow) for m in MORE)]
)
def test_memory_with_a_bound(steps, checkpoints):
    """Also where two levels are used: what a replayed block stores counts."""
    assert carries(lx.Checkpointed(checkpoints), steps) <= 1.06 * checkpoints + 6


@pytest.mark.parametrize("loop", [lx.fori_loop, lx.while_loop])
def test_default_slots_of_a_loop_without_a_bound(loop):
    assert unbounded(None, loop) == unbounded(64, loop)
