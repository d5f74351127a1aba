"""The last rows of a series, in the carry of a loop."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from loopax._src.core import row_buffers as buffers
from loopax._src.core.jaxpr.util import stacked
from loopax._src.frontend.options import SCAN, rows_of
from loopax._src.frontend.raising import AMOUNT
from loopax._src.frontend.rows import matching_row, one_index, refuse_batch, row_types
from loopax._src.frontend.run_time_checks import Check, settle
from loopax._src.jax_internals import api_boundary, keep_bits, on_device, zero, zeros
from loopax._src.pytrees.leaves import describe, with_arrays
from loopax._src.pytrees.static import Why, positive_int

# From so many bytes on, rows are written in place, around a ring, not shifted by one (docs/benchmark-details.md).
RING_BYTES = 32 * 1024
_SIZE = Why(
    "the shape of the window", "give the most rows that are looked back at, and look back by the number: `history[-n]`"
)


class History(eqx.Module):
    """A window on a series: the last `k` rows.

    The meaning::

        history = rows[:k]
        history = history[1:] + [row]        # history = history.push(row)
        history[-1], history[-2], history    # history[-1], history[-2], history.rows
        len(history)                         # len(history)

    A history is immutable: `push` returns a new history. Put a history into the carry of a loop. The cost of a step
    then does not depend on the length of the series. Histories are used in multi-step integrators, autoregressive
    models and delays.

    Parameters
    ----------
    k
        The number of rows: a static, positive integer.
    rows
        The start of the series: a pytree of arrays `(rows, ...)` with at least `k` rows. The history holds the first
        `k` rows, oldest first. None: give `like`.
    like
        An example of a row, in place of `rows`: a pytree of arrays or `jax.ShapeDtypeStruct`s.
    fill
        With `like`: the number that fills all rows at the start. None: the history starts empty, with rows of zeros
        that `count` and `mask` leave out.

    Raises
    ------
    TypeError
        - `k` is not an integer.
        - A leaf is not an array of numbers.
        - Both `rows` and `like` are given, or neither.
        - `fill` is given together with `rows`, or has another type than the rows.
    ValueError
        `k` is not positive, `rows` has fewer than `k` rows, or the arrays of `rows` have different lengths.

    Notes
    -----
    Cost: `push` shifts windows of less than 32 KiB. A larger window is a ring, and `push` writes one row. The time of
    `rows` is in proportion to the window.

    Cost of a gradient: a gradient stores the window like the rest of the carry. With `Residuals()`, a gradient stores
    only what the derivative needs of the rows that were read.

    Derivatives: forward and reverse mode, in every order, also with respect to `rows`.

    """

    _rows: PyTree[Array]
    _oldest: Int[Array, ""] | None  # in a ring, where the oldest row stands; None: rows stand in order
    _count: Int[Array, ""] | None  # the rows pushed to a history that started empty, at most k; None: k
    _size: int = eqx.field(static=True)

    @api_boundary
    def __init__(
        self, k: int, rows: PyTree[Any] | None = None, *, like: PyTree[Any] | None = None, fill: Any = None
    ) -> None:
        """Make a history from the start of a series, or an empty one."""
        self._size = k = positive_int("History(k=...)", k, "rows", _SIZE)
        if (rows is None) == (like is None):
            raise TypeError("History(k, ...): give either `rows`, the start of the series, or `like`, a row.")
        if not (rows is None or fill is None):
            raise TypeError("History(k, rows, fill=...): `fill` is for rows that are not given. Leave one of them out.")
        what = "History(like=...)" if rows is None else "History(rows=...)"
        types = row_types(what, like if rows is None else rows)
        if rows is None:
            self._rows = jax.tree.map(lambda x: zeros(stacked(x, k)), types)
            if fill is not None:
                numbers = jax.tree.map(lambda x: zero(x.dtype)[None], types)
                numbers = matching_row("History(fill=...)", numbers, jax.tree.map(lambda _: fill, types))
                self._rows = jax.tree.map(partial(on_device, jnp.full_like), self._rows, numbers)
        else:
            rows = with_arrays(rows)  # a Python number in a module has no rows either
            number = rows_of(SCAN._replace(name="History", xs="rows"), rows)
            if number is None:
                raise TypeError(f"History(rows=...): got {describe(rows)}, expected arrays with at least {k} rows.")
            if number < k:
                problem = f"the window is longer than the data: rows has {number} rows. Give {k}."
                raise ValueError(f"History({k}, rows): {problem}")
            self._rows = jax.tree.map(lambda x: keep_bits(lambda x: x[:k], jnp.asarray(x)), rows)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self._rows))
        self._oldest = jnp.zeros((), jnp.int32) if size >= RING_BYTES and self._size > 1 else None
        self._count = jnp.zeros((), jnp.int32) if rows is None and fill is None else None

    @api_boundary
    def push(self, row: PyTree[Any]) -> "History":
        """Return the history with this row added at the end and the oldest row removed.

        Parameters
        ----------
        row
            The new row: a pytree with the structure, shapes and dtypes of the other rows.

        Raises
        ------
        TypeError
            The row has another structure, shapes or dtypes than the other rows.

        """
        self._refuse_batch("History.push")
        row = matching_row("History.push: the row", self._rows, row)
        oldest, count = self._oldest, self._count
        if oldest is None:
            pushed = partial(keep_bits, lambda rows, row: jnp.concatenate([rows[1:], row[None]]))
            rows = jax.tree.map(pushed, self._rows, row)
        else:
            rows = jax.tree.map(lambda rows, x: buffers.put(rows, oldest, x), self._rows, row)
            oldest = jnp.where(oldest == self._size - 1, 0, oldest + 1)
        if count is not None:
            count = jnp.minimum(count + 1, self._size)
        new = (rows, oldest, count)
        return eqx.tree_at(lambda h: (h._rows, h._oldest, h._count), self, new, is_leaf=lambda x: x is None)

    @property
    def count(self) -> Int[Array, ""]:
        """The number of rows that hold a value, int32: `k`, or fewer in a history that started empty."""
        return jnp.int32(self._size) if self._count is None else self._count

    @property
    def mask(self) -> Bool[Array, " k"]:
        """Which of `rows` hold a value: the last `count` of them."""
        self._refuse_batch("History.mask")
        return jnp.arange(self._size, dtype=jnp.int32) >= self._size - self.count

    @property
    def rows(self) -> PyTree[Array]:
        """All rows, `(k, ...)`, oldest first. Rows that hold no value yet are zero, and come before the others."""
        if self._oldest is None:
            return self._rows
        self._refuse_batch("History.rows")
        order = (jnp.arange(self._size, dtype=jnp.int32) + self._oldest) % self._size
        in_order = partial(keep_bits, lambda rows, order: rows[order])
        return jax.tree.map(lambda rows: on_device(in_order, buffers.view(rows)[0], order), self._rows)

    def _refuse_batch(self, name: str) -> None:
        refuse_batch(name, self._count if self._oldest is None else self._oldest)

    def __len__(self) -> int:
        """Return the number of rows, `k`."""
        return self._size

    @api_boundary
    def __getitem__(self, index: int | Int[Array, ""]) -> PyTree[Array]:
        """Return one row: 0 is the oldest row, -1 the newest.

        Raises
        ------
        TypeError
            The index is not one integer.
        IndexError
            A static index is outside -k, ..., k - 1.
        equinox.EquinoxRuntimeError
            A traced index is outside -k, ..., k - 1. The error comes at run time, after the outermost loop; the row is
            zero.

        """
        size = self._size
        self._refuse_batch("History[index]")
        given, index = index, one_index("history", index, size)
        if isinstance(index, int):
            place, checks = jnp.int32(index % size), []
        else:
            is_missing = (index < -size) | (index >= size)
            place = jnp.where(is_missing, size, jnp.where(index < 0, index + size, index))
            problem = f"there are {size} rows, from {-size} to {size - 1}, and the index{AMOUNT} is none of them."
            checks = [Check.of("loopax.History[index]", is_missing, problem, given)]
        if self._oldest is not None:
            inside = place < size
            place = jnp.where(inside, (place + self._oldest) % size, place)
        row = jax.tree.map(lambda rows: buffers.get(rows, place)[0], self._rows)
        return settle(row, checks)
