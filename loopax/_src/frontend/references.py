"""Mutable arrays (`jax.new_ref`) in loops: a loop carries their values, and the last ones are written back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._src.jax_internals import is_reference
from loopax._src.nnx.functional import freeze, is_object

_ADVICE = "Let the function close over it, and read and write it there; or give its value (`ref[...]`)."


def refuse_references_in(where: str, tree: Any, advice: str = _ADVICE) -> None:
    """A mutable array stands for itself: it is no value that a step hands on, or that rows are made of."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if is_reference(leaf):
            raise TypeError(f"{where}{keystr(path)}: got a mutable array (`jax.new_ref`), expected an array. {advice}")


def refuse_closed_over(where: str, values: Sequence[Any], instead: str) -> None:
    """Raise where a function may not close over a mutable array, as nothing writes its value back."""
    if any(map(is_reference, values)):
        raise NotImplementedError(
            f"{where} closes over a mutable array (`jax.new_ref`), which is not supported here. {instead}; functions "
            "that loopax.scan, fori_loop and while_loop are given may close over one."
        )


def refuse_other_types(where: str, values: Sequence[Any]) -> None:
    """Values that a function closes over are arrays, or mutable ones. JAX lets libraries make types of their own."""
    for value in values:
        aval = jax.typeof(value)
        if not (isinstance(aval, core.ShapedArray) or is_reference(value)):
            raise NotImplementedError(
                f"{where} closes over a value of the type {type(aval).__name__}, which is neither an array nor a "
                "mutable array (`jax.new_ref`). Flax makes such values of NNX Variables with `hijax=True`, or where "
                "its flag `flax_hijax_variable` is on. Make the Variables without `hijax`; if the loop changes them, "
                "make them with `ref=True`."
            )


@dataclass(frozen=True)
class ReferenceRows:
    """Mutable arrays among the leaves of `xs`: a step gets a row of them as a mutable array."""

    references: Sequence[Any] = ()
    mask: tuple[bool, ...] = ()  # which leaves they are

    def __bool__(self) -> bool:
        return any(self.mask)

    def step(self, step: Any) -> Any:
        """The `Step` of a loop on rows of values, which returns those of mutable arrays behind its row of ys."""
        if not self:
            return step

        def on_rows(row: Any, extras: Sequence[Any], carry: Any, x: Any) -> tuple[Any, Any, Any]:
            leaves, treedef = jax.tree.flatten(x, is_leaf=is_object)
            leaves = [jax.new_ref(leaf) if m else leaf for leaf, m in zip(leaves, self.mask, strict=True)]
            carry, y, goes_on = step.call(row, extras, carry, treedef.unflatten(leaves))
            refuse_references_in(f"{step.where} returned y", freeze(y))
            return carry, (y, [jax.freeze(leaf) for leaf, m in zip(leaves, self.mask, strict=True) if m]), goes_on

        return replace(step, call=on_rows, options=(step.options, self.mask))

    def refuse_closed_over(self, where: str, closed_over: Sequence[Any]) -> None:
        """Raise where the loop would carry two values of one array."""
        if any(one is other for one in self.references for other in closed_over):
            raise ValueError(
                f"{where} closes over a mutable array (`jax.new_ref`) that is among the xs as well. Give it once: as "
                "xs, or closed over and indexed by the row."
            )

    def write_back(self, ys: Any, taken: jax.Array) -> Any:
        """Give the mutable arrays the rows that the loop has walked. Returns the user's ys."""
        if not self:
            return ys
        ys, rows = ys
        for reference, new in zip(self.references, rows, strict=True):
            old = reference[...]
            overwrite(reference, jnp.where(taken.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        return ys


def overwrite(reference: Any, value: Any) -> None:
    """Write all of a mutable array.

    Before 0.12, JAX batches `reference[...] = value` as if both had their lanes at the same axis. For slices, it looks
    where they are. A number has no axis for a slice; where it is chosen, its lanes go where the other choice has them.
    """
    if value.ndim == 0:
        value = lax.select_n(jnp.bool_(True), reference[...], value)
    reference[(slice(None),) * value.ndim] = value


NO_REFERENCES = ReferenceRows()


def take_references(where: str, xs: Any) -> tuple[Any, ReferenceRows]:
    """The xs with values in the places of mutable arrays, and these arrays."""
    pairs, treedef = tree_flatten_with_path(xs, is_leaf=is_object)
    mask = tuple(is_reference(leaf) and not is_object(leaf) for _, leaf in pairs)
    found: dict[int, str] = {}
    for (path, leaf), is_one in zip(pairs, mask, strict=True):
        if is_one and id(leaf) in found:
            raise ValueError(
                f"{where}: got one mutable array (`jax.new_ref`) at {found[id(leaf)]} and at {keystr(path)}, expected "
                "it once. Give it once, and use its row twice."
            )
        found |= {id(leaf): keystr(path)} if is_one else {}
    if not any(mask):
        return xs, NO_REFERENCES
    leaves = [leaf for _, leaf in pairs]
    values = [leaf[...] if is_one else leaf for leaf, is_one in zip(leaves, mask, strict=True)]
    return treedef.unflatten(values), ReferenceRows([leaf for leaf, m in zip(leaves, mask, strict=True) if m], mask)
