"""`rewrite_loops(conds=True)`: the branches of other people's functions run on loopax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.reference import assert_close

X = np.array([-2.0, 0.0, 0.5, 3.0])


def root_or_zero(x):
    """With an infinite derivative in the branch that lanes up to zero do not take."""
    return lax.cond(x > 0, jnp.sqrt, lambda x: 0.0 * x, x)


def of_three(x):
    """A switch, whose index is clamped."""
    return lax.switch(jnp.floor(x).astype(int), [jnp.cos, lambda x: x * x, jnp.sqrt], x)


def in_a_loop(x):
    """A branch in a loop in a branch."""
    body = lambda _, y: lax.cond(y > 1, lambda y: 0.5 * y, lambda y: 1.5 * y * x, y)
    return lax.cond(x > 0, lambda x: lax.fori_loop(0, 3, body, x), jnp.sin, x)


def nested(x):
    """In a call and a `jax.checkpoint`."""
    return jax.checkpoint(jax.jit(root_or_zero))(x) + of_three(x)


LANES = ["lockstep", lx.Compact(shrink=2, min_lanes=1)]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("function", [root_or_zero, of_three, in_a_loop, nested])
def test_values_and_gradients_are_those_of_each_lane(function, lanes) -> None:
    rewritten = lx.rewrite_loops(function, conds=True, scans=True, lanes=lanes)
    both = jax.value_and_grad(rewritten)
    wanted = [jax.value_and_grad(function)(x) for x in X]
    assert_close(jax.jit(jax.vmap(both))(X), jax.tree.map(lambda *rows: jnp.stack(rows), *wanted))
    assert_close(both(X[3]), wanted[3])
    names = str(jax.make_jaxpr(rewritten)(X[0]))
    assert "cond[" not in names


def test_a_gradient_through_a_batch_stays_in_the_domain_of_each_lane() -> None:
    total = lambda x: jax.vmap(lx.rewrite_loops(root_or_zero, conds=True))(x).sum()
    assert_close(jax.grad(total)(X), jnp.array([jax.grad(root_or_zero)(x) for x in X]))


def test_a_branch_that_no_lane_takes_is_not_run() -> None:
    """Where that is asked for: nothing is exchanged otherwise."""
    calls = []
    costly = lambda x: jax.pure_callback(lambda x: calls.append(1) or x, x, x, vmap_method="expand_dims")
    function = lambda x: lax.cond(x > 9, costly, lambda x: x + 1, x)
    assert_close(jax.vmap(lx.rewrite_loops(function, conds=True))(X), X + 1)
    assert calls == []
    jax.block_until_ready(jax.vmap(lx.rewrite_loops(function))(X))
    assert calls


def test_a_choice_of_platform_stays() -> None:
    def function(x):
        return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    rewritten = lx.rewrite_loops(function, conds=True)
    assert str(jax.make_jaxpr(rewritten)(X[0])) == str(jax.make_jaxpr(function)(X[0]))
    assert_close(rewritten(X), np.sin(X))


def test_mutable_arrays_and_prints(capfd) -> None:
    def function(x):
        ref = jax.new_ref(jnp.zeros(2))

        def first():
            ref[0] = x
            jax.debug.print("first {}", x)

        def second():
            ref[1] = x
            jax.debug.print("second {}", x)

        lax.cond(x > 0, first, second)
        return ref[...]

    assert_close(jax.jit(lx.rewrite_loops(function, conds=True))(3.0), jnp.array([3.0, 0.0]))
    jax.effects_barrier()
    assert capfd.readouterr().out == "first 3.0\n"


def test_keys_and_weak_types() -> None:
    def function(pred, key):
        return lax.cond(pred, lambda k: (k, 1.0), lambda k: (jax.random.split(k)[0], 2.0), key)

    new, old = lx.rewrite_loops(function, conds=True)(False, jax.random.key(0)), function(False, jax.random.key(0))
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, old)
    assert_close(jax.random.key_data(new[0]), jax.random.key_data(old[0]))
