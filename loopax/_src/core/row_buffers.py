"""Rows of an array, read and written at places that are computed, without touching the others.

Meaning, with the array `rows` of shape (capacity, ...) and a place that is not beyond it (beyond it, zeros are
read, and nothing is written)::

    get(rows, place, active)  -> rows[place], rows
    put(rows, place, row)     -> rows with rows[place] = row
    add(rows, place, row)     -> rows with rows[place] += row
    take(rows, place)         -> rows[place], rows with rows[place] = 0
    view(rows, active)        -> rows, rows

The transpose of `get` is `add`, that of `put` is `take`, and the other way round; the transpose of `view` adds whole
arrays. `get` and `view` return the array as well, so that a loop's body uses each version of it once
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

from loopax._src.core.jaxpr.dependence import computed, dependence_rules, jointly_linear
from loopax._src.core.jaxpr.types import Axis, batch_if_mapped, fill_axis
from loopax._src.core.jaxpr.util import written_out
from loopax._src.core.masking import fill_inactive
from loopax._src.jax_internals import (
    Primitive,
    ad,
    added,
    is_number,
    is_on_host,
    new_primitive,
    on_device,
    register,
    where,
    zero,
)

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


def take(rows: Any, place: Any, lane_axes: int = 0) -> tuple[Any, Any]:
    """The row at a place, and the array without it."""
    return take_p.bind(rows, place, lane_axes=lane_axes)


def view(rows: Any, active: Any = np.True_) -> tuple[Any, Any]:
    """All rows, and the array."""
    return view_p.bind(rows, active)


def nowhere(rows: Any, lane_axes: int) -> Any:
    """A place beyond the array."""
    return jnp.int32(rows.shape[lane_axes])


# ---- what they compute


def _over_lanes(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The function mapped over as many leading axes of lanes as the primitive says.

    One row of one array on the host is read and written there, as a slice. Several are not.
    """

    def mapped(rows: Any, place: Any, *operands: Any, lane_axes: int, **params: Any) -> list[Any]:
        one = partial(function, is_alone=lane_axes == 0, **params)
        for _ in range(lane_axes):
            one = jax.vmap(one)
        return on_device(one, rows, place, *operands) if place.ndim else one(rows, place, *operands)

    return mapped


def _read(rows: Any, place: Any) -> Any:
    inside = place < rows.shape[0]
    if rows.shape[0] == 0:
        return jnp.broadcast_to(zero(rows.dtype), (*place.shape, *rows.shape[1:]))
    row = rows.at[place].get(mode="clip") if place.ndim else lax.dynamic_index_in_dim(rows, place, 0, keepdims=False)
    return where(inside.reshape(*place.shape, *(1,) * (rows.ndim - 1)), row, zero(rows.dtype))


def _read_alone(rows: Any, place: Any) -> Any:
    """One row of one array."""
    return _read(rows, place) if is_on_host(rows) else _read(rows, _and_another(place, 0))[0]


def _write(rows: Any, place: Any, row: Any, is_alone: bool) -> Any:
    if place.ndim or not is_alone:
        return rows.at[place].set(row, mode="drop")
    if rows.shape[0] == 0:
        return rows
    # One row of one array, for which XLA on a CPU is faster with a slice than with a scatter.
    old = lax.dynamic_index_in_dim(rows, place, 0, keepdims=False)
    row = where(place < rows.shape[0], row, old)
    return lax.dynamic_update_index_in_dim(rows, row, place, 0)


@_over_lanes
def _get(rows: Any, place: Any, is_alone: bool) -> list[Any]:
    if place.ndim or not is_alone:
        return [_read(rows, place), rows]
    return [_read_alone(rows, place), rows]


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
    if not is_number(rows.dtype) and place.ndim:
        add_one = lambda i, rows: _add_one(rows, place[i], row[i], is_alone)  # noqa: E731
        return [lax.fori_loop(0, place.size, add_one, rows)]
    if is_on_host(rows) or not is_number(rows.dtype):
        return [_add_one(rows, place, row, is_alone)]
    if place.ndim or not is_alone:
        return [rows.at[place].add(row, mode="drop")]
    return [rows.at[_and_another(place, rows.shape[0])].add(jnp.stack([row, jnp.zeros_like(row)]), mode="drop")]


def _add_one(rows: Any, place: Any, row: Any, is_alone: bool) -> Any:
    return _write(rows, place, on_device(added, _read(rows, place), row), is_alone)


