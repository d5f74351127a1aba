"""Numerical checks of first and second derivatives, in both modes, and of third ones in reverse."""

import jax
import jax.numpy as jnp
import pytest
from jax.test_util import check_grads

import loopax as lx
from tests.support.problem import KINDS, LOOPS, XS, H, W, name_of

# The difference quotients of this recurrence are off by 1e-5 with the default step of 1e-4.
EPS = 1e-5


# These take long. Slots have two schedules, for a known length and an unknown one; the Hessians of all loops are
# compared with Python loops elsewhere.
SLOTS = lx.Checkpointed(3)
CASES = [(loop, kind) for loop in LOOPS for kind in KINDS if kind != SLOTS or loop in ("scan", "stop")]


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_second_order(loop, kind):
    program = jax.jit(LOOPS[loop][0](kind))
    check_grads(lambda *args: program(*args, jnp.int32(6)), (W, H, XS), order=2, modes=("fwd", "rev"), eps=EPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_third_order_in_reverse(kind):
    program = jax.jit(LOOPS["scan"][0](kind))
    check_grads(lambda *args: program(*args, jnp.int32(6)), (W, H, XS), order=3, modes=("rev",), eps=EPS)
