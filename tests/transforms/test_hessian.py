"""Second and third derivatives, every composition of the two modes."""

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

from tests.problem import KINDS, LOOPS, XS, H, W, name_of
from tests.reference import assert_close

COMPOSITIONS = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


def of_start(program):
    return lambda h, n: program(W, h, XS, n)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("loop", ["scan", "reverse_stop", "while"])
def test_hessian(loop, kind, composition):
    program, expected = LOOPS[loop]
    hessian = jax.jit(COMPOSITIONS[composition](of_start(program(kind))))
    for n in (0, 6):
        assert_close(hessian(H, jnp.int32(n)), jax.hessian(lambda h, n=n: of_start(expected)(h, n))(H))


@pytest.mark.parametrize("composition", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_without_jit(kind, composition):
    program, expected = LOOPS["scan"]
    hessian = COMPOSITIONS[composition](of_start(program(kind)))
    assert_close(hessian(H, jnp.int32(6)), jax.hessian(lambda h: of_start(expected)(h, 6))(H))


@pytest.mark.parametrize("composition", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_hessian_of_everything(kind, composition):
    """With respect to constants, carry and rows at once."""
    program, expected = LOOPS["scan"]
    flat, unravel = ravel_pytree((W, H, XS[:5]))

    def of_flat(program):
        return lambda v, n: program(*unravel(v), n)

    hessian = jax.jit(COMPOSITIONS[composition](of_flat(program(kind))))
    assert_close(hessian(flat, jnp.int32(5)), jax.hessian(lambda v: of_flat(expected)(v, 5))(flat))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_third_derivative_in_reverse(kind):
    program, expected = LOOPS["scan"]

    def third(f):
        return jax.grad(lambda h: jax.grad(lambda h: jax.grad(f)(h).sum())(h) @ h)

    actual = jax.jit(lambda h, n: third(lambda h: of_start(program(kind))(h, n))(h))(H, jnp.int32(6))
    assert_close(actual, third(lambda h: of_start(expected)(h, 6))(H))
