"""Operations on few numbers, written as simpler ones: XLA takes these into a function, and leaves others to libraries.

They compute the same, rounded otherwise: sums in order, and elimination with the pivots that LAPACK takes.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from loopax._src.jax_internals.operations import is_product, num_places, updates
from loopax._src.jax_internals.primitives import one_of, products_per_result

# Larger ones take longer so than a library. Found by trying.
_MOST_PRODUCTS = 1024  # of numbers, in a product of matrices
MOST_ADDED_UP = 4000  # numbers; XLA leaves 4096 to a library
_MOST_IN_ROW = 16  # that is sorted
_LARGEST_MATRIX = 8  # that is factorized, or solved with
_MOST_FACTORIZED = 2048  # multiplications
MOST_WRITES = 128  # at places of an array

_sorts = one_of("sort")
_solves = one_of("triangular_solve")
_eliminates = one_of("lu")
_factorizes = one_of("lu", "cholesky")


class Simpler(NamedTuple):
    """A function that does the same as an operation, and the number of its equations, about."""

    function: Callable[..., Any]
    num_equations: int


def in_simple_operations(eqn: Any, lanes: int = 1) -> Simpler | None:
    """An operation of few numbers, for so many lanes, written so; None: it is larger, or another one."""
    if not eqn.invars:
        return None
    first, results = eqn.invars[0].aval, lanes * sum(x.aval.size for x in eqn.outvars)
    if is_product(eqn):
        products = results * products_per_result(eqn)
        is_of_vectors = products == lanes * first.size == lanes * eqn.invars[1].aval.size
        is_small = products <= (MOST_ADDED_UP if is_of_vectors else _MOST_PRODUCTS) and first.dtype != bool
        return Simpler(partial(_multiplied_and_added, eqn), 5) if is_small else None
    if updates(eqn):
        return Simpler(partial(_written_in_turn, eqn), 11) if lanes * num_places(eqn) <= MOST_WRITES else None
    if _sorts(eqn):
        dimension, is_real = eqn.params["dimension"], not jnp.issubdtype(first.dtype, jnp.complexfloating)
        row = first.shape[dimension]
        is_small = row <= _MOST_IN_ROW and row * results <= _MOST_PRODUCTS
        return (
            Simpler(partial(_sorted, dimension), 31) if is_small and is_real and eqn.params["num_keys"] == 1 else None
        )
    if not (_solves(eqn) or _factorizes(eqn)):
        return None
    rows, columns = first.shape[-2:]
    if not (0 < rows == columns <= _LARGEST_MATRIX and 0 < rows * results <= _MOST_FACTORIZED):
        return None
    if _solves(eqn):
        return Simpler(partial(_solved, **{name: eqn.params[name] for name in _FLAGS}), 31)
    return Simpler(_eliminated, 74) if _eliminates(eqn) else Simpler(_root, 39)


def _multiplied_and_added(eqn: Any, a: Any, b: Any) -> Any:
    """A product of matrices; numbers of 16 bits are added up in 32."""
    (of_a, of_b), (lanes_of_a, lanes_of_b) = eqn.params["dimension_numbers"]
    rows = [axis for axis in range(a.ndim) if axis not in (*of_a, *lanes_of_a)]
    columns = [axis for axis in range(b.ndim) if axis not in (*of_b, *lanes_of_b)]
    size = lambda x, axes: prod(x.shape[axis] for axis in axes)  # noqa: E731
    lanes, summed = size(a, lanes_of_a), size(a, of_a)
    a = a.transpose([*lanes_of_a, *rows, *of_a]).reshape(lanes, size(a, rows), summed, 1)
    b = b.transpose([*lanes_of_b, *of_b, *columns]).reshape(lanes, 1, summed, size(b, columns))
    aval = eqn.outvars[0].aval
    dtype = jnp.float32 if jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4 else aval.dtype
    return lax.reduce_sum(a.astype(dtype) * b.astype(dtype), (2,)).astype(aval.dtype).reshape(aval.shape)


def _written_in_turn(eqn: Any, array: Any, places: Any, values: Any) -> Any:
    """Writes at several places, one block after another."""
    if not values.size:
        return array
    numbers, batch, size = eqn.params["dimension_numbers"], places.shape[:-1], num_places(eqn)
    window = numbers.update_window_dims
    rows = [axis for axis in range(values.ndim) if axis not in window]
    values = values.transpose([*rows, *window]).reshape(size, *(values.shape[axis] for axis in window))
    # Places along axes that places and array share are the numbers of these places themselves.
    own = [lax.broadcasted_iota(places.dtype, (*batch, 1), axis) for axis in numbers.scatter_indices_batching_dims]
    places = jnp.concatenate([*own, places], -1).reshape(size, len(own) + places.shape[-1])
    block = lax.ScatterDimensionNumbers(
        tuple(range(len(window))),
        tuple(sorted((*numbers.inserted_window_dims, *numbers.operand_batching_dims))),
        (*numbers.operand_batching_dims, *numbers.scatter_dims_to_operand_dims),
    )
    params = {**eqn.params, "dimension_numbers": block, "unique_indices": True, "indices_are_sorted": True}

    def write(i: Any, array: Any) -> Any:
        return eqn.primitive.bind(array, _at(places, i, 0), _at(values, i, 0), **params)

    return lax.fori_loop(jnp.int32(0), jnp.int32(size), write, array)


def _sorted(dimension: int, *operands: Any) -> list[Any]:
    """Rows in the order of the first operand: each element goes to the place that is the number of those before it."""
    if not operands[0].size:
        return list(operands)
    rows = [jnp.moveaxis(x, dimension, -1) for x in operands]
    key = rows[0]
    a, b = jnp.broadcast_arrays(key[..., None, :], key[..., :, None])  # [..., i, j]: that of j, and that of i
    is_less = a < b
    if jnp.issubdtype(key.dtype, jnp.floating):
        is_less |= jnp.isnan(b) & ~jnp.isnan(a)
    numbers = _numbers(key.shape[-1])
    is_equal_and_first = ~jnp.swapaxes(is_less, -1, -2) & (numbers[None, :] < numbers[:, None])
    rank = lax.reduce_sum((is_less | is_equal_and_first).astype(jnp.int32), (key.ndim,))
    source = lax.argmax((rank[..., None, :] == numbers[:, None]).astype(jnp.int32), key.ndim, jnp.int32)
    return [jnp.moveaxis(jnp.take_along_axis(x, source, -1), -1, dimension) for x in rows]


def _eliminated(a: Any) -> list[Any]:
    """`lu`: both factors in one matrix, the rows that were exchanged, and the order of the rows."""
    numbers = _numbers(a.shape[-1])

    def step(k: Any, state: Any) -> Any:
        a, pivots, order = state
        column = _at(a, k, -1)
        size = abs(column.real) + abs(column.imag) if jnp.iscomplexobj(a) else abs(column)
        pivot = lax.argmax(jnp.where(numbers >= k, size, -jnp.ones_like(size)), size.ndim - 1, jnp.int32)[..., None]
        exchanged = jnp.where(numbers == k, pivot, jnp.where(numbers == pivot, k, numbers))
        order, a = jnp.take_along_axis(order, exchanged, -1), jnp.take_along_axis(a, exchanged[..., None], -2)
        row, column = _at(a, k, -2), _at(a, k, -1)
        divisor = _at(row, k, -1)[..., None]
        divisor = jnp.where(divisor == 0, jnp.ones_like(divisor), divisor)
        factors = jnp.where(numbers > k, column / divisor, jnp.zeros_like(column))[..., None]
        rest = jnp.where(numbers > k, row, jnp.zeros_like(row))[..., None, :]
        a = jnp.where((numbers[:, None] > k) & (numbers == k), factors, a - factors * rest)
        return a, jnp.where(numbers == k, pivot, pivots), order

    start = jnp.broadcast_to(numbers, a.shape[:-1])
    return list(lax.fori_loop(jnp.int32(0), jnp.int32(numbers.size), step, (a, start, start)))


_FLAGS = "left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal"


def _solved(
    a: Any, b: Any, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool, unit_diagonal: bool
) -> Any:
    """`triangular_solve`."""
    a = a.conj() if conjugate_a else a
    if transpose_a == left_side:  # the transpose of `x @ a = b` is solved from the left
        a, lower = jnp.swapaxes(a, -1, -2), not lower
    b = b if left_side else jnp.swapaxes(b, -1, -2)
    numbers = _numbers(a.shape[-1])

    def step(i: Any, x: Any) -> Any:
        k = i if lower else numbers.size - 1 - i
        row = _at(a, k, -2)
        known = jnp.where(numbers < k if lower else numbers > k, row, jnp.zeros_like(row))
        value = _at(b, k, -2) - (known[..., None] * x).sum(-2)
        value = value if unit_diagonal else value / _at(row, k, -1)[..., None]
        return jnp.where(numbers[:, None] == k, value[..., None, :], x)

    x = lax.fori_loop(jnp.int32(0), jnp.int32(numbers.size), step, jnp.zeros_like(b))
    return x if left_side else jnp.swapaxes(x, -1, -2)


def _root(a: Any) -> Any:
    """`cholesky`: NaN where the matrix is not positive definite."""
    numbers = _numbers(a.shape[-1])

    def step(k: Any, state: Any) -> Any:
        root, is_positive = state
        column = _at(a, k, -1) - (root * _at(root, k, -2).conj()[..., None, :]).sum(-1)
        pivot = _at(column, k, -1)[..., None].real
        column = jnp.where(numbers >= k, column / jnp.sqrt(pivot).astype(a.dtype), jnp.zeros_like(column))
        return jnp.where(numbers == k, column[..., None], root), is_positive & (pivot > 0)

    start = jnp.zeros_like(a), jnp.ones((*a.shape[:-2], 1), bool)
    root, is_positive = lax.fori_loop(jnp.int32(0), jnp.int32(numbers.size), step, start)
    return jnp.where(is_positive[..., None], root, jnp.full_like(root, jnp.nan))


def _at(x: Any, k: Any, axis: int) -> Any:
    return lax.dynamic_index_in_dim(x, k, axis, keepdims=False, allow_negative_indices=False)


def _numbers(size: int) -> Any:
    return lax.iota(jnp.int32, size)
