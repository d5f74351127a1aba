"""Mutable arrays (`jax.new_ref`) in loops: a loop carries their values, and the last ones are written back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._src.jax_internals import is_reference
from loopax._src.nnx.functional import is_object


def refuse_references_in(where: str, tree: Any) -> None:
    """A mutable array stands for itself: it is no value that a step hands on, or that rows are made of."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if is_reference(leaf):
            raise TypeError(
                f"{where}{keystr(path)}: got a mutable array (`jax.new_ref`), expected an array. Let the function "
                "close over it, and read and write it there; or give its value (`ref[...]`)."
            )


def refuse_closed_over(where: str, values: Sequence[Any]) -> None:
    """Mutable arrays cannot be closed over where nobody writes them back."""
    if any(map(is_reference, values)):
        raise NotImplementedError(
            f"{where} closes over a mutable array (`jax.new_ref`), which is not supported here. Pass its value through "
            "the carry instead; loopax.scan, fori_loop and while_loop take functions that close over one."
        )


def refuse_other_types(where: str, values: Sequence[Any]) -> None:
    """Values that a function closes over are arrays, or mutable ones. JAX lets libraries make types of their own."""
    for value in values:
        aval = jax.typeof(value)
        if not (isinstance(aval, core.ShapedArray) or is_reference(value)):
            raise NotImplementedError(
                f"{where} closes over a value of the type {type(aval).__name__}, which is neither an array nor a "
                "mutable array (`jax.new_ref`). Flax makes such values of NNX Variables with `hijax=True`, or where "
                "its flag `flax_hijax_variable` is on: make them without it, with `ref=True` if the loop changes them."
            )


@dataclass(frozen=True)
class ReferenceRows:
    """Mutable arrays among the leaves of `xs`: a step gets a row of them as a mutable array."""

    xs: Any  # with the values in their places
    references: list[Any]
    mask: list[bool]  # which leaves they are

    @classmethod
    def of(cls, xs: Any) -> "ReferenceRows | None":
        """None where there is none."""
        leaves, treedef = jax.tree.flatten(xs, is_leaf=is_object)
        mask = list(map(is_reference, leaves))
        if not any(mask):
            return None
        values = [leaf[...] if is_one else leaf for leaf, is_one in zip(leaves, mask, strict=True)]
        return cls(treedef.unflatten(values), [leaf for leaf, m in zip(leaves, mask, strict=True) if m], mask)

    def step(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The user's `f` on rows, which returns those of mutable arrays behind its `y`."""

        @wraps(f)
        def on_rows(carry: Any, x: Any, **key: Any) -> Any:
            leaves, treedef = jax.tree.flatten(x, is_leaf=is_object)
            leaves = [jax.new_ref(leaf) if m else leaf for leaf, m in zip(leaves, self.mask, strict=True)]
            out = f(carry, treedef.unflatten(leaves), **key)
            if not isinstance(out, tuple) or len(out) != 2:
                return out  # the loop says what is wrong with it
            return out[0], (out[1], [jax.freeze(leaf) for leaf, m in zip(leaves, self.mask, strict=True) if m])

        return on_rows

    def stop(self, stop: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The user's `stop`, on the user's `y`."""
        return stop and (lambda carry, y: stop(carry, y[0]))

    def refuse_closed_over(self, where: str, closed_over: Sequence[Any]) -> None:
        """The loop would carry two values of one array."""
        if any(one is other for one in self.references for other in closed_over):
            raise ValueError(
                f"{where} closes over a mutable array (`jax.new_ref`) that is among the xs as well. Give it once: as "
                "xs, or closed over and indexed by the row."
            )

    def write_back(self, rows: Sequence[jax.Array], taken: jax.Array) -> None:
        """Give the mutable arrays the rows that the loop has walked."""
        for reference, new in zip(self.references, rows, strict=True):
            old = reference[...]
            reference[...] = jnp.where(taken.reshape(-1, *[1] * (old.ndim - 1)), new, old)
