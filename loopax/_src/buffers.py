"""Rows that a loop writes when it likes, and reads again."""

from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from loopax._src.core.row_buffers import primitives as rows_of
from loopax._src.frontend.options import one_bool
from loopax._src.frontend.rows import matching_row, one_index, row_types
from loopax._src.frontend.runtime_checks import Check, settle
from loopax._src.pytrees.static_args import Why, positive_int
from loopax._src.pytrees.types import RowByRow

_CAPACITY = Why(
    "the shape of the rows",
    "give the most rows that there may be, and append under a traced condition: `append(row, when=...)`",
)


class Buffer(RowByRow):
    """Rows in the order in which they were appended, of which there may be fewer than there is room for.

    The meaning, `capacity` aside::

        buffer = []
        buffer.append(row)                 # buffer = buffer.append(row)
        if when: buffer.append(row)        # buffer = buffer.append(row, when=when)
        len(buffer), buffer[i], buffer[-1] # buffer.count, buffer[i], buffer[-1]

    A buffer does not change: `append` returns another one. Put it into the carry of a loop, of one within
    another too, and append when there is something to keep: the accepted steps of a solver, events. A row that has been
    appended stays what it is, and that is what makes it cheap: it is written in place, nothing of a buffer is
    stored for reverse mode, and a step costs the same however large the buffer is. Under `jax.vmap` every lane has a
    count of its own.

    Parameters
    ----------
    capacity
        How many rows there is room for: a static, positive integer.
    like
        A row: a pytree of arrays or `jax.ShapeDtypeStruct`s, of which shapes and dtypes count.

    Attributes
    ----------
    count : int32[]
        How many rows there are.
    capacity : int
        How many there can be.

    Raises
    ------
    TypeError
        `capacity` is not an integer, or a leaf of `like` is no array of numbers.
    ValueError
        `capacity` is not positive.

    Notes
    -----
    Derivatives: all, in every order, with respect to what is appended. Cost: what is appended and read; `rows` costs
    the capacity. Other ways through a loop's body than these operations (`jax.lax.cond`, a `where` over the tree)
    are a TypeError that names them: say `when=`.

    """

    count: Int[Array, ""]
    capacity: int = eqx.field(static=True)

    def __init__(self, capacity: int, *, like: PyTree[Any]) -> None:
        """Make an empty buffer."""
        self.capacity = positive_int("Buffer(capacity=...)", capacity, "rows", _CAPACITY)
        self.count = jnp.zeros((), jnp.int32)
        self._rows = jax.tree.map(
            lambda x: jnp.zeros((self.capacity, *x.shape), x.dtype), row_types("Buffer(like=...)", like)
        )

    def append(self, row: PyTree[Any], *, when: Bool[Array, ""] | bool = True) -> "Buffer":
        """Write a row behind the others.

        Parameters
        ----------
        row
            A pytree of the same structure, shapes and dtypes as the others.
        when
            One bool: whether to.

        Raises
        ------
        TypeError
            The row does not match the others, or `when` is not one bool.
        equinox.EquinoxRuntimeError
            There is no room left (after the outermost loop, when the program runs). The row is left out.

        """
        row = matching_row("Buffer.append: the row", self._rows, row)
        when = one_bool("Buffer.append(when=...)", when)
        is_full = self.count >= self.capacity
        written = when & ~is_full
        place = jnp.where(written, self.count, self.capacity)
        rows = jax.tree.map(lambda rows, x: rows_of.put(rows, place, x, appends=True), self._rows, row)
        # The count alone depends on the check: the rows of a buffer are seen through it.
        check = Check.of("loopax.Buffer.append", when & is_full, _full_problem(self.capacity))
        count = settle(self.count + written.astype(jnp.int32), [check])
        return eqx.tree_at(lambda b: (b._rows, b.count), self, (rows, count))

    def __getitem__(self, index: int | Int[Array, ""]) -> PyTree[Array]:
        """One row, counted from the first, or from the last where the index is negative.

        Raises
        ------
        TypeError
            The index is not one integer.
        IndexError
            A static index is not from -capacity to capacity - 1.
        equinox.EquinoxRuntimeError
            There is no such row yet (after the outermost loop, when the program runs). Its value is zero then.

        """
        index = one_index("buffer", index, self.capacity)
        place = jnp.where(index < 0, index + self.count, index)
        # A count that is not valid (`EQX_ON_ERROR=nan`) is larger than any other.
        is_missing = (place < 0) | (place >= jnp.minimum(self.count, self.capacity))
        place = jnp.where(is_missing, self.capacity, place)
        row = jax.tree.map(lambda rows: rows_of.get(rows, place)[0], self._rows)
        return settle(row, [Check.of("loopax.Buffer[index]", is_missing, _MISSING)])

    def __iter__(self) -> NoReturn:
        """Refuse: how many rows there are is known only at run time."""
        raise TypeError(
            "a Buffer cannot be iterated over: how many rows it has is known only when the program runs. Loop over "
            "them, `loopax.fori_loop(0, buffer.count, lambda i, c: f(c, buffer[i]), c)`, or scan them, "
            "`loopax.scan(f, c, buffer.rows, length=buffer.count)`. All of them are `buffer.rows`, with `buffer.mask`."
        )

    @property
    def mask(self) -> Bool[Array, " capacity"]:
        """Which rows of `rows` have been written."""
        return jnp.arange(self.capacity, dtype=jnp.int32) < self.count

    @property
    def rows(self) -> PyTree[Array]:
        """All rows, `(capacity, ...)`; those that have not been written are zero."""

        def written(rows: Any) -> Any:
            seen, _ = rows_of.view(rows)
            return jnp.where(self.mask.reshape(-1, *(1,) * (rows.ndim - 1)), seen, jnp.zeros((), rows.dtype))

        return jax.tree.map(written, self._rows)


def _full_problem(capacity: int) -> str:
    return (
        f"the buffer has room for {capacity} rows, and all of them have been written. Make it with a larger "
        "`capacity`, or append fewer rows (`when=`)."
    )


_MISSING = (
    "there is no such row yet. An index is at least -buffer.count, and less than buffer.count; "
    "append first, or choose another row where there are not enough."
)
