"""Residuals before they are repeated."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax._src.core.jaxpr.narrow import narrow
from loopax._src.jax_internals import jaxpr_as_fun, partial_eval_jaxpr
from tests.support.reference import assert_close

X = jnp.arange(1.0, 13.0, dtype=jnp.float32).reshape(3, 4)
FLAGS = jnp.array([True, False, True])


def masked(x, flags):
    return jnp.where(flags[:, None], jnp.sin(x), x)


def masked_twice(x, flags):
    return jnp.where(flags[:, None], masked(x, flags) ** 2, x)


def as_numbers(x, flags):
    return x * jnp.broadcast_to(flags[:, None], x.shape).astype(x.dtype)


def as_many_numbers(x, flags):
    return as_numbers(jnp.tile(x, (1, 1000)), flags)


def repeated(x, flags):
    largest = jax.lax.stop_gradient(x.max(-1))
    return jnp.tile(largest[:, None], (1, 4)) * x + jnp.repeat(largest[:, None], 4, axis=1) * x


def computed_in_a_call(x, flags):
    return x * jax.jit(lambda flags: jnp.broadcast_to((~flags)[:, None], (3, 4)).astype(x.dtype))(flags)


# The shapes of the residuals of each.
STORED = {
    masked: ["bool[3]", "float32[3,4]"],
    masked_twice: ["bool[3]", "float32[3,4]", "float32[3,4]"],
    as_numbers: ["float32[3,4]"],
    as_many_numbers: ["bool[3]"],
    repeated: ["float32[3,4]", "float32[3]"],  # `repeat` gathers
    computed_in_a_call: ["float32[3,4]"],  # what it is made of is no result of the call
}


@pytest.mark.parametrize("function", STORED)
def test_small_arrays_are_stored(function):
    pair = lambda flags, x, dot: jax.jvp(lambda x: function(x, flags), (x,), (dot,))
    closed = jax.make_jaxpr(pair)(FLAGS, X, X)
    known, later, _ = partial_eval_jaxpr(closed, [False, False, True], [False, True])
    stored = narrow(known, 1, later.in_avals[:-1], [])
    assert sorted(aval.str_short() for aval in stored.avals) == STORED[function]
    value, *residuals = jaxpr_as_fun(stored.known)(FLAGS, X)
    found = value, *jaxpr_as_fun(later)(*stored.repeated(residuals), 2 * X)
    assert_close(tuple(found), pair(FLAGS, X, 2 * X), 1e-6)


@pytest.mark.parametrize("kind", ["residuals", "auto"])
def test_a_mask_of_lanes_is_stored_as_one_bool_for_each(kind):
    """It is one for each number in JAX's own: a lane that is done keeps its carry."""

    def loss(x, n, w):
        return lx.fori_loop(0, n, lambda _, x: jnp.sin(w * x), x, max_steps=5, kind=kind).sum()

    starts, steps = jnp.linspace(0.1, 2, 300, dtype=jnp.float32).reshape(3, 100), jnp.array([5, 0, 3])
    gradient = jax.grad(lambda w: jax.vmap(loss, (0, 0, None))(starts, steps, w).sum())
    jaxpr = str(jax.make_jaxpr(gradient)(jnp.float32(0.7)))
    assert "bool[5,3,100]" not in jaxpr
    assert "bool[5,3]" in jaxpr
    alone = sum(jax.grad(loss, 2)(x, int(n), jnp.float32(0.7)) for x, n in zip(starts, steps, strict=True))
    assert_close(gradient(jnp.float32(0.7)), alone, 1e-5)


def of_weights(x, n, w):
    return lx.fori_loop(0, n, lambda _, x: jnp.sin(w * x), x, max_steps=5, kind="residuals").sum()


def of_rows(x, n, rows):
    step = lambda x, row: (jnp.sin(row * x), None)
    return lx.scan(step, x, rows, length=n, max_steps=5, kind="residuals")[0].sum()


def of_a_predicate(x, n, w):
    goes_on, step = lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(w * c[1]))
    return lx.while_loop(goes_on, step, (jnp.int32(0), x), max_steps=5, kind="residuals")[1].sum()


@pytest.mark.parametrize("loss", [of_weights, of_rows, of_a_predicate])
def test_what_finished_lanes_are_given_is_not_stored_of_an_input(loss):
    """Weights of lanes are there, and rows of xs; each step stores the cosine and the carry."""
    starts, steps = jnp.linspace(0.1, 2, 300, dtype=jnp.float32).reshape(3, 100), jnp.array([5, 0, 3], jnp.int32)
    given = jnp.linspace(0.5, 1, 1500 if loss is of_rows else 300, dtype=jnp.float32)
    given = given.reshape(3, 5, 100) if loss is of_rows else given.reshape(3, 100)
    gradient = jax.grad(lambda given: jax.vmap(loss)(starts, steps, given).sum())
    (loop, *_) = (eqn for eqn in jax.make_jaxpr(gradient)(given).eqns if eqn.primitive.name == "loop")
    assert [v.aval.str_short() for v in loop.outvars].count("float32[5,3,100]") == 2
    alone = jnp.stack([jax.grad(loss, 2)(*lane) for lane in zip(starts, steps, given, strict=True)])
    assert_close(gradient(given), alone, 1e-5)


def test_weights_of_a_finished_lane_are_not_read():
    """They may be infinite, and the scale that lanes share has a sum over all lanes."""

    def loss(n, w, scale):
        step = lambda x: jnp.sin(x + w * scale)
        return lx.fori_loop(0, n, lambda _, x: step(x), jnp.float32(0.5), max_steps=5, kind="residuals")

    steps, weights = jnp.array([5, 0, 3], jnp.int32), jnp.array([0.5, jnp.inf, 0.7], jnp.float32)
    scale = jnp.float32(0.9)
    found = jax.grad(lambda scale: jax.vmap(loss, (0, 0, None))(steps, weights, scale).sum())(scale)
    assert_close(found, sum(jax.grad(loss, 2)(steps[i], weights[i], scale) for i in (0, 2)), 1e-5)
