"""The operations on rows: what they compute, and that derivatives and batches are those of dense code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.row_buffers import add, get, put, take, view
from tests.support.reference import assert_close

ROWS, ROW = np.arange(12.0).reshape(4, 3), np.array([10.0, 20.0, 30.0])
CT_ROWS, CT_ROW = np.cos(ROWS), np.array([0.1, 0.2, 0.3])
BEYOND = 7


def chosen(place):
    return (jnp.arange(4, dtype=jnp.int32) == place)[:, None]


def dense_get(rows, place):
    return jnp.sum(jnp.where(chosen(place), rows, 0.0), 0), rows


def dense_put(rows, place, row):
    return jnp.where(chosen(place), row, rows)


def dense_add(rows, place, row):
    return rows + jnp.where(chosen(place), row, 0.0)


def dense_take(rows, place):
    return dense_get(rows, place)[0], jnp.where(chosen(place), 0.0, rows)


# Name -> (the operation, the same in dense code, its arguments, cotangents of its results).
OPERATIONS = {
    "get": (lambda rows, place: tuple(get(rows, place)), dense_get, (ROWS,), (CT_ROW, CT_ROWS)),
    "put": (put, dense_put, (ROWS, ROW), CT_ROWS),
    "add": (add, dense_add, (ROWS, ROW), CT_ROWS),
    "take": (lambda rows, place: tuple(take(rows, place)), dense_take, (ROWS,), (CT_ROW, CT_ROWS)),
}


def of_all(which, computed):
    """What is computed of each operation (0) or its dense code (1), in one program."""
    return jax.jit(lambda *given: {name: computed(case[which], *case[2:], *given) for name, case in OPERATIONS.items()})


def derivatives(function, arguments, cts, place):
    at = lambda rows, *row: function(rows, place, *row)
    values, tangents = jax.jvp(at, arguments, tuple(map(jnp.sin, arguments)))
    return values, tangents, jax.vjp(at, *arguments)[1](cts)


def test_values_and_derivatives():
    """At the first and the last row, and beyond the rows."""
    rows, dense = (of_all(which, derivatives) for which in (0, 1))
    for place in map(np.int32, (0, 3, BEYOND)):
        assert_close(rows(place), dense(place))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0), (None, 0, None), (None, 0, 0), (0, 0, None)], ids=str)
def test_lanes(axes):
    """Also such that share the array, the place or the row, and lanes of lanes; some places are beyond the rows."""
    stacked = lambda x, axis: x if axis is None else np.stack([scale * x for scale in (1.0, -2.0, 0.5)])

    def in_lanes(function, arguments, _, place):
        operands = [stacked(arguments[0], axes[0]), place, *(stacked(x, axes[2]) for x in arguments[1:])]
        in_axes = axes[: len(operands)]
        once = jax.vmap(function, in_axes)
        if axes[1] is None:
            return once(*operands)
        operands[1] = jnp.stack([place, place[::-1]])
        return jax.vmap(once, (None, 0, None)[: len(operands)])(*operands)

    place = np.int32(2) if axes[1] is None else np.array([1, 3, BEYOND], np.int32)
    assert_close(*(of_all(which, in_lanes)(place) for which in (0, 1)))


def test_an_inactive_lane_reads_what_an_active_one_does():
    rows, active = np.stack([ROWS, 2 * ROWS, 3 * ROWS]), np.array([False, True, True])
    read = jax.vmap(lambda rows, active: get(rows, jnp.int32(1), active=active)[0])
    assert_close(read(rows, active), np.stack([2 * ROWS[1], 2 * ROWS[1], 3 * ROWS[1]]))
    seen = jax.vmap(lambda rows, active: view(rows, active)[0])(rows, active)
    assert_close(seen, np.stack([2 * ROWS, 2 * ROWS, 3 * ROWS]))