@_over_lanes
def _take(rows: Any, place: Any, is_alone: bool) -> list[Any]:
    if rows.shape[0] == 0:
        return [_read(rows, place), rows]
    # What is written is made of what was read: XLA on a CPU copies the array where it may write before it reads.
    is_alone = is_alone and not place.ndim
    inside, none = place < rows.shape[0], zero(rows.dtype)
    inside = inside.reshape(*place.shape, *(1,) * (rows.ndim - 1))
    if is_alone and is_on_host(rows):
        row = _read(rows, place)
    else:
        row = rows.at[_and_another(place, 0) if is_alone else place].get(mode="clip")
        row = row[0] if is_alone else row
    left = _write(rows, place, where(~inside, row, none), is_alone)
    return [where(inside, row, none), left]


def _get_where_active(rows: Any, place: Any, active: Any, lane_axes: int) -> list[Any]:
    """Which lanes are active matters to batches and derivatives."""
    del active
    return _get(rows, place, lane_axes=lane_axes)


def _view(rows: Any, active: Any) -> list[Any]:
    del active
    return [rows, rows]


get_p = new_primitive("buffer_get")
put_p = new_primitive("buffer_put")
add_p = new_primitive("buffer_add")
take_p = new_primitive("buffer_take")
view_p = new_primitive("buffer_view")

# Which result of an operation is the array.
VERSION = {get_p: 1, put_p: 0, add_p: 0, take_p: 1, view_p: 1}


def lane_axes_of(eqn: Any) -> int:
    """How many leading axes of the array are those of lanes; not of `view`."""
    return eqn.params["lane_axes"]


def appends(eqn: Any) -> bool:
    """Whether a `put` writes a row that has not been read or written before."""
    return eqn.params["appends"]


