"""Rows of pytrees: what a row may be, whether one matches others, at which index it stands."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array, PyTree

from loopax._src.core.buffer_versions import strays
from loopax._src.frontend.extent import width_of
from loopax._src.jax_internals import ClosedJaxpr, convert, is_on_host, mapped_aval, memory_space
from loopax._src.pytrees.leaves import RowByRow, describe, same_structure, stays


def refuse_strays(where: str, carry: PyTree[Any], body: ClosedJaxpr, first: int, predicated: bool) -> None:
    """Refuse other ways through a body than the operations of rows; `first` is the first input of its carry."""
    kept = iter(stays(carry))
    end = first + predicated + stays(carry).count(False)
    ways = iter(strays(body, range(first, end))[predicated:])
    for path, node in tree_flatten_with_path(carry, is_leaf=lambda node: isinstance(node, RowByRow))[0]:
        of_node = [[] if next(kept) else next(ways) for _ in jax.tree.leaves(node)]
        if isinstance(node, RowByRow):
            found = sorted({name for names in of_node[: len(jax.tree.leaves(node._rows))] for name in names})
            if found:
                raise TypeError(
                    f"{where} sends the rows of a {type(node).__name__} (carry{keystr(path)}) through "
                    f"{', '.join(found)}. Only `append`, `[]`, `rows` and loops of loopax may touch them: then they "
                    "are written in place, and nothing of them is stored. Instead of choosing between two of them "
                    "(`jax.lax.cond`, `jnp.where`), say `append(row, when=...)`; read a row before a `cond`."
                )


def matching_row(what: str, rows: PyTree[Array], row: PyTree[Any]) -> PyTree[Array]:
    """A row as arrays of the types of others: Python numbers and weakly typed arrays take the dtype, others have it."""
    wanted = jax.tree.map(lambda rows: mapped_aval(rows.shape[0], 0, jax.typeof(rows)), rows)
    if not same_structure(jax.tree.structure(row), jax.tree.structure(wanted)):
        raise TypeError(
            f"{what} is a pytree of another structure: got {jax.tree.structure(row)}, expected "
            f"{jax.tree.structure(wanted)}."
        )
    misfits, advice = [], set()
    for (path, leaf), aval in zip(tree_flatten_with_path(row)[0], jax.tree.leaves(wanted), strict=True):
        if not (problem := _misfit(leaf, aval)):
            continue
        advice.add("\n" + problem)
        expected = f"{aval.dtype.name}{'<host>' if is_on_host(aval) else ''}{list(aval.shape)}"
        misfits.append(f"  {keystr(path) or 'the row itself'}: got {describe(leaf)}, expected {expected}")
    if misfits:
        raise TypeError(f"{what} does not match the others, at:\n" + "\n".join(misfits) + "".join(sorted(advice)))
    return jax.tree.map(lambda x, aval: convert(x, aval.dtype), row, wanted)


def _misfit(leaf: Any, aval: Any) -> str:
    """What to do about a leaf that does not fit; nothing, if it fits."""
    given = _type_of(leaf)
    if given is None:
        return "Give an array."
    if _memory_of(leaf) is not memory_space(aval):
        return "Move it (`jax.device_put(x, ...)`), or choose another `like`."
    if given.shape != aval.shape:
        return (
            "Give one row of the shape of the others: reduce, slice or `x.reshape(...)` it, or choose another `like`."
        )
    with jax.numpy_dtype_promotion("standard"):  # the strict one has an error of its own
        dtype = jnp.result_type(aval.dtype, leaf) if given.weak_type else given.dtype
    return "" if dtype == aval.dtype else "Convert the dtype (`x.astype(...)`)."


def _type_of(leaf: Any) -> Any:
    """The type of a leaf as an array, None if it cannot be one."""
    try:
        return jax.eval_shape(jnp.asarray, leaf)
    except TypeError:
        return None


def _memory_of(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array | core.ShapedArray)
    return memory_space(leaf) if is_array else jax.memory.Space.Device


def row_types(what: str, row: PyTree[Any]) -> PyTree[core.ShapedArray]:
    """The types of the leaves of a row: shapes, dtypes and memories."""

    def of_leaf(path: Any, leaf: Any) -> core.ShapedArray:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | core.ShapedArray) else _type_of(leaf)
        if aval is None or not (jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_):
            raise TypeError(
                f"{what}: a row is a pytree of arrays of numbers or bools, but the leaf {keystr(path) or 'itself'} is "
                f"{describe(leaf)}. Keep it elsewhere, or give a PRNG key as `jax.random.key_data(key)`."
            )
        return core.ShapedArray(aval.shape, aval.dtype, memory_space=_memory_of(leaf))

    return jax.tree_util.tree_map_with_path(of_leaf, row)


def one_index(name: str, index: Any, size: int) -> int | Array:
    """The index of one of `size` rows: an int where it is static, else int32[], beyond them where the user's is."""
    if isinstance(index, jax.Array) and index.shape == () and jnp.issubdtype(index.dtype, jnp.integer):
        own, narrow = jnp.iinfo(index.dtype), jnp.iinfo(jnp.int32)
        if int(own.max) > int(narrow.max):
            with width_of(index):
                index = jnp.clip(index, max(int(own.min), int(narrow.min)), int(narrow.max))
        return index.astype(jnp.int32)
    try:
        place = None if isinstance(index, bool) else operator.index(index)
    except TypeError:
        place = None
    if place is not None:
        if not -size <= place < size:
            raise IndexError(f"{name}[{place}]: there are {size} rows at most, from {-size} to {size - 1}.")
        return place
    raise TypeError(
        f"rows are read one at a time, at an integer: got {describe(index)}. All of them are `.rows`, an array that "
        "slices as others do."
    )


def refuse_batch(name: str, number: Any) -> None:
    """Raise for a batch of buffers or histories, as `jax.vmap` returns it: its first axis is not that of rows.

    `number` is an int32 scalar of one of them; None: there is none.
    """
    if shape := getattr(number, "shape", ()):
        what = name.removesuffix("[index]").partition(".")[0].lower()
        raise ValueError(
            f"{name}: this is a batch of lanes {shape}, and the call is for one {what}. Map it, too: "
            f"`jax.vmap(lambda {what}: {what}...)`."
        )
