"""What programs are said to be: whether they end, and whether they are a few elementwise operations."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.jaxpr.dependence import always_ends, is_elementwise

W = jnp.eye(3)


def doubled(x):
    return lax.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, x)


of_its_own = jax.custom_jvp(doubled)
of_its_own.defjvp(lambda primals, tangents: (of_its_own(*primals), *tangents))


def heard(x):
    jax.debug.callback(lambda _: None, x)
    return x


ENDING = {
    "arithmetic": lambda x: jnp.sin(x) + 1,
    "product": lambda x: W @ x,
    "scan": lambda x: lax.scan(lambda x, _: (2 * x, None), x, None, 3)[0],
    "loop with a bound": lambda x: lx.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, x, max_steps=3, throw=False),
    "branch": lambda x: lx.cond(x[0] > 0, jnp.sin, jnp.cos, x),
}
PERHAPS_NOT = {
    "while": doubled,
    "loop without a bound": lambda x: lx.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, x),
    "in a scan": lambda x: lax.scan(lambda x, _: (doubled(x), None), x, None, 3)[0],
    "in a loop": lambda x: lx.fori_loop(0, 3, lambda _, x: doubled(x), x),
    "in a branch": lambda x: lx.cond(x[0] > 0, doubled, jnp.cos, x),
    "in jit": jax.jit(doubled),
    "with an effect": heard,
}


@pytest.mark.parametrize("name", [*ENDING, *PERHAPS_NOT])
def test_programs_that_end(name):
    program = jax.make_jaxpr((ENDING | PERHAPS_NOT)[name])(jnp.ones(3))
    assert always_ends(program.jaxpr) == (name in ENDING)


ELEMENTWISE = {
    "arithmetic": lambda x: jnp.sin(x) * x - 1,
    "selection": lambda x: jnp.where(x > 0, x, -x),
    "in jit": jax.jit(lambda x: jnp.cos(x) + x),
    "nothing": lambda x: x,
}
OTHER = {
    "product": lambda x: W @ x,
    "product in jit": jax.jit(lambda x: W @ x),
    "product among others": lambda x: jnp.sin(x) + W @ jnp.cos(x),
    "sort": jnp.sort,
    "conditional": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "branch": ENDING["branch"],
    "scan": ENDING["scan"],
    "while": doubled,
    "effect": heard,
    "while with a derivative of its own": of_its_own,
    "many": lambda x: sum(jnp.sin(x + i) for i in range(30)),
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *OTHER])
def test_programs_that_are_elementwise(name):
    program = jax.make_jaxpr((ELEMENTWISE | OTHER)[name])(jnp.ones(3))
    assert is_elementwise(program) == (name in ELEMENTWISE)