def _abstract_of(meaning: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *avals, **params: jax.make_jaxpr(partial(meaning, **params))(*avals).out_avals


# ---- derivatives: all are linear in the array and in the row


def _wanted(operands: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
    return [ct if ad.is_undefined_primal(x) else None for x, ct in zip(operands, cts, strict=True)]


def _transpose_get(cts: Sequence[Any], _: Any, place: Any, active: Any, lane_axes: int) -> list[Any]:
    """Add the cotangent of the row to that of the array, in place, for lanes that are active.

    Operands are `rows, place, active`. Results are the row and the unchanged array. Both depend on the array, so their
    cotangents are added.
    """
    ct_row, ct_rows = cts
    if isinstance(ct_row, ad.Zero):
        return [ct_rows, None, None]
    ct_rows = written_out(ct_rows)
    return [add(ct_rows, jnp.where(active, place, nowhere(ct_rows, lane_axes)), ct_row, lane_axes), None, None]


def _transpose_put(cts: Sequence[Any], rows: Any, place: Any, row: Any, lane_axes: int, appends: bool) -> list[Any]:
    """The cotangent of the row is the row at `place` of the array's cotangent, in which it is then set to zero.

    Operands are `rows, place, row`; `rows` and `row` are linear. The old row at `place` no longer matters, hence the
    zeros. If the row was appended, nobody reads what is left in its place, so the row is only read.
    """
    (ct,) = cts
    if isinstance(ct, ad.Zero):
        return [None, None, None]
    # A row that is appended is none of the rows before, so nobody asks for what would be left of it.
    ct_row, ct_rows = get(ct, place, lane_axes=lane_axes) if appends else take(ct, place, lane_axes)
    return _wanted([rows, place, row], [ct_rows, None, ct_row])


def _transpose_add(cts: Sequence[Any], rows: Any, place: Any, row: Any, lane_axes: int) -> list[Any]:
    """Read the row's cotangent from that of the array, which stays as it is.

    Operands are `rows, place, row`; `rows` and `row` are linear.
    """
    (ct,) = cts
    if isinstance(ct, ad.Zero):
        return [None, None, None]
    ct_row, ct_rows = get(ct, place, lane_axes=lane_axes)
    return _wanted([rows, place, row], [ct_rows, None, ct_row])


def _transpose_take(cts: Sequence[Any], _: Any, place: Any, lane_axes: int) -> list[Any]:
    """Write the row's cotangent at `place` in the array's cotangent.

    Operands are `rows, place`; results are the row, and the array with zeros in its place. The zeros depend on nothing,
    so what the array's cotangent has there is replaced.
    """
    ct_row, ct_rows = cts
    return [put(written_out(ct_rows), place, written_out(ct_row), lane_axes), None]


def _transpose_view(cts: Sequence[Any], _: Any, active: Any) -> list[Any]:
    """Add the cotangent of all rows to that of the array, for lanes that are active.

    Operands are `rows, active`. Results are the rows to be seen and the unchanged array. Both depend on the array, so
    their cotangents are added.
    """
    ct_view, ct_rows = cts
    if isinstance(ct_view, ad.Zero):
        return [ct_rows, None]
    return [on_device(added, written_out(ct_rows), where(active, ct_view, zero(ct_view.dtype))), None]


# ---- batches


def _batch_get(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], lane_axes: int) -> Any:
    """If lanes share the array, one `get` reads a row for each lane. Else each lane reads a row of its own array.

    Operands are `rows, place, active`; results are the rows with lanes in front, and the array, which stays shared. A
    lane that is not active reads what an active one does, since the body goes on with it.
    """
    (rows, place, active), (rows_dim, place_dim, active_dim) = operands, dims
    axis = Axis.of(axis_data)
    if rows_dim is None:
        if place_dim is None:
            return get(rows, place, lane_axes=lane_axes), [None, None]
        row, rows = get(rows, jnp.moveaxis(place, int(place_dim), -1), lane_axes=lane_axes)
        row, rows_to = jnp.moveaxis(row, place.ndim - 1, 0), None
    else:
        row, rows = get(fill_axis(axis, rows, rows_dim), fill_axis(axis, place, place_dim), lane_axes=lane_axes + 1)
        rows_to = 0
    if active_dim is not None:
        (row,) = fill_inactive(active, [row], [True])
    return [row, rows], [0, rows_to]


def _batch_view(operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    """If lanes share the array, all see it. Else an active lane sees its own, and a finished one an active one's.

    Operands are `rows, active`; results are the rows to be seen and the array, with lanes in front.
    """
    (rows, active), (rows_dim, active_dim) = operands, dims
    if rows_dim is None:
        return view(rows), [None, None]
    seen, rows = view(jnp.moveaxis(rows, int(rows_dim), 0))
    if active_dim is not None:
        (seen,) = fill_inactive(active, [seen], [True])
    return [seen, rows], [0, 0]


def _batch_rule(primitive: Primitive) -> Callable[..., Any]:
    """A batching rule: every lane gets an array of its own, with one more axis of lanes in front of all operands.

    After a write the lanes' arrays differ, so none is shared.
    """

    def rule(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], lane_axes: int, **params: Any) -> Any:
        axis = Axis.of(axis_data)
        operands = [fill_axis(axis, x, d) for x, d in zip(operands, dims, strict=True)]
        out = primitive.bind(*operands, lane_axes=lane_axes + 1, **params)
        return out, [0] * len(out)

    return batch_if_mapped(primitive, rule)


# ---- what each does

register(
    get_p,
    meaning=_get_where_active,
    params=["lane_axes"],
    abstract_eval=_abstract_of(_get_where_active),
    linear_in=[0],
    transpose=_transpose_get,
    batch=batch_if_mapped(get_p, _batch_get),
)
register(
    put_p,
    meaning=_put,
    params=["lane_axes", "appends"],
    abstract_eval=_abstract_of(_put),
    linear_in=[0, 2],
    transpose=_transpose_put,
    batch=_batch_rule(put_p),
)
register(
    add_p,
    meaning=_add,
    params=["lane_axes"],
    abstract_eval=_abstract_of(_add),
    linear_in=[0, 2],
    transpose=_transpose_add,
    batch=_batch_rule(add_p),
)
register(
    take_p,
    meaning=_take,
    params=["lane_axes"],
    abstract_eval=_abstract_of(_take),
    linear_in=[0],
    transpose=_transpose_take,
    batch=_batch_rule(take_p),
)
register(
    view_p,
    meaning=_view,
    abstract_eval=_abstract_of(_view),
    linear_in=[0],
    transpose=_transpose_view,
    batch_without_axis=_batch_view,
)

# The array that `get` hands on is the one that it was given, whatever the place.
dependence_rules[get_p] = lambda _: [0b111, 0b001]
dependence_rules[view_p] = lambda _: [0b11, 0b01]

# Of the array, one row is computed.
computed[get_p] = computed[take_p] = lambda eqn: eqn.outvars[:1]
computed[put_p] = computed[add_p] = lambda eqn: eqn.invars[2:3]
jointly_linear.update((put_p, add_p))
