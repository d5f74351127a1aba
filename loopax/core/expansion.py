"""Rules for primitives that are a shorthand for a larger program: expand them and apply JAX's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from loopax._compat import Primitive, ad, axis_arguments, is_nonzero
from loopax.core.jaxprs import merge, reject, select


def batch_expanded(function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A batching rule: `jax.vmap` of the expansion."""

    def rule(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        in_axes = tuple(None if d is None else int(d) for d in dims)
        batched = jax.vmap(lambda *xs: function(*xs, **params), in_axes=in_axes, out_axes=0, **axis_arguments(axis))
        outputs = batched(*operands)
        return outputs, [0] * len(outputs)

    return rule


def jvp_linear(
    primitive: Primitive, function: Callable[..., list[Any]], count_linear: Callable[[dict[str, Any]], int]
) -> Callable[..., Any]:
    """A jvp rule for a primitive that is linear in its last operands: itself, or that of its expansion."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        perturbed = list(map(is_nonzero, tangents))
        first_linear = len(primals) - count_linear(params)
        if not any(perturbed[:first_linear]):
            dots = [ad.instantiate_zeros(t) for t in tangents[first_linear:]]
            return (
                primitive.bind(*primals, **params),
                primitive.bind(*primals[:first_linear], *dots, **params),
            )

        def of_perturbed(*values: Any) -> list[Any]:
            return function(*merge(perturbed, reject(perturbed, primals), values), **params)

        return jax.jvp(of_perturbed, tuple(select(perturbed, primals)), tuple(select(perturbed, tangents)))

    return rule
