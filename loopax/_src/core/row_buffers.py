"""Rows of an array, read and written at places that are computed, without touching the others.

Meaning, with the array `rows` of shape (capacity, ...) and a place that is not beyond it (beyond it, zeros are
read, and nothing is written)::

    get(rows, place, active)  -> rows[place], rows
    put(rows, place, row)     -> rows with rows[place] = row
    add(rows, place, row)     -> rows with rows[place] += row
    take_out(rows, place)     -> rows[place], rows with rows[place] = 0
    view(rows, active)        -> rows, rows

The transpose of `get` is `add`, that of `put` is `take_out`, and the other way round; that of `view` adds whole arrays.
`get` and `view` return the array as well, so that a loop's body uses each version of it once
(`core/buffer_versions.py`). Its cotangent then has versions in the opposite order, and is changed in place as well: the
gradient of a step costs the same whatever the capacity.

With lanes, `rows` is `[*lanes, capacity, ...]` and `place` an int32 `[*lanes]`; the row is `[*lanes, ...]`.

A lane of a batch that has finished is not `active`: it reads what a lane that is still active reads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.dependence import computed, dependence_rules
from loopax._src.core.jaxpr.types import Axis, batch_if_mapped, batch_in_front, fill_axis
from loopax._src.core.jaxpr.util import written_out
from loopax._src.core.masking import fill_inactive
from loopax._src.jax_internals import ad

# Of each operation, `lane_axes` says how many leading axes of the array are those of lanes. `place` has these axes too,
# and perhaps more: so many rows are read from one array, or written to it. Places for rows to put or take differ.


def get(rows: Any, place: Any, active: Any = np.True_, lane_axes: int = 0) -> tuple[Any, Any]:
    """The row at a place, and the array."""
    return get_p.bind(rows, place, active, lane_axes=lane_axes)


def put(rows: Any, place: Any, row: Any, lane_axes: int = 0, appends: bool = False) -> Any:
    """The array with another row; `appends` says that the row has not been read or written before."""
    return put_p.bind(rows, place, row, lane_axes=lane_axes, appends=appends)[0]


def add(rows: Any, place: Any, row: Any, lane_axes: int = 0) -> Any:
    """The array with something added to a row."""
    return add_p.bind(rows, place, row, lane_axes=lane_axes)[0]


def take_out(rows: Any, place: Any, lane_axes: int = 0) -> tuple[Any, Any]:
    """The row at a place, and the array without it."""
    return take_out_p.bind(rows, place, lane_axes=lane_axes)


def view(rows: Any, active: Any = np.True_) -> tuple[Any, Any]:
    """All rows, and the array."""
    return view_p.bind(rows, active)


# ---- what they compute


def _over_lanes(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The function mapped over as many leading axes of lanes as the primitive says.

    One row of one array on the host is read and written there, as a slice. Several are not.
    """

    def mapped(rows: Any, place: Any, *operands: Any, lane_axes: int, **params: Any) -> list[Any]:
        one = partial(function, is_alone=lane_axes == 0, **params)
        for _ in range(lane_axes):
            one = jax.vmap(one)
        return jaxi.on_device(one, rows, place, *operands) if place.ndim else one(rows, place, *operands)

    return mapped


def _read(rows: Any, place: Any) -> Any:
    inside = place < rows.shape[0]
    if rows.shape[0] == 0:
        return jnp.broadcast_to(jaxi.zero(rows.dtype), (*place.shape, *rows.shape[1:]))
    row = rows.at[place].get(mode="clip") if place.ndim else lax.dynamic_index_in_dim(rows, place, 0, keepdims=False)
    return jaxi.where(inside.reshape(*place.shape, *(1,) * (rows.ndim - 1)), row, jaxi.zero(rows.dtype))


def _write(rows: Any, place: Any, row: Any, is_alone: bool) -> Any:
    if place.ndim or not is_alone:
        return rows.at[place].set(row, mode="drop")
    if rows.shape[0] == 0:
        return rows
    # One row of one array, for which XLA on a CPU is faster with a slice than with a scatter.
    old = lax.dynamic_index_in_dim(rows, place, 0, keepdims=False)
    row = jaxi.where(place < rows.shape[0], row, old)
    return lax.dynamic_update_index_in_dim(rows, row, place, 0)


@_over_lanes
def _get(rows: Any, place: Any, is_alone: bool) -> list[Any]:
    if place.ndim or not is_alone or jaxi.is_on_host(rows):
        return [_read(rows, place), rows]
    return [_read(rows, _and_another(place, 0))[0], rows]


