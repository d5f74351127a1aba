"""The jvp rule of a loop: which leaves get tangents, and the loop on pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.autodiff.jvp import jvp_loop
from loopax._src.core.ir.loop import LoopInputs, loop_p, run
from loopax._src.core.jaxpr.util import INDEX, MOST_STEPS, flatten, trace
from tests.support.core_loops import BOUND, INPUTS, expected, loop_of
from tests.support.reference import assert_close

NOTHING = LoopInputs((False, False), (False, False, False), (False,))


def test_what_a_tangent_reaches():
    """A tangent of `b` reaches the third leaf in one step, the first and its row in two; integers have none."""
    _, inputs, outputs = jvp_loop(loop_of(), NOTHING._replace(consts=(False, True)))
    assert inputs == LoopInputs((False, True), (True, False, True), (False,))
    assert outputs == ((True, False, True), (True, False))


def test_a_dependence_without_a_derivative_gets_no_tangent():
    """Dependence analysis is an upper bound; a derivative that is identically zero tightens it."""
    f = jax.ShapeDtypeStruct((), jnp.float64)
    closed = trace(lambda _, a, h, k: [h * a, jax.lax.stop_gradient(h) + k], [INDEX, f, f, f])
    loop = loop_of(body=closed, num_consts=1, num_carry=2)
    _, inputs, outputs = jvp_loop(loop, LoopInputs((True,), (False, False), ()))
    assert inputs.carry == outputs.carry == (True, False)


def test_tangents_stand_behind_the_primals_of_their_group():
    perturbed = NOTHING._replace(consts=(False, True))
    pair, inputs, outputs = jvp_loop(loop_of(), perturbed)
    assert [pair.num_consts, pair.num_carry] == [2 + 1, 3 + 2]
    assert len(pair.body.in_avals) == 1 + sum(map(len, inputs)) + sum(flatten(inputs))
    assert len(pair.body.out_avals) == sum(map(len, outputs)) + sum(flatten(outputs))


def test_saved_leaves_save_their_tangents():
    loop = loop_of(saved=(True, False, False))
    pair, _, _ = jvp_loop(loop, NOTHING._replace(consts=(True, False)))
    assert pair.saved == (True, False, False, True)


@pytest.mark.parametrize("num_steps", [0, 1, BOUND])
def test_values_and_tangents(num_steps):
    """Central differences of the same loop in Python; the operands are perturbed one after the other."""
    loop = loop_of()
    floats = [0, 1, 2, 4, 5]
    flat = flatten(INPUTS)

    def function(*values):
        operands = list(flat)
        for i, value in zip(floats, values, strict=True):
            operands[i] = value
        inputs = loop.inputs(operands)
        return run(loop, np.int32(0), np.int32(num_steps), inputs.consts, inputs.carry, inputs.xs).leaves

    def in_python(values):
        operands = list(flat)
        for i, value in zip(floats, values, strict=True):
            operands[i] = value
        return expected(num_steps, *loop.inputs(operands))

    values = [np.asarray(flat[i]) for i in floats]
    compiled = jax.jit(lambda values, tangents: jax.jvp(function, values, tangents))
    for i in range(len(values)):
        tangents = [np.ones_like(v) if j == i else np.zeros_like(v) for j, v in enumerate(values)]
        out, dots = compiled(tuple(values), tuple(tangents))
        assert_close(out, in_python(values))
        ends = [in_python([v + s * t for v, t in zip(values, tangents, strict=True)]) for s in (1e-6, -1e-6)]
        for dot, after, before in zip(dots, *ends, strict=True):
            if jnp.issubdtype(np.asarray(after).dtype, np.floating):
                np.testing.assert_allclose(dot, (after - before) / 2e-6, rtol=1e-6, atol=1e-8)
            else:
                assert dot.dtype == jax.dtypes.float0


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
