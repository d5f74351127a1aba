"""Arrays that are zero but for some elements, as JAX's transposes of reads make them; and how to add them to others.

Such an array is a few updates of zeros. An operation that only moves their elements about, or adds some up, makes
others of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from loopax._src.jax_internals.primitives import one_of
from loopax._src.jax_internals.types import is_number, is_on_host, spec_of, zeros

_T = TypeVar("_T")
_MODE = lax.GatherScatterMode


def all_or_none(items: Iterable[_T | None]) -> tuple[_T, ...] | None:
    """The items; None where one of them is None."""
    found = tuple(items)
    return None if any(item is None for item in found) else found  # pyright: ignore[reportReturnType]


class Form(NamedTuple):
    """Where the elements of an update stand: the arguments of `lax.scatter_add` that are no arrays."""

    shape: tuple[int, ...]  # of the array
    numbers: lax.ScatterDimensionNumbers
    mode: Any
    is_sorted: bool
    is_unique: bool

    @property
    def windows(self) -> dict[int, int]:
        """The axis of the update for each axis of the array along which a window of it is written."""
        numbers = self.numbers
        others = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        axes = [axis for axis in range(len(self.shape)) if axis not in others]
        return dict(zip(axes, numbers.update_window_dims, strict=True))


class Update(NamedTuple):
    """Something that is added to some elements of an array; to all of them where it has no form."""

    value: Any
    indices: Any = None
    form: Form | None = None

    def add_to(self, array: Any) -> Any:
        """The array with it, in place where the array is not used any more."""
        if self.form is None:
            return array + self.value
        _, numbers, mode, is_sorted, is_unique = self.form
        options = {"indices_are_sorted": is_sorted, "unique_indices": is_unique, "mode": mode}
        return lax.scatter_add(array, self.indices, self.value, numbers, **options)

    def where(self, mask: Any, axes: Sequence[int]) -> "Update | None":
        """Only where a mask is True, whose axes are these of the array; None: it is not known where that is."""
        own = all_or_none(map(self._axis_of, axes))
        if own is None:
            return None
        mask = lax.broadcast_in_dim(mask, self.value.shape, own)
        return self._replace(value=jnp.where(mask, self.value, jnp.zeros((), self.value.dtype)))

    def _axis_of(self, axis: int) -> int | None:
        """The axis of the value that goes along all of this one of the array."""
        if self.form is None:
            return axis
        shape, numbers = self.form.shape, self.form.numbers
        if axis in numbers.operand_batching_dims:
            place = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            others = [i for i in range(self.value.ndim) if i not in numbers.update_window_dims]
            return others[place]
        own = self.form.windows.get(axis)
        return own if own is not None and self.value.shape[own] == shape[axis] else None


def window(shape: Sequence[int], value: Any, starts: Sequence[Any]) -> Update:
    """The update of a block that begins there, which is within the array.

    XLA on a CPU copies an array in which a slice at known places is updated beside a scatter. So all updates are
    scatters, and the places are not known to it.
    """
    axes = tuple(range(len(shape)))
    numbers = lax.ScatterDimensionNumbers(axes, (), axes)
    indices = lax.optimization_barrier(jnp.stack([jnp.asarray(start, jnp.int32) for start in starts]))
    return Update(value, indices, Form(tuple(shape), numbers, _MODE.CLIP, True, True))


def _summed(update: Update, shape: tuple[int, ...], axes: Sequence[int]) -> Update | None:
    """The update of an array that is summed along these axes."""
    value, indices, form = update
    if form is None:
        return Update(value.sum(axes))
    numbers, scattered = form.numbers, form.numbers.scatter_dims_to_operand_dims
    if form.mode == _MODE.FILL_OR_DROP and any(axis in scattered for axis in axes):
        return None
    kept = [i for i, axis in enumerate(scattered) if axis not in axes]
    if scattered and not kept:
        return None
    summed = [own for axis, own in form.windows.items() if axis in axes]
    after = lambda axis: axis - sum(other < axis for other in axes)  # noqa: E731
    # Indices of lanes that have an array each become indices of as many updates of one array.
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    batching = [(after(axis), place) for axis, place in batching if axis not in axes]
    windows = [own for axis, own in form.windows.items() if axis not in axes]
    numbers = lax.ScatterDimensionNumbers(
        tuple(own - sum(other < own for other in summed) for own in windows),
        tuple(after(axis) for axis in numbers.inserted_window_dims if axis not in axes),
        tuple(after(scattered[i]) for i in kept),
        tuple(axis for axis, _ in batching),
        tuple(place for _, place in batching),
    )
    indices = indices if len(kept) == len(scattered) else indices[..., jnp.array(kept, jnp.int32)]
    return Update(value.sum(summed), indices, Form(shape, numbers, form.mode, False, False))


def _with_unit_axes(update: Update, shape: tuple[int, ...], moved: dict[int, int] | None) -> Update | None:
    """The update of an array that has other axes of size one; `moved` says where each of the others has gone."""
    if moved is None or update.form is None:
        return None if moved is None else Update(update.value.reshape(shape))
    old, places = update.form.shape, sorted(moved.values())
    gone = [axis for axis in range(len(old)) if axis not in moved]
    # An axis of size one goes by a sum along it.
    left = _summed(update, tuple(old[axis] for axis in sorted(moved)), gone) if gone else update
    if left is None or left.form is None:
        return left
    numbers, new = left.form.numbers, set(range(len(shape))) - set(places)
    numbers = lax.ScatterDimensionNumbers(
        numbers.update_window_dims,
        tuple(sorted(new | {places[axis] for axis in numbers.inserted_window_dims})),
        tuple(places[axis] for axis in numbers.scatter_dims_to_operand_dims),
        tuple(places[axis] for axis in numbers.operand_batching_dims),
        numbers.scatter_indices_batching_dims,
    )
    return left._replace(form=left.form._replace(shape=shape, numbers=numbers))


def _as_part(update: Update, shape: tuple[int, ...], starts: Sequence[int]) -> Update | None:
    """The update of a larger array, of which the array is the part that begins there."""
    value, indices, form = update
    if form is None:
        return window(shape, value, starts)
    numbers = form.numbers
    changed = [axis for axis, start in enumerate(starts) if start or shape[axis] != form.shape[axis]]
    if any(axis in numbers.operand_batching_dims for axis in changed):
        return None
    scattered, columns = list(numbers.scatter_dims_to_operand_dims), []
    for i, axis in enumerate(scattered):
        # What is outside of the part stays outside of the array, or is moved into the part.
        column, size = indices[..., i], value.shape[form.windows[axis]] if axis in form.windows else 1
        last = form.shape[axis] - size
        if axis in changed and form.mode == _MODE.CLIP:
            column = jnp.clip(column, 0, jnp.asarray(last, column.dtype))
        is_inside = (column >= 0) & (column <= jnp.asarray(last, column.dtype))
        new = column + jnp.asarray(starts[axis], column.dtype)
        if axis in changed and form.mode == _MODE.FILL_OR_DROP:
            new = jnp.where(is_inside, new, jnp.asarray(shape[axis], column.dtype))
        columns.append(new)
    for axis in changed:
        if axis not in scattered and starts[axis]:
            scattered.append(axis)
            columns.append(jnp.full(indices.shape[:-1], starts[axis], indices.dtype))
    numbers = lax.ScatterDimensionNumbers(
        numbers.update_window_dims,
        numbers.inserted_window_dims,
        tuple(scattered),
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    indices = lax.optimization_barrier(jnp.stack(columns, -1))
    # What was below the array is beyond the larger one now.
    is_sorted = form.is_sorted and form.mode != _MODE.FILL_OR_DROP
    return Update(value, indices, Form(shape, numbers, form.mode, is_sorted, form.is_unique))


# ---- what operations make of them

_is_broadcast = one_of("broadcast_in_dim")
_is_pad = one_of("pad")


@dataclass
class Base:
    """An array that may be changed in place, as it is now."""

    array: Any
    is_changed: bool = False


class Updated(NamedTuple):
    """An array that is not made yet: zeros, or another array, with updates."""

    aval: Any
    updates: tuple[Update, ...] = ()
    base: Base | None = None  # None: zeros
    source: Any = None  # the equation and its operands, by which it would be made

    @property
    def is_zero(self) -> bool:
        """Whether it is known to be zero."""
        return self.base is None and not self.updates

    def array(self) -> Any:
        """The array, from its updates."""
        array = zeros(self.aval) if self.base is None else self.base.array
        for update in self.updates:
            array = update.add_to(array)
        return array


def may_be_updated(aval: Any) -> bool:
    """Whether an array of this type may be updated: it is on the device, on one of them, and of numbers."""
    is_there = isinstance(prod(aval.shape), int) and not is_on_host(aval) and not any(spec_of(aval))
    return is_there and is_number(aval.dtype) and aval.dtype != bool


def _moved_axes(eqn: Any) -> dict[int, int] | None:
    """Where each axis goes, where an operation only adds or removes axes of size one; None: it does more."""
    old, new, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    match eqn.primitive.name:
        case "broadcast_in_dim":
            moved = dict(enumerate(params["broadcast_dimensions"]))
            return moved if prod(old) == prod(new) and all(old[a] == new[b] for a, b in moved.items()) else None
        case "squeeze":
            return {axis: i for i, axis in enumerate(a for a in range(len(old)) if a not in params["dimensions"])}
        case "reshape" if params["dimensions"] is not None:
            return None
    of_old, of_new = ([axis for axis, size in enumerate(shape) if size != 1] for shape in (old, new))
    return dict(zip(of_old, of_new, strict=True)) if [old[a] for a in of_old] == [new[b] for b in of_new] else None


def makes_zeros(eqn: Any) -> bool:
    """Whether an equation makes an array of zeros, or one that is zero around another one."""
    if not (_is_broadcast(eqn) or _is_pad(eqn)) or not isinstance(eqn.invars[-1], Literal):
        return False
    value = eqn.invars[-1].val
    return jnp.shape(value) == () and bool(value == 0) and may_be_updated(eqn.outvars[0].aval)


def _moved(eqn: Any, x: Any, *_: Any) -> Any:
    """Of what only adds or removes axes."""
    aval = eqn.outvars[0].aval
    if _is_broadcast(eqn) and makes_zeros(eqn):
        return Updated(aval)
    if not isinstance(x, Updated) or x.base is not None:
        return None
    moved = _moved_axes(eqn)
    updates = all_or_none(_with_unit_axes(update, aval.shape, moved) for update in x.updates)
    return None if updates is None else Updated(aval, updates)


def _reduced(eqn: Any, x: Any) -> Any:
    aval = eqn.outvars[0].aval
    if not isinstance(x, Updated) or x.base is not None or not may_be_updated(aval):
        return None
    updates = all_or_none(_summed(update, aval.shape, eqn.params["axes"]) for update in x.updates)
    return None if updates is None else Updated(aval, updates)


def _part(aval: Any, x: Any, starts: Sequence[int]) -> tuple[Update, ...] | None:
    """The updates of an array that is zero but for a part; None: they are not known."""
    if isinstance(x, Updated) and x.base is None:
        return all_or_none(_as_part(update, aval.shape, starts) for update in x.updates)
    return None if isinstance(x, Updated) else (window(aval.shape, x, starts),)


def _padded(eqn: Any, x: Any, _: Any) -> Any:
    """Of a pad by zeros: the transpose of a slice."""
    aval, config = eqn.outvars[0].aval, eqn.params["padding_config"]
    if not makes_zeros(eqn) or any(low < 0 or high < 0 or between for low, high, between in config):
        return None
    updates = _part(aval, x, [low for low, _, _ in config])
    return None if updates is None else Updated(aval, updates)


def _concatenated(eqn: Any, *parts: Any) -> Any:
    """Of parts of which some are zero."""
    aval, along = eqn.outvars[0].aval, eqn.params["dimension"]
    if not any(isinstance(x, Updated) for x in parts) or not may_be_updated(aval):
        return None
    updates, first = [], 0
    for x, given in zip(parts, eqn.invars, strict=True):
        found = _part(aval, x, [first if axis == along else 0 for axis in range(len(aval.shape))])
        if found is None:
            return None
        updates.extend(found)
        first += given.aval.shape[along]
    return Updated(aval, tuple(updates))


def _slice_written(eqn: Any, x: Any, value: Any, *starts: Any) -> Any:
    """Of a slice that is written into zeros: the transpose of a dynamic slice."""
    written, aval = eqn.invars[1], eqn.outvars[0].aval
    if not (isinstance(x, Updated) and x.is_zero):
        return None
    rooms = [size - own for size, own in zip(aval.shape, written.aval.shape, strict=True)]
    inside = [jnp.clip(start, 0, jnp.asarray(room, start.dtype)) for start, room in zip(starts, rooms, strict=True)]
    return Updated(aval, (window(aval.shape, value, inside),))


def _scattered(eqn: Any, x: Any, indices: Any, value: Any) -> Any:
    """Of a scatter into zeros: the transpose of a gather, or of dynamic slices of lanes."""
    if not isinstance(x, Updated) or x.base is not None:
        return None
    params = eqn.params
    if eqn.primitive.name == "scatter" and not (x.is_zero and params["unique_indices"]):
        return None
    flags = params["indices_are_sorted"], params["unique_indices"]
    form = Form(x.aval.shape, params["dimension_numbers"], params["mode"], *flags)
    return Updated(x.aval, (*x.updates, Update(value, indices, form)))


def _negated(_: Any, x: Any) -> Any:
    if not isinstance(x, Updated) or x.base is not None:
        return None
    return Updated(x.aval, tuple(update._replace(value=-update.value) for update in x.updates))


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("broadcast_in_dim", "squeeze", "expand_dims", "reshape", "pvary"), _moved),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), _scattered),
    "dynamic_update_slice": _slice_written,
    "pad": _padded,
    "concatenate": _concatenated,
    "neg": _negated,
    "reduce_sum": _reduced,
}


def updated_by(eqn: Any, operands: Sequence[Any]) -> Updated | None:
    """The result of an equation as updates of zeros; None: it is an array. Operands are arrays, or such results."""
    rule = _RULES.get(eqn.primitive.name)
    return rule and rule(eqn, *operands)


def broadcast_from(eqn: Any, operand: Any) -> tuple[Any, tuple[int, ...]] | None:
    """What a broadcast repeats, and the axes of the result along which that stands; None: it is no broadcast."""
    if not _is_broadcast(eqn) or not isinstance(operand, jax.Array):
        return None
    axes, old, new = eqn.params["broadcast_dimensions"], operand.shape, eqn.outvars[0].aval.shape
    repeated = [i for i, axis in enumerate(axes) if old[i] != new[axis]]
    return lax.squeeze(operand, repeated), tuple(axis for i, axis in enumerate(axes) if i not in repeated)