def _and_another(place: Any, other: int) -> Any:
    """A second place, so that one row is not read or written as a slice.

    XLA on a CPU would fuse the reading of one slice into the writing of another, and copy the array for that.
    """
    return jnp.stack([place, jnp.full_like(place, other)])


@_over_lanes
def _put(rows: Any, place: Any, row: Any, is_alone: bool, appends: bool) -> list[Any]:
    del appends
    return [_write(rows, place, row, is_alone)]


@_over_lanes
def _add(rows: Any, place: Any, row: Any, is_alone: bool) -> list[Any]:
    if not jaxi.is_number(rows.dtype) and place.ndim:
        add_one = lambda i, rows: _add_one(rows, place[i], row[i], is_alone)  # noqa: E731
        return [lax.fori_loop(0, place.size, add_one, rows)]
    if jaxi.is_on_host(rows) or not jaxi.is_number(rows.dtype):
        return [_add_one(rows, place, row, is_alone)]
    if place.ndim or not is_alone:
        return [rows.at[place].add(row, mode="drop")]
    return [rows.at[_and_another(place, rows.shape[0])].add(jnp.stack([row, jnp.zeros_like(row)]), mode="drop")]


def _add_one(rows: Any, place: Any, row: Any, is_alone: bool) -> Any:
    return _write(rows, place, jaxi.on_device(jaxi.added, _read(rows, place), row), is_alone)


@_over_lanes
def _take_out(rows: Any, place: Any, is_alone: bool) -> list[Any]:
    if rows.shape[0] == 0:
        return [_read(rows, place), rows]
    # What is written is made of what was read: XLA on a CPU copies the array where it may write before it reads.
    is_alone = is_alone and not place.ndim
    inside, none = place < rows.shape[0], jaxi.zero(rows.dtype)
    inside = inside.reshape(*place.shape, *(1,) * (rows.ndim - 1))
    if is_alone and jaxi.is_on_host(rows):
        row = _read(rows, place)
    else:
        row = rows.at[_and_another(place, 0) if is_alone else place].get(mode="clip")
        row = row[0] if is_alone else row
    left = _write(rows, place, jaxi.where(~inside, row, none), is_alone)
    return [jaxi.where(inside, row, none), left]


get_p = jaxi.new_primitive("buffer_get")
put_p = jaxi.new_primitive("buffer_put")
add_p = jaxi.new_primitive("buffer_add")
take_out_p = jaxi.new_primitive("buffer_take_out")
view_p = jaxi.new_primitive("buffer_view")

# Which result of an operation is the array.
VERSION = {get_p: 1, put_p: 0, add_p: 0, take_out_p: 1, view_p: 1}


def writes(eqn: Any) -> bool:
    """Whether an operation of these changes the array."""
    return eqn.primitive not in (get_p, view_p)


def operands_where(active: Any, eqn: Any, operands: Sequence[Any], reads_own: bool) -> list[Any]:
    """The operands of an operation that writes nothing where it is not active, and reads what active lanes do.

    `reads_own`: it reads its own all the same.
    """
    if not writes(eqn):
        if reads_own:
            return list(operands)
        *read, is_active = operands
        return [*read, is_active & active]
    rows, place, *rest = operands
    beyond = jnp.int32(rows.shape[eqn.params["lane_axes"]])
    return [rows, jnp.where(active, place, beyond), *rest]


def appends(eqn: Any) -> bool:
    """Whether a `put` writes a row that has not been read or written before."""
    return eqn.params["appends"]


# ---- derivatives: all are linear in the array and in the row


def _transpose_get(cts: Sequence[Any], _: Any, place: Any, active: Any, lane_axes: int) -> list[Any]:
    """Add the cotangent of the row to that of the array, in place, for lanes that are active: both depend on it."""
    ct_row, ct_rows = cts
    if isinstance(ct_row, ad.Zero):
        return [ct_rows, None, None]
    ct_rows = written_out(ct_rows)
    place = jnp.where(active, place, jnp.int32(ct_rows.shape[lane_axes]))  # else beyond the array, where nothing is
    return [add(ct_rows, place, ct_row, lane_axes), None, None]


