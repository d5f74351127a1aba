"""Dead-code elimination in a loop, and what `jax.checkpoint` runs now, equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.autodiff.dce import loop_dce
from loopax._src.core.ir.loop import Loop, loop_p, run
from loopax._src.core.jaxpr.util import flatten
from tests.support.core_loops import INPUTS, loop_of

RESULTS = ["num_steps", "h", "count", "fixed", "row of h", "row of x"]
OPERANDS = ["low", "high", "a", "b", "h", "count", "fixed", "x"]


def equation(**fields):
    """A loop as an equation."""
    loop = loop_of(**fields)
    function = lambda low, high, *operands: run(loop, low, high, *loop.inputs(operands)).leaves
    (eqn,) = jax.make_jaxpr(function)(np.int32(0), np.int32(3), *flatten(INPUTS)).jaxpr.eqns
    assert eqn.primitive is loop_p
    return eqn


def flags(names, chosen):
    return [name in chosen for name in names]


@pytest.mark.parametrize(
    ("used", "needed"),
    [
        ("h", {"a", "b", "h", "fixed", "x"}),  # which reads the third leaf, and with it b
        ("fixed", {"b", "fixed"}),
        ("count", {"count"}),
        ("row of x", {"x"}),
        ("row of h", {"a", "b", "h", "fixed", "x"}),
        ("num_steps", set()),
    ],
)
def test_needed_operands(used, needed):
    kept, slim = loop_dce(flags(RESULTS, {used}), equation())
    assert kept == flags(OPERANDS, {"low", "high", *needed})
    assert len(slim.invars) == 2 + len(needed)
    # Leaves of the carry that are needed are results as well, and so is the number of steps.
    carry = needed & {"h", "count", "fixed"}
    assert len(slim.outvars) == 1 + len(carry) + (used in {"row of h", "row of x"})
    assert Loop(**slim.params).num_carry == len(carry)


def test_the_predicate_is_always_needed():
    """The first leaf of the carry decides on the number of steps, on which all results depend."""
    f = jnp.zeros(())
    function = lambda go, h, k: (h < k, h + 1.0, k)
    body = jax.make_jaxpr(lambda row, *carry: function(*carry))(0, True, f, f)
    eqn_loop = loop_of(body=body, num_consts=0, num_carry=3, predicated=True)
    run_it = lambda *carry: run(eqn_loop, np.int32(0), np.int32(3), [], carry, []).leaves
    (eqn,) = jax.make_jaxpr(run_it)(True, 0.0, 2.0).jaxpr.eqns
    kept, slim = loop_dce([True, False, False], eqn)  # k is a constant: `run` has made it one
    assert kept == [True] * len(eqn.invars)
    assert Loop(**slim.params).predicated
