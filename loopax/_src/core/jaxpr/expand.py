"""Rules for primitives that are a shorthand for a larger program: expand them and apply JAX's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from loopax._src.core.jaxpr.util import of_selected, select
from loopax._src.jax_internals import Primitive, axis_arguments, is_nonzero


def batch_expanded(primitive: Primitive, function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A batching rule: `jax.vmap` of the expansion. Results have lanes in front, unless no operand has any."""

    def rule(axis: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any) -> Any:
        if all(d is None for d in dims):  # JAX asks inside batched control flow
            outputs = primitive.bind(*operands, **params)
            return outputs, [None] * len(outputs)
        in_axes = tuple(None if d is None else int(d) for d in dims)
        batched = jax.vmap(lambda *xs: function(*xs, **params), in_axes=in_axes, out_axes=0, **axis_arguments(axis))
        outputs = batched(*operands)
        return outputs, [0] * len(outputs)

    return rule


def jvp_expanded(function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A jvp rule: that of the expansion.

    The linear part of a loop is not always linear. JAX also evaluates loops partially to find what does not change in a
    `lax.scan` around them, and what is unknown then are primals. So the transpose may rely on linearity, since it only
    ever sees tangents; this rule may not.
    """

    def rule(primals: Sequence[Any], tangents: Sequence[Any], /, **params: Any) -> Any:
        perturbed = list(map(is_nonzero, tangents))
        of_perturbed = of_selected(partial(function, **params), perturbed, primals)
        return jax.jvp(of_perturbed, tuple(select(perturbed, primals)), tuple(select(perturbed, tangents)))

    return rule
