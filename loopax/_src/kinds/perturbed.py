"""Derivatives of functions of which some inputs have no tangents: these cost nothing."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from loopax._src.core.jaxpr.util import merge_lists, reject, select
from loopax._src.jax_internals import has_tangents, moved_like, no_tangent, zeros


def jvp(function: Callable[[Any], Any], inputs: Any, tangents: Any) -> tuple[Any, Any]:
    """`jax.jvp` for one pytree of inputs and of tangents, some of which are `SymbolicZero`s."""
    leaves, structure = jax.tree.flatten(inputs)
    dots = structure.flatten_up_to(tangents)
    has_dot = [not isinstance(dot, SymbolicZero) for dot in dots]

    def of_perturbed(*perturbed: Any) -> Any:
        return function(structure.unflatten(merge_lists(has_dot, reject(has_dot, leaves), perturbed)))

    if any(has_dot):
        out, found = jax.jvp(of_perturbed, select(has_dot, leaves), select(has_dot, dots))
        # JAX makes tangents of zero on the device, also of results on the host.
        return out, jax.tree.map(lambda x, dot: moved_like(x, dot) if has_tangents(x) else dot, out, found)
    out = function(inputs)
    return out, jax.tree.map(zero_tangent, out)


def zero_tangent(x: Any) -> Any:
    """The tangent of a constant."""
    return zeros(jax.typeof(x)) if has_tangents(x) else no_tangent(x)


def explained(rule: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A rule of a `jax.custom_jvp`, which says what JAX does not have where a batch of it calls a `jax.custom_vjp`."""

    @wraps(rule)
    def explaining(*args: Any) -> Any:
        try:
            return rule(*args)
        except TypeError as error:
            if "custom_vjp" in str(error):
                error.add_note(
                    f"Note of loopax: with kind={kind}, a loop whose body calls a jax.custom_vjp has a gradient in "
                    "reverse mode, and none in forward mode or where a jax.vmap stands around the loop: JAX has no "
                    "batch of such a derivative. Give the function a jax.custom_jvp."
                )
            raise

    return explaining
