"""Products of the operator with vectors, and the derivative of what loops make of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Inexact, Int

from loopax._src.jax_internals import jaxpr_as_fun, open_constants
from loopax._src.kinds import Checkpointed
from loopax._src.loops import scan
from loopax._src.stochtrace.operators import Operator

Parameters = Sequence[Array]


class Products:
    """Products as a function of `parameters`, the arrays that the operator has: so that they can be differentiated.

    `batch` of them are evaluated together.
    """

    def __init__(self, operator: Operator, batch: int):
        vector = jax.ShapeDtypeStruct((operator.size,), operator.dtype)
        open_jaxpr, parameters = open_constants(jax.make_jaxpr(operator.matvec)(vector))
        self._matvec = jaxpr_as_fun(open_jaxpr)
        self._dtype = operator.dtype
        self.parameters = [jnp.asarray(x) for x in parameters]
        self.size = operator.size
        self.dtype = operator.working_dtype
        self.batch = batch

    def __call__(self, parameters: Parameters, vectors: Inexact[Array, "b n"]) -> Inexact[Array, "b n"]:
        """A v for each row v."""
        (images,) = jax.vmap(lambda v: self._matvec(*parameters, v))(vectors.astype(self._dtype))
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

        return out, (derivative(others, out, along), jax.tree.map(_no_tangent, out[1]))

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _no_tangent(integer: Array) -> Any:
    return np.zeros(integer.shape, jax.dtypes.float0)
