"""Mutable arrays (`jax.new_ref`) that a loop may not take, or takes as its values: the last ones are written back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._src import jax_internals as jaxi

_ADVICE = "Let the function close over it, and read and write it there; or give its value (`ref[...]`)."


def refuse_references_in(where: str, tree: Any, advice: str = _ADVICE) -> None:
    """A mutable array stands for itself: it is no value that a step hands on, or that rows are made of."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if jaxi.is_reference(leaf):
            raise TypeError(f"{where}{keystr(path)}: got a mutable array (`jax.new_ref`), expected an array. {advice}")


def refuse_closed_over(where: str, values: Sequence[Any], instead: str) -> None:
    """Raise where a function may not close over a mutable array, as nothing writes its value back."""
    if any(map(jaxi.is_reference, values)):
        raise NotImplementedError(
            f"{where} closes over a mutable array (`jax.new_ref`), which is not supported here. {instead}; functions "
            "that loopax.scan, fori_loop and while_loop are given may close over one."
        )


def refuse_other_types(where: str, values: Sequence[Any]) -> None:
    """Values that a function closes over are arrays, or mutable ones. JAX lets libraries make types of their own."""
    for value in values:
        aval = jax.typeof(value)
        if not (isinstance(aval, core.ShapedArray) or jaxi.is_reference(value)):
            raise NotImplementedError(
                f"{where} closes over a value of the type {type(aval).__name__}, which is neither an array nor a "
                "mutable array (`jax.new_ref`). Flax makes such values of NNX Variables with `hijax=True`, or where "
                "its flag `flax_hijax_variable` is on. Make the Variables without `hijax`; if the loop changes them, "
                "make them with `ref=True`."
            )


def overwrite(reference: Any, value: Any) -> None:
    """Write all of a mutable array.

    Before 0.12, JAX batches `reference[...] = value` as if both had their lanes at the same axis. For slices, it looks
    where they are. A number has no axis for a slice; where it is chosen, its lanes go where the other choice has them.
    """
    if value.ndim == 0:
        value = lax.select_n(jnp.bool_(True), reference[...], value)
    reference[(slice(None),) * value.ndim] = value
