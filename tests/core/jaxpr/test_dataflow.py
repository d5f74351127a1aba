"""Which outputs of a body depend on which inputs, in one step and after any number of steps."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from loopax._src.core.jaxpr.dependence import close_over_carry, dependence, dependence_fixpoint, members
from loopax._src.core.jaxpr.util import trace

F = jax.ShapeDtypeStruct((), jnp.float64)


def depends(function, num_inputs):
    return [members(bits) for bits in dependence(trace(function, [F] * num_inputs))]


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_calls_are_looked_into(call):
    inner = call(lambda a, b: (a + 1, b + 1))
    assert depends(lambda a, b: list(inner(a, b)), 2) == [[0], [1]]


def test_branches_are_looked_into():
    """Each result depends on what chooses, and on what any of the branches makes it of."""
    branches = [lambda a, b: (a + 1, b), lambda a, b: (a, a * b)]
    assert depends(lambda n, a, b: list(lax.switch(n.astype(int), branches, a, b)), 3) == [[0, 1], [0, 1, 2]]


def test_a_scan_of_jax_is_looked_into():
    """A leaf is handed on to the next, which reaches the rows."""

    def function(const, a, b, x):
        step = lambda c, x: ((c[0] * const, c[0] + c[1]), (c[1], x))
        (a, b), (ys, zs) = lax.scan(step, (a, b), x[None])
        return [a, b, ys, zs]

    assert depends(function, 4) == [[0, 1], [0, 1, 2], [0, 1, 2], [3]]


def test_a_loop_of_jax_depends_on_what_decides_on_its_steps():
    """`a` decides how often the third leaf is doubled. The second one stays as it is, whatever `a` is."""

    def function(a, b, c):
        return list(lax.while_loop(lambda s: s[0] < 3 * a, lambda s: (s[0] + 1, s[1], s[2] * 2), (b, b, c)))

    assert depends(function, 3) == [[0, 1], [1], [0, 1, 2]]


def test_any_number_of_steps():
    """A leaf that is handed from one to the next reaches the last one after two steps."""
    shift = trace(lambda a, b, c: [a, a + b, b + c], [F] * 3)
    assert dependence_fixpoint(shift, (True, False, False), range(3)) == (True, True, True)
    assert dependence_fixpoint(shift, (False, False, True), range(3)) == (False, False, True)
    assert close_over_carry(dependence(shift), range(3), [1, 2, 4]) == [1, 3, 7]
