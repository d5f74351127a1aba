"""Rows that a loop writes when it likes, and reads again."""

from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from loopax._src.core import row_buffers as rows_of
from loopax._src.core.jaxpr.util import stacked
from loopax._src.frontend.options import one_bool
from loopax._src.frontend.raising import AMOUNT
from loopax._src.frontend.rows import matching_row, one_index, refuse_batch, row_types
from loopax._src.frontend.run_time_checks import Check, settle
from loopax._src.jax_internals import api_boundary, where, zero, zeros
from loopax._src.pytrees.leaves import RowByRow
from loopax._src.pytrees.static import Why, positive_int

_CAPACITY = Why(
    "the shape of the rows",
    "give the most rows that there may be, and append under a traced condition: `append(row, when=...)`",
)


class Buffer(RowByRow):
    """A list of rows with a fixed capacity; a loop can append rows and read rows.

    The meaning, without `capacity`::

        buffer = []
        buffer.append(row)                 # buffer = buffer.append(row)
        if when: buffer.append(row)        # buffer = buffer.append(row, when=when)
        len(buffer), buffer[i], buffer[-1] # buffer.count, buffer[i], buffer[-1]

    A buffer is immutable: `append` returns a new buffer. Put a buffer into the carry of a loop, also of nested loops,
    and append a row when there is something to keep: an accepted step of a solver, an event. Under `jax.vmap` each lane
    has its own count. The batch that `jax.vmap` returns is read by another one: `jax.vmap(lambda buffer: buffer.rows)`.

    Appended rows never change. Therefore rows are written in place, and reverse mode stores no copy of the buffer. The
    cost of a step does not depend on the capacity.

    Parameters
    ----------
    capacity
        The most rows that the buffer can hold: a static, positive integer.
    like
        An example of a row: a pytree of arrays or `jax.ShapeDtypeStruct`s. Only shapes, dtypes and
        memories (the host's or the device's) matter.

    Attributes
    ----------
    count : int32[]
        The number of rows that have been appended.
    capacity : int
        The most rows that the buffer can hold.

    Raises
    ------
    TypeError
        `capacity` is not an integer, or a leaf of `like` is not an array of numbers.
    ValueError
        `capacity` is not positive.

    Notes
    -----
    Cost: `append` writes one row, an index reads one row, and `rows` reads `capacity` rows.

    Derivatives: forward and reverse mode, in every order, with respect to the appended rows.

    In the body of a loop, only the methods of a buffer and loops of loopax may use a buffer. Other uses
    (`jax.lax.cond`, `jnp.where` over the pytree) raise a TypeError that names the alternative, such as `append(row,
    when=...)`.

    """

    count: Int[Array, ""]
    capacity: int = eqx.field(static=True)

    @api_boundary
    def __init__(self, capacity: int, *, like: PyTree[Any]) -> None:
        """Make an empty buffer."""
        self.capacity = positive_int("Buffer(capacity=...)", capacity, "rows", _CAPACITY)
        self.count = jnp.zeros((), jnp.int32)
        self._rows = jax.tree.map(lambda x: zeros(stacked(x, self.capacity)), row_types("Buffer(like=...)", like))

    @api_boundary
    def append(self, row: PyTree[Any], *, when: Bool[Array, ""] | bool = True) -> "Buffer":
        """Return the buffer with one more row.

        Parameters
        ----------
        row
            The new row: a pytree with the structure, shapes and dtypes of the other rows.
        when
            Whether to append the row: one bool, static or traced.

        Raises
        ------
        TypeError
            The row does not match the other rows, or `when` is not one bool.
        equinox.EquinoxRuntimeError
            The buffer is full. The error comes at run time, after the outermost loop; the row is not appended.

        """
        refuse_batch("Buffer.append", self.count)
        row = matching_row("Buffer.append: the row", self._rows, row)
        when = one_bool("Buffer.append(when=...)", when)
        is_full = self.count >= self.capacity
        written = when & ~is_full
        place = jnp.where(written, self.count, self.capacity)
        rows = jax.tree.map(lambda rows, x: rows_of.put(rows, place, x, appends=True), self._rows, row)
        # The count alone depends on the check: the rows of a buffer are seen through it.
        problem = (
            f"the buffer has room for {self.capacity} rows, and all of them have been written. Make it with a larger "
            "`capacity`, or append fewer rows (`when=`)."
        )
        check = Check.of("loopax.Buffer.append", when & is_full, problem)
        count = settle(self.count + written.astype(jnp.int32), [check])
        return eqx.tree_at(lambda b: (b._rows, b.count), self, (rows, count))

    @api_boundary
    def __getitem__(self, index: int | Int[Array, ""]) -> PyTree[Array]:
        """Return one row: 0 is the first row, -1 the last row that was appended.

        Raises
        ------
        TypeError
            The index is not one integer.
        IndexError
            A static index is outside -capacity, ..., capacity - 1.
        equinox.EquinoxRuntimeError
            The row has not been appended. The error comes at run time, after the outermost loop; the row is zero.

        """
        refuse_batch("Buffer[index]", self.count)
        given, index = index, one_index("buffer", index, self.capacity)
        place = jnp.where(index < 0, index + self.count, index)
        # A count that is not valid (`EQX_ON_ERROR=nan`) is larger than any other.
        is_missing = (place < 0) | (place >= jnp.minimum(self.count, self.capacity))
        place = jnp.where(is_missing, self.capacity, place)
        row = jax.tree.map(lambda rows: rows_of.get(rows, place)[0], self._rows)
        return settle(row, [Check.of("loopax.Buffer[index]", is_missing, _MISSING, given)])

    @api_boundary
    def __iter__(self) -> NoReturn:
        """Raise a TypeError: the number of rows is known only at run time."""
        raise TypeError(
            "a Buffer cannot be iterated over: how many rows it has is known only when the program runs. Loop over "
            "them, `loopax.fori_loop(0, buffer.count, lambda i, c: f(c, buffer[i]), c)`, or scan them, "
            "`loopax.scan(f, c, buffer.rows, length=buffer.count)`. All of them are `buffer.rows`, with `buffer.mask`."
        )

    @property
    def mask(self) -> Bool[Array, " capacity"]:
        """Whether each row of `rows` has been appended: True for the first `count` rows."""
        refuse_batch("Buffer.rows", self.count)
        return jnp.arange(self.capacity, dtype=jnp.int32) < self.count

    @property
    def rows(self) -> PyTree[Array]:
        """All rows, `(capacity, ...)`. Rows that have not been appended are zero."""

        def written(rows: Any) -> Any:
            seen, _ = rows_of.view(rows)
            return where(self.mask.reshape(-1, *(1,) * (rows.ndim - 1)), seen, zero(rows.dtype))

        return jax.tree.map(written, self._rows)


_MISSING = (
    f"there is no such row{AMOUNT} yet. An index is at least -buffer.count, and less than buffer.count; "
    "append first, or choose another row where there are not enough."
)
