"""Programs whose effects happen in active lanes only: rows are written, and conditions are passed on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopax._src.core.effects import guarded
from loopax._src.core.jaxpr.util import trace
from loopax._src.core.row_buffers import add, get, put, take
from tests.support.reference import assert_close

ROWS, ROW = np.arange(6.0).reshape(3, 2), np.array([10.0, 20.0])
PLACE = np.int32(1)
WRITES = {
    "put": lambda rows, row: [put(rows, PLACE, row)],
    "add": lambda rows, row: [add(rows, PLACE, row)],
    "take": lambda rows, _: [take(rows, PLACE)[1]],
    "put in jit": lambda rows, row: [jax.jit(lambda rows: put(rows, PLACE, row))(rows)],
    "put in cond": lambda rows, row: [lax.cond(row[0] > 0, lambda: put(rows, PLACE, row), lambda: rows)],
    "put in scan": lambda rows, row: [lax.scan(lambda rows, row: (put(rows, PLACE, row), None), rows, row[None])[0]],
}


@pytest.mark.parametrize("name", WRITES)
def test_rows_are_written_where_a_lane_is_active(name):
    closed = trace(WRITES[name], [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (ROWS, ROW)])
    function = jax.jit(lambda active: guarded(closed)(active, ROWS, ROW))
    assert_close(function(True), WRITES[name](ROWS, ROW))
    assert_close(function(False), [jnp.asarray(ROWS)])


def test_what_is_read_goes_on():
    closed = trace(lambda rows: [get(rows, PLACE)[0] * 2.0], [jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)])
    assert_close(guarded(closed)(True, ROWS), [jnp.asarray(2 * ROWS[1])])


def test_callbacks():
    seen = []

    def program(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        lax.cond(x > 1, lambda: jax.debug.callback(lambda x: seen.append(-float(x)), x), lambda: None)
        return [x + 1]

    closed = trace(program, [jax.ShapeDtypeStruct((), jnp.float64)])
    function = jax.jit(guarded(closed))
    for active, x in [(True, 1.0), (False, 2.0), (True, 3.0)]:
        assert_close(function(active, x), [jnp.asarray(x + 1)])
    jax.effects_barrier()
    assert seen == [1.0, 3.0, -3.0]
