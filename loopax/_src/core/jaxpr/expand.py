"""Rules for primitives that are a shorthand for a larger program: expand them and apply JAX's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from loopax._src.core.jaxpr.util import merge_lists, of_selected, reject, select, split_list, trace
from loopax._src.jax_internals import (
    ClosedJaxpr,
    ad,
    axis_arguments,
    is_nonzero,
    jaxpr_as_fun,
    partial_eval_jaxpr,
)


def batch_expanded(function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A batching rule: `jax.vmap` of the expansion. Results have lanes in front."""

    def rule(axis: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any) -> Any:
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


def linearize_expanded(function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A linearisation rule: the derivative of the expansion, evaluated partially, for tangents come later."""
    jvp = jvp_expanded(function)

    def rule(nonzero: Sequence[bool], /, *primals: Any, **params: Any) -> Any:
        types, mask = [jax.typeof(x).to_tangent_aval() for x in primals], []

        def on_pairs(*flat: Any) -> list[Any]:
            values, given = split_list(flat, [len(primals)])
            tangents = merge_lists(nonzero, map(ad.Zero, reject(nonzero, types)), given)
            results, tangents = jvp(values, tangents, **params)
            mask[:] = map(is_nonzero, tangents)
            return [*results, *select(mask, tangents)]

        pairs = trace(on_pairs, [*map(jax.typeof, primals), *select(nonzero, types)])
        later = [None] * sum(nonzero)
        out, finish = evaluate_in_parts(pairs, [False] * len(primals) + [True] * len(later), [*primals, *later])
        results, tangents = split_list(out, [len(mask)])
        depends = [tangent is None for tangent in tangents]
        mask = merge_lists(mask, [False] * mask.count(False), depends)

        def linear(*tangents: Any) -> list[Any]:
            found = finish(*select(nonzero, tangents))[len(results) :]
            zero = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in reject(mask, results))
            return merge_lists(mask, zero, select(depends, found))

        return results, mask, linear

    return rule


def evaluate_in_parts(
    closed: ClosedJaxpr, unknown: Sequence[bool], operands: Sequence[Any]
) -> tuple[list[Any], Callable[..., list[Any]]]:
    """Evaluate a jaxpr on operands of which some come later.

    Returns the results, with None for those that depend on a later operand, and a function from the later operands to
    all results.
    """
    known, later, out_unknown = partial_eval_jaxpr(closed, unknown, [False] * len(closed.out_avals))
    values = jaxpr_as_fun(known)(*reject(unknown, operands))
    now, residuals = split_list(values, [out_unknown.count(False)])

    def finish(*operands: Any) -> list[Any]:
        return merge_lists(out_unknown, now, jaxpr_as_fun(later)(*residuals, *operands))

    return merge_lists(out_unknown, now, [None] * sum(out_unknown)), finish
