"""Programs that are run operation by operation, without a compiler: the same values and derivatives."""

import jax
import numpy as np
import pytest

from tests.support.derivatives import H, W, derivatives
from tests.support.op_by_op import op_by_op
from tests.support.problem import KINDS, LOOPS, XS, name_of
from tests.support.reference import assert_close


@pytest.mark.parametrize("kind", [pytest.param(KINDS[0], marks=pytest.mark.slow), *KINDS[1:]], ids=name_of)
@pytest.mark.parametrize("loop", ["while", "fori", pytest.param("scan", marks=pytest.mark.slow)])
def test_gradient(loop, kind):
    actual = op_by_op(jax.value_and_grad(LOOPS[loop][0](kind), (0, 1, 2)))(W, H, XS, np.int32(5))
    assert_close(actual, derivatives(loop, 5)[:2])


@pytest.mark.slow
def test_hessian():
    program = LOOPS["scan"][0](KINDS[0])
    actual = op_by_op(jax.hessian(lambda h: program(W, h, XS, np.int32(5))))(H)
    assert_close(actual, derivatives("scan", 5).hessian)
