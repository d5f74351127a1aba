"""`jax.disable_jit`: the same values and derivatives."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.problem import KINDS, LOOPS, XS, H, W, name_of
from tests.support.reference import assert_close


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", ["scan", "while", "fori"])
def test_gradient(loop, kind):
    program, expected = LOOPS[loop]
    with jax.disable_jit():
        actual = jax.value_and_grad(program(kind), (0, 1, 2))(W, H, XS, jnp.int32(5))
    assert_close(actual, jax.value_and_grad(expected, (0, 1, 2))(W, H, XS, 5))


def test_hessian():
    program, expected = LOOPS["scan"]
    with jax.disable_jit():
        actual = jax.hessian(lambda h: program(KINDS[0])(W, h, XS, jnp.int32(5)))(H)
    assert_close(actual, jax.hessian(lambda h: expected(W, h, XS, 5))(H))
