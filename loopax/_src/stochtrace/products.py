"""Products of the operator with random vectors, and the derivative of what loops make of them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import core
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Inexact, Int

from loopax._src.core.jaxpr.varying_axes import differing
from loopax._src.jax_internals import jaxpr_as_fun, no_tangent, open_constants, vary, varying_axes, with_varying_axes
from loopax._src.kinds import Checkpointed
from loopax._src.loops import scan
from loopax._src.pytrees.leaves import describe
from loopax._src.stochtrace.operators import Operator

Parameters = Sequence[Array]
Probes = Literal["rademacher", "normal", "sphere"]


class Products:
    """Products as a function of `parameters`, the arrays that the operator has: so that they can be differentiated.

    `batch` of them are evaluated together. In a `jax.shard_map`, probes vary over `axes`; where images vary over more,
    so do the vectors that estimators make of them.
    """

    def __init__(self, operator: Operator, batch: int, axes: frozenset[Any] = frozenset()):
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
        batches = vectors.reshape(-1, self.batch, self.size)
        _, images = scan(
            lambda _, some: (None, self(parameters, some)),
            None,
            batches,
            length=-(-count // self.batch),
            kind=Checkpointed(),
            throw=False,
        )
        is_counted = jnp.arange(vectors.shape[0], dtype=jnp.int32) < count
        return jnp.where(is_counted[:, None], images.reshape(vectors.shape), 0)


# A function of the parameters, and of other values with their tangents: its value and its derivative.
Along = Callable[..., tuple[Any, Any]]


def with_derivative(
    run: Callable[[Parameters, Any], tuple[Any, Any]],
    derivative: Callable[[Any, tuple[Any, Any], Along], Any],
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
        moves = [not isinstance(direction, SymbolicZero) for direction in directions]

        def along(f: Callable[..., Any], values: tuple[Any, ...] = (), rates: tuple[Any, ...] = ()) -> tuple[Any, Any]:
            def of_moving(moving: list[Array], *values: Any) -> Any:
                rest = iter(moving)
                return f([next(rest) if m else p for m, p in zip(moves, parameters, strict=True)], *values)

            def moving_of(all_of_them: Sequence[Any]) -> list[Any]:
                return [x for m, x in zip(moves, all_of_them, strict=True) if m]

            return jax.jvp(of_moving, (moving_of(parameters), *values), (moving_of(directions), *rates))

        return out, (derivative(others, out, along), jax.tree.map(no_tangent, out[1]))

    function.defjvp(rule, symbolic_zeros=True)
    return function


# ---- probes: random vectors with the identity as their second moment, E[w w^H] = I


def draw(probes: Probes, key: Array, numbers: Int[Array, " k"], size: int, dtype: Any) -> Inexact[Array, "k n"]:
    """The probes of these numbers, one a row; the same number is the same probe, however many are drawn at once."""
    return jax.vmap(lambda number: _SAMPLERS[probes](jax.random.fold_in(key, number), size, dtype))(numbers)


def check_probes(what: str, probes: Any) -> None:
    """An error for what is not the name of a distribution."""
    if probes not in get_args(Probes):
        choices = ", ".join(repr(name) for name in get_args(Probes))
        raise ValueError(f"{what}: got {describe(probes)}, expected one of {choices}.")


def is_rotation_invariant(probes: Probes) -> bool:
    """Whether the distribution looks the same from every direction."""
    return probes != "rademacher"


def _rademacher(key: Array, size: int, dtype: Any) -> Array:
    """Signs; for complex dtypes numbers of modulus one (Steinhaus)."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        angle = jax.random.uniform(key, (size,), jnp.finfo(dtype).dtype, maxval=2 * jnp.pi)
        return jax.lax.complex(jnp.cos(angle), jnp.sin(angle)).astype(dtype)
    words = jax.random.bits(key, (-(-size // 32),), jnp.uint32)  # 32 signs from each, as drawing words is what costs
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None]) & jnp.uint32(1)
    return 1 - 2 * bits.reshape(-1)[:size].astype(dtype)


def _normal(key: Array, size: int, dtype: Any) -> Array:
    return jax.random.normal(key, (size,), dtype)


def _sphere(key: Array, size: int, dtype: Any) -> Array:
    """Uniform on the sphere of radius sqrt(size)."""
    direction = _normal(key, size, dtype)
    return direction * (jnp.sqrt(size) / jnp.linalg.norm(direction)).astype(dtype)


_SAMPLERS: dict[str, Callable[[Array, int, Any], Array]] = {
    "rademacher": _rademacher,
    "normal": _normal,
    "sphere": _sphere,
}
