"""The jvp rule of a loop: which leaves get tangents, and the loop on pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.autodiff.jvp import jvp_loop
from loopax._src.core.ir.loop import LoopInputs, loop_p, run
from loopax._src.core.jaxpr.util import INDEX, MOST_STEPS, trace
from tests.support.core_loops import INPUTS, loop_of


def test_a_dependence_without_a_derivative_gets_no_tangent():
    """Dependence analysis is an upper bound; a derivative that is identically zero tightens it."""
    f = jax.ShapeDtypeStruct((), jnp.float64)
    closed = trace(lambda _, a, h, k: [h * a, jax.lax.stop_gradient(h) + k], [INDEX, f, f, f])
    loop = loop_of(body=closed, num_consts=1, num_carry=2)
    _, inputs, outputs = jvp_loop(loop, LoopInputs((True,), (False, False), ()))
    assert inputs.carry == outputs.carry == (True, False)


def test_one_loop_is_bound():
    loop = loop_of()
    function = lambda a: run(loop, np.int32(0), np.int32(3), [a, 2.0], INPUTS[1], INPUTS[2]).carry[0]
    jaxpr = jax.make_jaxpr(lambda a: jax.jvp(function, (a,), (1.0,)))(0.8).jaxpr
    assert [eqn.primitive for eqn in jaxpr.eqns].count(loop_p) == 1


@pytest.mark.parametrize(("first", "known"), [(MOST_STEPS - 4, True), (MOST_STEPS - 3, False), (MOST_STEPS - 1, False)])
def test_tangents_are_nan_after_more_steps_than_can_be_counted(first, known):
    """Three steps of a loop without a bound: the number of a row, and with it of steps, stays at the largest one.

    All three are taken, so the value is right; only the derivative is unknown.
    """
    f, i = jnp.zeros(()).aval, jnp.int32(0)
    closed = trace(lambda _, go, h, n: [n < 2, h * 0.5, n + 1], [INDEX, jnp.bool_(True).aval, f, i.aval])
    loop = loop_of(body=closed, num_consts=0, num_carry=3, bound=None, predicated=True)
    low, high = np.int32(first), np.int32(MOST_STEPS)
    function = lambda h: run(loop, low, high, [], [jnp.bool_(True), h, i], []).carry[1]
    value, tangent = jax.jit(lambda h: jax.jvp(function, (h,), (1.0,)))(8.0)
    assert value == 1.0
    assert tangent == 0.125 if known else jnp.isnan(tangent)