def _transpose_write(
    cts: Sequence[Any], rows: Any, place: Any, row: Any, lane_axes: int, appends: bool = True
) -> list[Any]:
    """Of `put` and `add`. The cotangent of the row is the row at `place` of the array's cotangent.

    After an `add` the array's cotangent stays as it is. Where a row is put, it is set to zero there, for the old row no
    longer matters. A row that is appended is none of the rows before: nobody asks for what is left in its place.
    """
    (ct,) = cts
    if isinstance(ct, ad.Zero):
        return [None, None, None]
    ct_row, ct_rows = get(ct, place, lane_axes=lane_axes) if appends else take_out(ct, place, lane_axes)
    return [ct_rows if ad.is_undefined_primal(rows) else None, None, ct_row if ad.is_undefined_primal(row) else None]


def _transpose_take_out(cts: Sequence[Any], _: Any, place: Any, lane_axes: int) -> list[Any]:
    """Write the row's cotangent at `place` in the array's cotangent: the zeros there depend on nothing."""
    ct_row, ct_rows = cts
    return [put(written_out(ct_rows), place, written_out(ct_row), lane_axes), None]


def _transpose_view(cts: Sequence[Any], _: Any, active: Any) -> list[Any]:
    """Add the cotangent of all rows to that of the array, for lanes that are active: both depend on it."""
    ct_view, ct_rows = cts
    if isinstance(ct_view, ad.Zero):
        return [ct_rows, None]
    return [
        jaxi.on_device(jaxi.added, written_out(ct_rows), jaxi.where(active, ct_view, jaxi.zero(ct_view.dtype))),
        None,
    ]


# ---- batches


def _batch_get(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], lane_axes: int) -> Any:
    """If lanes share the array, one `get` reads a row for each lane. Else each lane reads a row of its own array.

    A lane that is not active reads what an active one does, since the body goes on with it.
    """
    (rows, place, active), (rows_dim, place_dim, active_dim) = operands, dims
    axis = Axis.of(axis_data)
    if rows_dim is None and place_dim is None:
        return get(rows, place, lane_axes=lane_axes), [None, None]
    if rows_dim is None:
        row, rows = get(rows, jnp.moveaxis(place, int(place_dim), -1), lane_axes=lane_axes)
        row = jnp.moveaxis(row, place.ndim - 1, 0)
    else:
        row, rows = get(fill_axis(axis, rows, rows_dim), fill_axis(axis, place, place_dim), lane_axes=lane_axes + 1)
    if active_dim is not None:
        (row,) = fill_inactive(active, [row], [True])
    return [row, rows], [0, None if rows_dim is None else 0]


def _batch_view(_: Any, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    """If lanes share the array, all see it. Else an active lane sees its own, and a finished one an active one's."""
    (rows, active), (rows_dim, active_dim) = operands, dims
    if rows_dim is None:
        return view(rows), [None, None]
    seen, rows = view(jnp.moveaxis(rows, int(rows_dim), 0))
    if active_dim is not None:
        (seen,) = fill_inactive(active, [seen], [True])
    return [seen, rows], [0, 0]


# ---- what each does: its meaning and its parameters, the operands in which it is linear, its transpose, its batch
# Which lanes are active matters to derivatives and batches alone. After a write the lanes' arrays differ.

_get_where_active = lambda rows, place, _, **params: _get(rows, place, **params)  # noqa: E731
for _primitive, _meaning, _params, _linear_in, _transpose, _batch in (
    (get_p, _get_where_active, ["lane_axes"], [0], _transpose_get, batch_if_mapped(get_p, _batch_get)),
    (put_p, _put, ["lane_axes", "appends"], [0, 2], _transpose_write, batch_in_front(put_p, "lane_axes")),
    (add_p, _add, ["lane_axes"], [0, 2], _transpose_write, batch_in_front(add_p, "lane_axes")),
    (take_out_p, _take_out, ["lane_axes"], [0], _transpose_take_out, batch_in_front(take_out_p, "lane_axes")),
    (view_p, lambda rows, _: [rows, rows], [], [0], _transpose_view, batch_if_mapped(view_p, _batch_view)),
):
    jaxi.register(
        _primitive,
        meaning=_meaning,
        params=_params,
        linear_in=_linear_in,
        transpose=_transpose,
        batch=_batch,
    )

# The array that `get` hands on is the one that it was given, whatever the place.
dependence_rules[get_p] = lambda *_: [0b111, 0b001]
dependence_rules[view_p] = lambda *_: [0b11, 0b01]

# Of the array, one row is computed.
computed[get_p] = computed[take_out_p] = lambda eqn: eqn.outvars[:1]
computed[put_p] = computed[add_p] = lambda eqn: eqn.invars[2:3]
