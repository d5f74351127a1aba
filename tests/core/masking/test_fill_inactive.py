"""The primitives of finished lanes: what they are filled with, and which are active."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.masking import an_active, fill_inactive, filled_in_derivatives, over_lanes
from loopax._src.jax_internals import jaxpr_as_fun
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

ACTIVE = np.array([False, True, True, False])
X = np.arange(8.0).reshape(4, 2)
FILLED = X[[1, 1, 2, 1]]  # finished lanes have what the first active one has
OF_ACTIVE = np.where(ACTIVE[:, None], np.cos(X), 0.0)


def fill(x, active=ACTIVE):
    return fill_inactive(active, [x], [True])[0]


def test_values():
    assert_close(fill(X), FILLED)
    assert fill_inactive(ACTIVE, [X], [False])[0] is X
    assert_close(fill(X, np.zeros(4, bool)), X[[0, 0, 0, 0]])


def test_derivatives_are_those_of_active_lanes():
    """A finished lane depends on nothing, so nothing depends on what it was given."""
    assert_close(jax.jvp(fill, (X,), (np.cos(X),)), (FILLED, OF_ACTIVE))
    assert_close(jax.vjp(fill, X)[1](np.cos(X)), (OF_ACTIVE,))


def test_operands_that_are_filled_in_derivatives():
    """Values are the lane's own. A program whose transpose comes next fills them, also inside of other programs."""
    own = lambda x: fill_inactive(ACTIVE, [x], [True], "in_derivatives")[0] * 2.0
    assert_close(own(X), X * 2.0)
    assert_close(jax.vjp(own, X)[1](np.cos(X)), (OF_ACTIVE * 2.0,))
    nested = jax.make_jaxpr(lambda x: jax.lax.cond(True, own, lambda x: x, x))(X)
    assert_close(jaxpr_as_fun(filled_in_derivatives(nested))(X)[0], FILLED * 2.0)
    always = jax.make_jaxpr(fill)(X)
    assert filled_in_derivatives(always) is always


def test_batches_are_filled_each_from_its_own_lanes():
    active = np.stack([ACTIVE, ~ACTIVE])
    expected = np.stack([FILLED, -X[[0, 0, 0, 3]]])
    assert_close(jax.vmap(fill)(np.stack([X, -X]), active), expected)
    (ct,) = jax.vjp(lambda x: jax.vmap(fill)(x, active), np.stack([X, -X]))[1](np.ones((2, 4, 2)))
    assert_close(ct, np.broadcast_to(active[..., None], ct.shape).astype(float))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_derivative_that_is_not_finite_stays_in_its_lane(kind):
    """The second lane takes the root of zero in its second step, when the first one has finished."""

    def lane(a, start, steps):
        body = lambda state: (state[0] + 1, jnp.sqrt(a * state[1]) * jnp.where(state[0] < 1, 0.0, 1.0))
        return lx.while_loop(lambda state: state[0] < steps, body, (0, start), max_steps=3, kind=kind)[1] + a

    start, steps = np.array([4.0, 4.0]), np.array([0, 3])
    of_lanes = lambda a: jax.vmap(jax.grad(lane))(a, start, steps)
    of_all = jax.grad(lambda a: jax.vmap(lane)(a, start, steps).sum())
    for slopes in jax.jit(lambda a: (of_lanes(a), of_all(a)))(np.ones(2)):
        assert slopes[0] == 1.0
        assert not np.isfinite(slopes[1])


# ---- finished lanes outside of the body's domain: nobody reads their NaNs, and no sum over lanes meets them

STEPS = np.array([1, 3, 0])
STARTS = np.array([4.0, 4.0, -1.0])  # the first lane ends at zero, where the slope of the root is infinite


def roots(kind, product):
    """Lanes (start, steps) of a weight that all share; the lanes leave the domain of the root when they finish."""

    def lane(w, start, steps):
        body = lambda _, h: product(w, jnp.sqrt(h)) - jnp.where(steps == 1, 4.0, 0.0)
        return lx.fori_loop(0, steps, body, start, max_steps=3, kind=kind)

    return lane


PRODUCTS = {
    "elementwise": (lambda w, x: w[0] * x + w[1], lambda kind: (kind, np.array([1.5, 1.0]))),
    "matrix": (lambda w, x: (w @ jnp.stack([x, jnp.ones_like(x)]))[0], lambda kind: (kind, np.array([[1.5, 1.0]]))),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_sums_over_lanes_do_not_meet_finished_ones(kind, product):
    function, given = PRODUCTS[product]
    kind, w = given(kind)
    lane = roots(kind, function)
    lanes = list(zip(STARTS, STEPS, strict=True))

    def found(w):
        batch = lambda w: jax.vmap(lane, (None, 0, 0))(w, STARTS, STEPS).sum()
        return batch(w), jax.grad(batch)(w), jax.hessian(batch)(w)

    alone = [(lane(w, *of), jax.grad(lane)(w, *of), jax.hessian(lane)(w, *of)) for of in lanes]
    assert_close(jax.jit(found)(w), tuple(sum(of_lanes) for of_lanes in zip(*alone, strict=True)))


def test_the_transpose_of_a_batch_of_tangents():
    """A linear program whose known operands are not finite in lanes that have finished, and not before."""

    def lane(w, x, steps):
        return lx.fori_loop(0, steps, lambda i, h: h + w / (x - jnp.where(steps == 0, x, 0.0)), 0.0, max_steps=3)

    batch = lambda w: jax.vmap(lane, (None, 0, 0))(w, np.array([2.0, 3.0]), np.array([2, 0]))
    (ct,) = jax.jit(jax.linear_transpose(batch, 0.0))(np.ones(2))
    assert_close(ct, 1.0)


# ---- one of many lanes, and the largest


@pytest.mark.parametrize("lanes", [1, 7, 1024, 1500])
def test_an_active_lane_is_found(lanes):
    find = jax.jit(an_active)
    for place in {0, lanes // 2, lanes - 1}:
        assert find(np.arange(lanes) == place) == place
        assert find(np.arange(lanes) >= place) >= place
    assert 0 <= find(np.zeros(lanes, bool)) < lanes


@pytest.mark.parametrize("lanes", [1, 7, 1024, 1500])
def test_the_largest_of_many_lanes(lanes):
    largest, is_any = (jax.jit(lambda x, reduce=reduce: over_lanes(reduce, x)) for reduce in (jnp.max, jnp.any))
    for place in {0, lanes // 2, lanes - 1}:
        values = np.roll(np.arange(lanes), place + 1)
        assert values[place] == largest(values) == lanes - 1
        assert is_any(np.arange(lanes) == place)
    assert not is_any(np.zeros(lanes, bool))
