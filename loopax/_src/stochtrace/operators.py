"""What a trace is taken of: a matrix, a function or a `lineax` operator, as one function of flat vectors."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Inexact, PyTree

from loopax._src.pytrees.diff import same_structure
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static_args import Why, refuse_arrays

_SIZE = Why(
    "the shape of the probes", "give the largest size that there may be, and let the operator be zero beyond the others"
)


@dataclass(frozen=True)
class Operator:
    """A square operator.

    `matvec(v)` is A v for a vector of `size` elements; `sign` is 1 where A is declared positive semidefinite, -1
    where it is declared negative semidefinite, 0 where nothing is.
    """

    matvec: Callable[[Inexact[Array, " n"]], Inexact[Array, " n"]]
    size: int
    dtype: Any
    sign: int = 0

    @property
    def working_dtype(self) -> Any:
        """What estimates are computed in: float32 at least."""
        return self.dtype if jnp.finfo(self.dtype).bits >= 32 else jnp.dtype(jnp.float32)


def to_operator(operator: Any, size: Any) -> Operator:
    """The operator that a user has given, or an error for what is none."""
    if isinstance(operator, jax.Array | np.ndarray):
        return _of_matrix(operator, size)
    lineax = sys.modules.get("lineax")  # who has one of its operators has imported it
    if lineax is not None and isinstance(operator, lineax.AbstractLinearOperator):
        return _of_lineax(lineax, operator, size)
    if callable(operator):
        return _of_function(operator, size)
    raise TypeError(
        f"estimate_trace(operator, ...): got {describe(operator)}, expected a square matrix, a function v -> A v with "
        "`size=`, or a lineax operator."
    )


def _of_matrix(matrix: Any, size: Any) -> Operator:
    _refuse_size("a matrix", size)
    shape = jnp.shape(matrix)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(
            f"estimate_trace(operator, ...): got an array of shape {shape}, expected a square matrix. Only a map of a "
            "space to itself has a trace; for a stack of matrices use `jax.vmap`."
        )
    matrix = jnp.asarray(matrix)
    _check_dtype(matrix.dtype)
    _check_size(shape[0])
    return Operator(lambda v: matrix @ v, shape[0], matrix.dtype)


def _of_lineax(lineax: Any, operator: Any, size: Any) -> Operator:
    _refuse_size("a lineax operator", size)
    if operator.in_size() != operator.out_size():
        raise ValueError(
            f"estimate_trace(operator, ...): the operator maps vectors of {operator.in_size()} elements to vectors of "
            f"{operator.out_size()}. Only a square operator has a trace."
        )
    sign = int(lineax.is_positive_semidefinite(operator)) or -int(lineax.is_negative_semidefinite(operator))
    return _of_structure(operator.mv, operator.in_structure(), sign)


def _of_function(function: Callable[[Any], Any], size: Any) -> Operator:
    if size is None:
        raise TypeError(
            "estimate_trace(operator, size=None): a function does not say how long its vectors are. Give `size=`: a "
            "number of elements, or a pytree of arrays or `jax.ShapeDtypeStruct`s like what the function takes."
        )
    if isinstance(size, jax.Array | np.ndarray) and not size.shape:
        refuse_arrays("estimate_trace(size=...)", size, "a Python int", _SIZE)
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        return _of_structure(function, size, 0)
    if size < 1:
        raise ValueError(f"estimate_trace(size=...): got {size}, expected at least 1, the number of elements.")
    real = jax.ShapeDtypeStruct((int(size),), jnp.result_type(float))
    result = _result_type(function, real)
    is_complex = all(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in jax.tree.leaves(result))
    return _of_structure(function, result if is_complex else real, 0)


def _of_structure(function: Callable[[Any], Any], structure: PyTree[Any], sign: int) -> Operator:
    """A function of pytrees as one of vectors."""
    structure = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), structure)
    leaves = jax.tree.leaves(structure)
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    _check_size(size)
    dtype = leaves[0].dtype
    if any(leaf.dtype != dtype for leaf in leaves):
        names = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
        raise TypeError(
            f"estimate_trace(operator, ...): the operator's vectors have parts of different dtypes ({names}), and "
            "probes have one. Let the function take one dtype, and cast in it."
        )
    _check_dtype(dtype)
    result = _result_type(function, structure)
    _check_result(structure, result)
    unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), structure))[1]
    return Operator(lambda v: ravel_pytree(function(unravel(v)))[0], size, dtype, sign)


def _result_type(function: Callable[[Any], Any], structure: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    try:
        return jax.eval_shape(function, structure)
    except Exception as error:
        error.add_note(
            f"Note of loopax: estimate_trace has called the operator with vectors of type {_types(structure)}. Where "
            "it wants others, say so with size=jax.ShapeDtypeStruct(shape, dtype)."
        )
        raise


def _check_result(structure: PyTree[Any], result: PyTree[Any]) -> None:
    same = same_structure(jax.tree.structure(structure), jax.tree.structure(result)) and all(
        a.shape == b.shape for a, b in zip(jax.tree.leaves(structure), jax.tree.leaves(result), strict=True)
    )
    if not same:
        raise ValueError(
            f"estimate_trace(operator, ...): the operator takes {_types(structure)} and returns {_types(result)}. Only "
            "a map of a space to itself has a trace."
        )
    given, got = jax.tree.leaves(structure)[0].dtype, jnp.result_type(*jax.tree.leaves(result))
    if jnp.issubdtype(got, jnp.complexfloating) and not jnp.issubdtype(given, jnp.complexfloating):
        raise TypeError(
            f"estimate_trace(operator, ...): the operator takes {_types(structure)} and returns {_types(result)}. Give "
            f"size=jax.ShapeDtypeStruct(shape, {got}), so that probes are complex too."
        )


def _check_dtype(dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"estimate_trace(operator, ...): the operator has the dtype {dtype}, expected a floating or complex one. "
            "Cast it, for example with `matrix.astype(float)`."
        )


def _check_size(size: int) -> None:
    if size == 0:
        raise ValueError("estimate_trace(operator, ...): the operator's vectors have no elements.")


def _refuse_size(what: str, size: Any) -> None:
    if size is not None:
        raise ValueError(f"estimate_trace(size={size!r}): {what} has a size of its own. Leave `size` out.")


def _types(structure: PyTree[Any]) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]", structure))
