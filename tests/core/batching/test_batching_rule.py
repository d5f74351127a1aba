"""The batching rule of a loop: which results have lanes, where, and which loop is bound."""

import jax
import numpy as np

from loopax._src.core.ir.loop import loop_p, run
from loopax._src.core.jaxpr.util import flatten
from tests.support.core_loops import BOUND, INPUTS, loop_of

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
