"""`cond` and `switch` in the place of those of `jax.lax`: what JAX's own tests (`tests/peers`) ask and showed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.test_util import count_jit_and_pmap_lowerings

import loopax as lx
from tests.support.reference import assert_close

IS = jnp.array([True, False, True])
X = jnp.arange(3.0)


def same_as_lax(call):
    """Check that values, dtypes and weak types are those of `jax.lax`."""
    actual, wanted = call(lx.cond, lx.switch), call(lax.cond, lax.switch)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, wanted)
    assert_close(actual, wanted)


CALLS = {
    "one weak": lambda cond, _: cond(True, lambda: 1.0, lambda: jnp.float64(2.0)),
    "number as predicate": lambda cond, _: cond(0.5, lambda: 1, lambda: 2),
    "number below zero as predicate": lambda cond, _: cond(-0.5, lambda: 1, lambda: 2),
    "operand by name": lambda cond, _: cond(0, lambda x: x, lambda x: -x, operand=X),
    "an operand for each": lambda cond, _: [cond(p, X, lambda x: x + 1, (X, 2.0), lambda x: x[0] * x[1]) for p in IS],
    "key": lambda cond, _: jax.random.key_data(cond(True, lambda k: k, jax.random.clone, jax.random.key(1))),
    "clamped": lambda _, switch: switch(-5, [lambda x: x, lambda x: -x], X),
    "generator": lambda _, switch: switch(np.uint8(200), [lambda x, i=i: x * i for i in range(3)], X),
    "vmap": lambda cond, _: jax.vmap(lambda p: cond(p, lambda: 1.0, lambda: 2.0))(IS),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_disabled", [False, True])
def test_calls_of_lax(name, is_disabled) -> None:
    with jax.disable_jit(is_disabled):
        same_as_lax(CALLS[name])


def test_an_index_beyond_32_bits_is_clamped() -> None:
    """`jax.lax.switch` converts to 32 bits first, and takes branch 0."""
    assert lx.switch(2**40, [lambda: 0, lambda: 1, lambda: 2]) == 2
    assert lx.switch(-(2**40), [lambda: 0, lambda: 1, lambda: 2]) == 0
    assert lx.switch(jnp.uint64(2**63 + 1), [lambda: 0, lambda: 1, lambda: 2]) == 2


def test_what_all_branches_hand_on_stays_shared_by_lanes() -> None:
    weights = jnp.ones((3, 3))

    def step(x, weights):
        return lx.cond(x < 1, lambda x, w: (w @ X * x, w), lambda x, w: (w @ X + x, w), x, weights)

    out, same = jax.vmap(step, in_axes=(0, None), out_axes=(0, None))(X, weights)
    assert same is weights
    assert_close(out, jnp.array([step(x, weights)[0] for x in X]))

    def closed(x):
        return lx.switch(x.astype(int), [lambda x: (2 * x, weights)] * 2 + [lambda x: (3 * x, weights)], x)

    assert jax.vmap(closed, out_axes=(0, None))(X)[1] is weights


def test_what_one_branch_hands_on_is_of_its_lanes() -> None:
    out, both = jax.vmap(lambda p: lx.cond(p, lambda x: (x, x), lambda x: (-x, x), X), out_axes=(0, None))(IS)
    assert both is X
    assert_close(out, jnp.where(IS[:, None], X, -X))


@pytest.mark.parametrize("pred", [True, False])
def test_mutable_arrays_as_operands(pred) -> None:
    def after(cond):
        refs = {"a": jax.new_ref(jnp.zeros(3)), "b": jax.new_ref(jnp.ones(3))}

        def true_fun(operand, x):
            operand["a"][0] = x
            return x + 1

        def false_fun(operand, x):
            operand["b"][1] = 2 * x
            return x - 1

        result = jax.jit(lambda pred, x: cond(pred, true_fun, false_fun, refs, x))(pred, 3.0)
        return result, refs["a"][...], refs["b"][...]

    assert_close(after(lx.cond), after(lax.cond))


def test_a_second_call_traces_and_compiles_nothing() -> None:
    traces = []

    def branch(x):
        traces.append(x)
        return x + 1

    def other(x):
        return x

    lx.cond(True, branch, other, 1.0)
    count = len(traces)
    with count_jit_and_pmap_lowerings() as lowered:
        for i in range(3):
            lx.cond(i > 0, branch, other, 1.0)
    assert count <= 2
    assert len(traces) == count
    assert lowered() == 0


def test_types_are_those_of_the_precision_at_the_call() -> None:
    def branch(x):
        return jnp.arange(3)

    for is_double in (True, False):
        with jax.enable_x64(is_double):
            assert lx.cond(True, branch, branch, np.float32(1)).dtype == jnp.arange(3).dtype
