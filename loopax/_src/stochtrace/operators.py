"""What a trace is taken of: a matrix, a function or a `lineax` operator, as one function of flat vectors."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Inexact, Int, PyTree

from loopax._src.core.jaxpr.types import differing
from loopax._src.jax_internals import jaxpr_as_fun, no_tangent, open_constants, vary, varying_axes, with_varying_axes
from loopax._src.kinds import Checkpointed
from loopax._src.kinds.steps import jvp
from loopax._src.loops import scan
from loopax._src.pytrees.leaves import describe, same_structure, type_in_words
from loopax._src.pytrees.static import Why, refuse_arrays
from loopax._src.stochtrace.factorizations import product

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
    lineax = sys.modules.get("lineax")  # who has one of its operators has imported it
    is_lineax = lineax is not None and isinstance(operator, lineax.AbstractLinearOperator)
    is_matrix = isinstance(operator, jax.Array | np.ndarray)
    if size is not None and (is_matrix or is_lineax):
        what = "a matrix" if is_matrix else "a lineax operator"
        raise ValueError(f"estimate_trace(size={size!r}): {what} has a size of its own. Leave `size` out.")
    if is_matrix:
        shape = jnp.shape(operator)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(
                f"estimate_trace(operator, ...): got an array of shape {shape}, expected a square matrix. Only a map "
                "of a space to itself has a trace; for a stack of matrices use `jax.vmap`."
            )
        matrix = jnp.asarray(operator)
        return Operator(lambda v: product(matrix, v), shape[0], _checked_dtype(shape[0], {matrix.dtype}))
    if lineax is not None and is_lineax:
        if operator.in_size() != operator.out_size():
            raise ValueError(
                f"estimate_trace(operator, ...): the operator maps vectors of {operator.in_size()} elements to vectors "
                f"of {operator.out_size()}. Only a square operator has a trace."
            )
        sign = int(lineax.is_positive_semidefinite(operator)) or -int(lineax.is_negative_semidefinite(operator))
        return _of_structure(operator.mv, operator.in_structure(), sign)
    if callable(operator):
        return _of_function(operator, size)
    raise TypeError(
        f"estimate_trace(operator, ...): got {describe(operator)}, expected a square matrix, a function v -> A v with "
        "`size=`, or a lineax operator."
    )


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
    dtype = _checked_dtype(size, {leaf.dtype for leaf in leaves})
    result = _result_type(function, structure)
    results = jax.tree.leaves(result)
    types = f"estimate_trace(operator, ...): the operator takes {_types(structure)} and returns {_types(result)}."
    is_same = same_structure(jax.tree.structure(structure), jax.tree.structure(result))
    if not is_same or any(x.shape != y.shape for x, y in zip(leaves, results, strict=True)):
        raise ValueError(f"{types} Only a map of a space to itself has a trace.")
    got = jnp.result_type(*results)
    if jnp.issubdtype(got, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{types} Give size=jax.ShapeDtypeStruct(shape, {got}), so that probes are complex too.")
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


def _checked_dtype(size: int, dtypes: set[Any]) -> Any:
    """The dtype of vectors of so many elements whose parts have these; an error where no probe is like them."""
    if size == 0:
        raise ValueError("estimate_trace(operator, ...): the operator's vectors have no elements.")
    if len(dtypes) > 1:
        raise TypeError(
            "estimate_trace(operator, ...): the operator's vectors have parts of different dtypes "
            f"({', '.join(sorted(map(str, dtypes)))}), and probes have one. Let the function take one dtype, and cast "
            "in it."
        )
    (dtype,) = dtypes
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"estimate_trace(operator, ...): the operator has the dtype {dtype}, expected a floating or complex one. "
            "Cast it, for example with `matrix.astype(float)`."
        )
    return dtype


def _types(structure: PyTree[Any]) -> str:
    return str(jax.tree.map(type_in_words, structure))


Parameters = Sequence[Array]
Probes = Literal["rademacher", "normal", "sphere"]


class Products:
    """Products as a function of `parameters`, the arrays that the operator has: so that they can be differentiated.

    `batch` of them are evaluated together. In a `jax.shard_map`, probes vary over `axes`; where images vary over more,
    so do the vectors that estimators make of them.
    """

    def __init__(self, operator: Operator, batch: int, axes: frozenset[Any]):
        vector = core.ShapedArray((operator.size,), operator.dtype)
        while True:
            traced = jax.make_jaxpr(operator.matvec)(with_varying_axes(vector, axes))
            if (of_images := differing(traced.out_avals)) <= axes:
                break
            axes |= of_images
        open_jaxpr, parameters = open_constants(traced)
        self._matvec, self._axes = jaxpr_as_fun(open_jaxpr), axes
        self._dtype = operator.dtype
        self.parameters = [jnp.asarray(x) for x in parameters]
        self.size = operator.size
        self.dtype = operator.working_dtype
        self.batch = batch

    def __call__(self, parameters: Parameters, vectors: Inexact[Array, "b n"]) -> Inexact[Array, "b n"]:
        """A v for each row v."""
        vectors = vary(vectors.astype(self._dtype), self._axes - varying_axes(vectors))
        (images,) = jax.vmap(lambda v: self._matvec(*parameters, v))(vectors)
        return images.astype(self.dtype)

    def of_rows(
        self, parameters: Parameters, vectors: Inexact[Array, "m n"], count: Int[Array, ""]
    ) -> Inexact[Array, "m n"]:
        """A v for the first `count` rows v, a batch at a time; zero for the others."""

        def batch(_: None, some: Inexact[Array, "b n"]) -> tuple[None, Inexact[Array, "b n"]]:
            return None, self(parameters, some)

        batches = vectors.reshape(-1, self.batch, self.size)
        number = -(-count // self.batch)
        images = scan(batch, None, batches, length=number, kind=Checkpointed(), throw=False)[1]
        is_counted = jnp.arange(vectors.shape[0], dtype=jnp.int32) < count
        return jnp.where(is_counted[:, None], images.reshape(vectors.shape), 0)


# A function of the parameters, and of other values with their tangents: its value and its derivative.
Along = Callable[..., tuple[Any, Any]]


def with_derivative(
    run: Callable[[Parameters, Any], tuple[Any, Any]], derivative: Callable[[Any, tuple[Any, Any], Along], Any]
) -> Callable[[Parameters, Any], tuple[Any, Any]]:
    """`run(parameters, others) -> (results, integers)` with a derivative that does not go through its loops.

    How many products a loop takes does not depend smoothly on the parameters. So a derivative is that of the estimate
    from as many products, and `derivative(others, (results, integers), along)` gives it for the results,
    linear in what `along(function, values, tangents)` returns: the values of `function(parameters, *values)` and their
    derivative in the direction in question.
    """

    @jax.custom_jvp
    def function(parameters: Parameters, others: Any) -> tuple[Any, Any]:
        return run(parameters, others)

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (parameters, others), (directions, _) = primals, tangents
        out = function(parameters, others)

        def along(f: Callable[..., Any], values: tuple[Any, ...] = (), rates: tuple[Any, ...] = ()) -> tuple[Any, Any]:
            return jvp(lambda given: f(*given), (parameters, *values), (directions, *rates))

        return out, (derivative(others, out, along), jax.tree.map(no_tangent, out[1]))

    function.defjvp(rule, symbolic_zeros=True)
    return function


# ---- probes: random vectors with the identity as their second moment, E[w w^H] = I


def draw(probes: Probes, key: Array, numbers: Int[Array, " k"], size: int, dtype: Any) -> Inexact[Array, "k n"]:
    """The probes of these numbers, one a row; the same number is the same probe, however many are drawn at once."""

    def probe(number: Int[Array, ""]) -> Inexact[Array, " n"]:
        own_key = jax.random.fold_in(key, number)
        if probes == "rademacher" and jnp.issubdtype(dtype, jnp.complexfloating):  # numbers of modulus one (Steinhaus)
            angle = jax.random.uniform(own_key, (size,), jnp.finfo(dtype).dtype, maxval=2 * jnp.pi)
            return jax.lax.complex(jnp.cos(angle), jnp.sin(angle)).astype(dtype)
        if probes == "rademacher":  # signs, 32 from each word, as drawing words is what costs
            words = jax.random.bits(own_key, (-(-size // 32),), jnp.uint32)
            bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None]) & jnp.uint32(1)
            return 1 - 2 * bits.reshape(-1)[:size].astype(dtype)
        direction = jax.random.normal(own_key, (size,), dtype)
        if probes == "normal":
            return direction
        # uniform on the sphere of radius sqrt(size)
        return direction * (jnp.sqrt(size) / jnp.linalg.norm(direction)).astype(dtype)

    return jax.vmap(probe)(numbers)
