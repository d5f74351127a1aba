"""The rules of jvp, dead code and `jax.checkpoint`, equation by equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.autodiff.dce import loop_dce
from loopax._src.core.autodiff.jvp import jvp_loop
from loopax._src.core.ir.loop import Loop, LoopInputs, loop_p, run
from loopax._src.core.jaxpr.util import INDEX, MOST_STEPS, flatten, trace
from tests.support.core_loops import INPUTS, loop_of
from tests.support.reference import assert_close

# ---- tangents: which leaves get some, and after how many steps


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


# ---- dead code


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


# ---- checkpoints


@pytest.mark.parametrize("lanes", [lx.Lockstep(), lx.Compact(min_lanes=1, shrink=2)], ids=["lockstep", "compact"])
@pytest.mark.parametrize("loop", ["fori", "while"])
def test_batches_that_depend_on_no_tangent(loop, lanes):
    """JAX asks in `jax.checkpoint` for the known part of a batch that is known, too."""
    step = lambda h: jnp.sin(h) + 1.2 * h

    def run(n, h):
        if loop == "fori":
            return lx.fori_loop(0, n, lambda _, h: step(h), h, max_steps=5, lanes=lanes)
        return lx.while_loop(lambda h: h < 2.0, step, h, max_steps=5, lanes=lanes)

    starts, counts = np.array([0.5, 0.7, 0.2]), np.array([1, 4, 2])
    batch = lambda scale, h: jnp.sin(scale * jax.vmap(run)(counts, h)).sum()
    found = [jax.jit(jax.grad(f, (0, 1)))(2.0, starts) for f in (batch, jax.checkpoint(batch))]
    assert_close(found[0], found[1])
    assert_close(jax.jit(jax.grad(jax.checkpoint(batch)))(2.0, starts), found[0][0])
    second = [jax.jit(jax.grad(jax.grad(f), 1))(2.0, starts) for f in (batch, jax.checkpoint(batch))]
    assert_close(second[0], second[1])
