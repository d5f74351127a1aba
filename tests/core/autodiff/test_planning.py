"""A kind is asked for its plan also where no derivative is taken, and then it chooses without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.reference import assert_close

X = 1.3


def is_large(y):
    """A bool, which has no tangent."""
    return jnp.sin(y) > 0.5


def counted(loop, x):
    """How often a sine was large: an integer, which has none either."""
    return loop(0, 3, lambda i, c: (jnp.sin(c[0]), c[1] + is_large(c[0]).astype(c[1].dtype)), (x, np.int32(0)))[1]


def chosen(flag):
    """A number that it decides on."""
    return jnp.where(flag, 1.5, 0.5)


# Loops of primals without a tangent. In `jax.checkpoint`, JAX looks for what is the same at every step of a scan, and
# asks for the parts of these loops whose operands are known.
INNER = {
    "no derivative": lambda loop, x: lax.stop_gradient(loop(0, 3, lambda i, y: jnp.sin(y), x)),
    "bool": lambda loop, x: chosen(loop(0, 3, lambda i, y: (jnp.sin(y[0]), y[1] ^ is_large(y[0])), (x, True))[1]),
    "integer": lambda loop, x: loop(0, 3, lambda i, y: y + (x * 3).astype(y.dtype), np.int32(1)).astype(x.dtype),
    "both": lambda loop, x: counted(loop, x).astype(x.dtype),
    "condition": lambda loop, x: chosen(loop(0, 3, lambda i, y: y & is_large(x), jnp.bool(True))),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("lanes", [None, 2])
def test_loops_without_tangents_in_a_scan(name, lanes):
    def gradient(loop):
        step = lambda c, _: (c * INNER[name](loop, c) * 0.5, None)
        f = jax.checkpoint(lambda x: lax.scan(step, x, None, length=3)[0])
        return jax.grad(f) if lanes is None else jax.vmap(jax.grad(f))

    def unrolled(low, high, body, value):
        for i in range(low, high):
            value = body(i, value)
        return value

    x = jnp.float64(X) if lanes is None else jnp.linspace(0.2, X, lanes)
    assert_close(gradient(lx.fori_loop)(x), gradient(unrolled)(x))
