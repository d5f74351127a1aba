"""The primitive that fills the operands of finished lanes: its values, derivatives and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.masking.substitute import fill_inactive
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
