"""The batching rule of a loop: which results have lanes, where, and which loop is bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.ir.lanes import Compact, Lockstep
from loopax._src.core.ir.loop import loop_p, run
from loopax._src.core.jaxpr.util import INDEX, flatten, trace
from tests.support.core_loops import BOUND, INPUTS, expected, loop_of
from tests.support.reference import assert_close

LANES, LENGTHS = 3, np.array([0, 4, BOUND], np.int32)
OPERANDS = ["high", "a", "b", "h", "count", "fixed", "x"]
SCALES = np.array([1.0, 0.5, -0.25])


def batched(lanes_of, **fields):
    """The loop under `vmap`, where these operands have lanes; and what they are."""
    loop = loop_of(**fields)
    operands = [np.int32(3), *flatten(INPUTS)]
    for i, name in enumerate(OPERANDS):
        if name == "high" and name in lanes_of:
            operands[i] = LENGTHS
        elif name in lanes_of:
            operands[i] = np.stack([scale * operands[i] for scale in SCALES])
    function = lambda high, *operands: run(loop, np.int32(0), high, *loop.inputs(operands)).leaves
    in_axes = tuple(0 if name in lanes_of else None for name in OPERANDS)
    return jax.vmap(function, in_axes, out_axes=0), operands


def loops_in(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive is loop_p]


@pytest.mark.parametrize("lanes_of", [["a"], ["b"], ["h"], ["x"], ["high"], ["high", "x", "fixed"]], ids="-".join)
@pytest.mark.parametrize("how", [Lockstep(), Compact(2.0, 1)], ids=["lockstep", "compact"])
def test_every_lane_has_the_results_that_it_would_have_alone(lanes_of, how):
    function, operands = batched(lanes_of, lanes=how)
    results = jax.jit(function)(*operands)
    for lane in range(LANES):
        high, *own = (x[lane] if name in lanes_of else x for name, x in zip(OPERANDS, operands, strict=True))
        assert_close([y[lane] for y in results], expected(int(high), *loop_of().inputs(own)))


def test_lanes_of_one_operand_do_not_make_all_results_batched():
    """`b` reaches the carry but not the second rows, `a` neither the third leaf nor these."""
    for name, shapes in (("a", [(), (3,), (), (), (5, 3), (5,)]), ("b", [(), (3,), (), (3,), (5, 3), (5,)])):
        function, operands = batched([name])
        (eqn,) = loops_in(jax.make_jaxpr(function)(*operands).jaxpr)
        assert [variable.aval.shape for variable in eqn.outvars] == shapes


def test_rows_have_their_lanes_behind():
    """One row of all lanes is contiguous in memory."""
    function, operands = batched(["x"])
    (eqn,) = loops_in(jax.make_jaxpr(function)(*operands).jaxpr)
    assert eqn.invars[-1].aval.shape == (BOUND, LANES)


def test_lanes_with_limits_of_their_own_are_one_loop_up_to_the_largest():
    function, operands = batched(["high"])
    (eqn,) = loops_in(jax.make_jaxpr(function)(*operands).jaxpr)
    assert eqn.invars[1].aval.shape == ()  # one `high` for all
    assert all(variable.aval.shape[:1] == (LANES,) for variable in eqn.outvars[1:4])


def test_no_lanes_at_all():
    function = lambda high: run(loop_of(), np.int32(0), high, *INPUTS).leaves
    results = jax.jit(jax.vmap(function))(jnp.zeros(0, jnp.int32))
    assert [y.shape for y in results] == [(0,), (0,), (0,), (0,), (0, BOUND), (0, BOUND)]


@pytest.mark.parametrize(
    ("reverse", "lows", "highs"), [(False, [0, 3], 5), (True, 0, [5, 2])], ids=["ahead", "reverse"]
)
def test_rows_in_which_no_lane_is_active_are_passed_over(reverse, lows, highs):
    """Each lane takes one step, the first and the last row of its own; the rows between are nobody's."""
    seen = []

    def step(row, _, h):
        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        counted = jax.pure_callback(lambda h: seen.append(1) or h, shape, h, vmap_method="expand_dims")
        return [jnp.bool_(False), counted + row.astype(h.dtype)]

    scalar = lambda x: jnp.asarray(x).aval
    body = trace(step, [INDEX, scalar(True), scalar(0.0)])
    loop = loop_of(body=body, num_consts=0, num_carry=2, predicated=True, reverse=reverse)
    low, high = np.array(lows, np.int32), np.array(highs, np.int32)
    lane = lambda low, high: run(loop, low, high, [], [jnp.bool_(True), jnp.zeros(())], [])
    in_axes = tuple(0 if limit.ndim else None for limit in (low, high))
    out = jax.block_until_ready(jax.jit(jax.vmap(lane, in_axes))(low, high))
    np.testing.assert_array_equal(out.num_steps, [1, 1])
    np.testing.assert_array_equal(out.carry[1], [4, 1] if reverse else [0, 3])
    assert len(seen) == 2
