"""Loops in the body of a batch in lockstep: a lane that has finished takes no step of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.jaxpr.util import bind_again, evaluate
from loopax._src.core.masking import fill_inactive_p
from loopax._src.jax_internals import equations_in
from tests.core.batching.counting import alone
from tests.support.reference import assert_close

# The first lane has finished before it begins, and is far from the end of the inner loop; the others are near.
STARTS, LENGTHS = np.array([-1e4, 6.0, 7.5, 3.0]), np.array([0, 2, 3, 1])
NEAR = np.array([0.4, 0.6, 0.75, 0.3])


def ends_by_predicate(w, y):
    return lx.while_loop(lambda y: y < 8.0, lambda y: y + w, y)


def begins_in_any_case(w, y):
    """The predicate is the same for all lanes at first."""
    step = lambda c: (c[0] + w, c[0] + w < 8.0)
    return lx.while_loop(lambda c: c[1], step, (y, True))[0]


def ends_by_limit(w, y):
    steps = jnp.maximum(jnp.ceil(8.0 - y), 0.0).astype(jnp.int32)
    return lx.fori_loop(0, steps, lambda _, y: y + w * jnp.cos(y) ** 2, y)


FORMS = {
    "predicate": ends_by_predicate,
    "any case": begins_in_any_case,
    "limit": ends_by_limit,
    "jit": jax.jit(ends_by_predicate),
    "branch": lambda w, y: lx.cond(y < 7.0, ends_by_predicate, lambda w, y: y - w, w, y),
    "branch of lax": lambda w, y: lax.cond(y < 7.0, ends_by_predicate, lambda w, y: y - w, w, y),
    "the same steps": lambda w, y: lx.fori_loop(0, 2, lambda _, y: ends_by_predicate(w, y) - 1.0, y),
    "scan": lambda w, y: lax.scan(lambda y, _: (ends_by_predicate(w, y) - 1.0, None), y, None, 2)[0],
}


def nested(inner):
    """Of (w, start, outer steps)."""
    return lambda w, y, n: lx.fori_loop(0, n, lambda _, y: inner(w, y) - 3.0 * w, y, max_steps=4)


def most_inner_steps(f, *args):
    """The most iterations of an innermost loop in the first step of the loop around it."""
    found = []

    def equation(eqn, operands):
        results = bind_again(eqn, operands)
        if eqn.primitive is loop_p:
            loop = Loop(**eqn.params)
            low, _, *others = operands
            inputs = loop.inputs(others)
            before = len(found)
            evaluate(loop.body, [low, *inputs.consts, *inputs.carry, *(x[0] for x in inputs.xs)], equation)
            if len(found) == before and loop.bound != 1:
                found.append(int(results[0]))
        elif jaxi.is_scan(eqn) and (scan := jaxi.lax_loop(eqn)):
            _, consts, init, xs = scan.groups(operands)
            evaluate(scan.body, [*consts, *init, *(x[0] for x in xs)], equation)
        elif eqn.params.get("jaxpr") is not None:
            evaluate(eqn.params["jaxpr"], operands, equation)
        return results

    closed = jax.make_jaxpr(jax.vmap(f, (None, 0, 0)))(*args)
    evaluate(closed, args, equation)
    return max(found)


@pytest.mark.parametrize("form", FORMS)
def test_a_finished_lane_takes_no_step(form):
    found = most_inner_steps(nested(FORMS[form]), jnp.float64(1.0), STARTS, LENGTHS)
    assert 0 < found <= 9  # a start of the first lane would take 10 000


def fills(inner):
    """When operands of finished lanes are filled."""
    closed = jax.make_jaxpr(jax.vmap(nested(inner), (None, 0, 0)))(1.0, STARTS, LENGTHS)
    return {eqn.params["when"] for eqn in equations_in(closed) if eqn.primitive is fill_inactive_p}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "the same steps"])
def test_nothing_is_filled_forward(form):
    assert fills(FORMS[form]) <= {"in_derivatives", "never"}


def test_operations_of_lanes_are_arithmetic():
    """Batches of batches, and loops inside that read rows of an array that a finished lane keeps as its own."""
    count = lambda x, n: lx.while_loop(lambda x: x < n, lambda x: x + jnp.sin(x) + 1.0, x)
    of_batches = jax.make_jaxpr(jax.vmap(jax.vmap(count)))(np.ones((2, 3)), np.arange(6.0).reshape(2, 3))

    def reads_rows(x, k, n):
        def body(i, x):
            found = lx.while_loop(lambda at: (at > 0) & (x[at, 0] < 1.0), lambda at: at - 1, k)
            return x.at[i].set(jnp.sin(x[found]))

        return lx.fori_loop(0, n, body, x)

    numbers = np.array([1, 3, 2], np.int32)
    of_rows = jax.make_jaxpr(jax.vmap(reads_rows))(np.ones((3, 40, 8)), numbers, numbers)
    for closed in (of_batches, of_rows):
        found = [eqn.params["when"] for eqn in equations_in(closed) if eqn.primitive is fill_inactive_p]
        assert found
        assert set(found) <= {"in_derivatives", "never"}


def test_a_lane_may_stay_in_what_is_no_loop_of_loopax():
    assert "always" in fills(lambda w, y: lax.while_loop(lambda y: y < 8.0, lambda y: y + w, y))
    assert "always" in fills(lambda w, y: ends_by_predicate(w, y) + jnp.linalg.inv(y[None, None])[0, 0])
    assert "always" in fills(FORMS["the same steps"])  # derivatives of that loop would not ask whether lanes are filled
    shared = lambda w, y: lx.cond(w > 0.0, ends_by_predicate, lambda w, y: y, w, y)
    assert "always" in fills(shared)
    # A rule of its own is not told whether lanes are filled.
    with_rule = jax.custom_jvp(ends_by_predicate)
    with_rule.defjvp(lambda primals, tangents: (ends_by_predicate(*primals), tangents[0] + tangents[1]))
    assert "always" in fills(with_rule)


def leaves_no_domain(w, y):
    """Only where the inner loop takes a step, as it does in each step of a lane that is active."""
    t = lx.while_loop(lambda t: t < y, lambda t: t + 0.2 * w, 0.0)
    return jnp.sqrt(w * t)


def counts_steps(w, y):
    k, s = lx.while_loop(lambda c: c[1] < y, lambda c: (c[0] + 1.0, c[1] + 0.2 * w), (0.0, 0.0))
    return w * s / k


def in_the_same_steps(w, y):
    return lx.fori_loop(0, 2, lambda _, y: ends_by_predicate(0.1 * w, 7.0 + 0.1 * y) - 7.0, y)


@pytest.mark.parametrize("inner", [leaves_no_domain, counts_steps, in_the_same_steps])
@pytest.mark.parametrize("outer", ["fori_loop", "while_loop"])
def test_derivatives_of_what_lanes_share(inner, outer):
    """A lane that is given what an active one has takes the steps of that one."""

    def f(w, y, n):
        if outer == "fori_loop":
            return lx.fori_loop(0, n, lambda _, y: inner(w, y), y, max_steps=4)
        return lx.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, inner(w, c[1])), (0, y), max_steps=4)[1]

    starts, lengths = np.array([0.9, 0.6, 0.75]), np.array([0, 2, 3])
    first, second = (alone(lambda y, n, d=d: d(f)(1.0, y, n), starts, lengths).sum() for d in (jax.grad, jax.hessian))
    total = lambda w: jax.vmap(f, (None, 0, 0))(w, starts, lengths).sum()
    slopes = lambda w: jax.vmap(jax.grad(f), (None, 0, 0))(w, starts, lengths).sum()
    found = jax.jit(lambda w: (jax.grad(total)(w), slopes(w), jax.hessian(total)(w), jax.grad(slopes)(w)))(1.0)
    assert_close(found, (first, first, second, second))


@pytest.mark.parametrize("form", FORMS)
def test_values_and_derivatives_are_those_of_lanes_alone(form):
    def inner(w, y):  # of which no derivative exists for a lane that has finished
        return jnp.log(FORMS[form](w, jnp.sqrt(y))) + 1.0

    f, lengths = nested(inner), np.array([0, 2, 3, 1])
    starts = np.array([-1.0, 40.0, 50.0, 30.0])
    lane = lambda y, n: (f(1.0, y, n), *jax.grad(f, (0, 1))(1.0, y, n))
    values, of_weight, of_start = alone(lane, starts, lengths)

    @jax.jit
    def batched(w, y):
        total = lambda w, y: jax.vmap(f, (None, 0, 0))(w, y, lengths).sum()
        each = jax.vmap(jax.value_and_grad(f, (0, 1)), (None, 0, 0))(w, y, lengths)
        return jax.grad(total, (0, 1))(w, y), each, jax.jvp(total, (w, y), (1.0, jnp.ones_like(y)))[1]

    of_all, of_each, tangent = batched(1.0, starts)
    assert_close(of_all, (of_weight.sum(), of_start))
    assert_close(of_each, (values, (of_weight, of_start)))
    assert_close(tangent, of_weight.sum() + of_start.sum())


def test_a_loop_of_the_same_length_for_all_lanes_stays_one():
    inner = lambda w, y: lx.fori_loop(0, 5, lambda _, y: jnp.sin(w * y), y)
    closed = jax.make_jaxpr(jax.vmap(nested(inner), (None, 0, 0)))(1.0, NEAR, LENGTHS)
    inner_loops = [eqn for eqn in equations_in(closed) if eqn.primitive is loop_p][1:]
    assert [(eqn.params["is_fixed"], len(eqn.invars[1].aval.shape)) for eqn in inner_loops] == [(True, 0)]
    assert "select" not in str(Loop(**inner_loops[0].params).body)
