"""Numerical checks of first and second derivatives, in both modes, and of third ones in reverse.

They take long; exact derivatives of all loops and kinds are compared in the other files of this folder.
"""

import jax
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.support.derivatives import XS, H, W
from tests.support.problem import KINDS, LOOPS, name_of

pytestmark = pytest.mark.slow

# The difference quotients of this recurrence are off by 1e-5 with the default step of 1e-4.
EPS = 1e-5

_, SLOTS, BOUNDED, RESIDUALS = KINDS
CASES = [("stop", SLOTS), ("reverse_stop", BOUNDED), ("while", RESIDUALS)]


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_second_order(loop, kind):
    program = jax.jit(LOOPS[loop][0](kind))
    check_grads(lambda *args: program(*args, np.int32(6)), (W, H, XS), order=2, modes=("fwd", "rev"), eps=EPS)


def test_third_order_in_reverse():
    program = jax.jit(LOOPS["scan"][0](RESIDUALS))
    check_grads(lambda *args: program(*args, np.int32(6)), (W, H, XS), order=3, modes=("rev",), eps=EPS)
