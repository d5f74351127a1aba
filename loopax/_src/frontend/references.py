"""Mutable arrays (`jax.new_ref`) in loops: a loop carries their values, and the last ones are written back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.errors import KeyReuseError
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import select, split_list
from loopax._src.jax_internals import ClosedJaxpr
from loopax._src.nnx.functional import freeze, is_object
from loopax._src.pytrees.leaves import Dynamic, Spec

# PRNG keys that a loop consumes, for JAX's check that none is used twice (`jax.debug_key_reuse`).
#
# The check looks at programs, and knows keys by their types. Loops carry the integers behind keys, so a step says
# what it does with keys when it is traced, and the loop says it where it runs.


class KeyUse(NamedTuple):
    """The keys that a step consumes, and those of the carry that it returns as they came."""

    closed_over: list[Any]
    carry: list[bool]  # which leaves they are
    x: list[bool]
    kept: list[bool]


def key_use(
    where: str, raw: ClosedJaxpr, num_extras: int, carry: Spec, x: Spec, num_go: int, once: bool
) -> KeyUse | None:
    """What a traced step (row, *extras, *carry, *x) -> (*go, *carry, ...) does with keys; None: nobody asks.

    A step that is taken once may consume what it likes. Others must carry on a new key in the place of one that they
    consume.
    """
    if not jaxi.checks_keys():
        return None
    is_key = [[leaf.key_impl is not None for leaf in spec.leaves if isinstance(leaf, Dynamic)] for spec in (carry, x)]
    given = [False] * (1 + num_extras) + is_key[0] + is_key[1]
    consumed, made, forwarded = jaxi.keys_of(raw, given)
    sizes = [len(consumed) - len(given), 1 + num_extras, len(is_key[0])]
    closed_over, _, of_carry, of_x = split_list(consumed, sizes)
    spent = (uses and not new for uses, new in zip(of_carry, made[num_go:], strict=False))
    old = select(list(spent), carry.names("carry"))
    if not once and any(closed_over):
        raise KeyReuseError(f"{where} consumes a PRNG key that it closes over in each step. Give the loop `key=`.")
    if not once and old:
        raise KeyReuseError(f"{where} consumes the PRNG key {old[0]}, and returns no new one in its place. Split it.")
    first = sum(sizes[:2])
    unchanged = [forwarded.get(num_go + i) == first + i for i in range(len(of_carry))]

    def of_leaves(spec: Spec, of_arrays: Sequence[bool]) -> list[bool]:
        following = iter(of_arrays)
        return [isinstance(leaf, Dynamic) and next(following) for leaf in spec.leaves]

    known = select(closed_over, raw.consts)
    return KeyUse(known, of_leaves(carry, of_carry), of_leaves(x, of_x), of_leaves(carry, unchanged))


def note_key_use(use: KeyUse | None, carry: Any, xs: Any, seen: list[Any]) -> None:
    """Say it to JAX, but for keys that other branches have consumed already (`seen`); pytrees are frozen."""
    if use is not None:
        keys = [*use.closed_over, *select(use.carry, jax.tree.leaves(carry)), *select(use.x, jax.tree.leaves(xs))]
        new = [key for key in keys if not any(key is other for other in seen)]
        seen.extend(new)
        jaxi.consume_keys(new)


def with_kept_keys(use: KeyUse | None, init: Any, carry: Any) -> Any:
    """The last carry, with the first one's keys where each step returns them: whoever uses both uses one key twice."""
    if use is None or not any(use.kept):
        return carry
    leaves, structure = jax.tree.flatten(carry)
    pairs = zip(use.kept, jax.tree.leaves(init), leaves, strict=True)
    return structure.unflatten([old if kept else new for kept, old, new in pairs])


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
    mask = tuple(jaxi.is_reference(leaf) and not is_object(leaf) for _, leaf in pairs)
    found: dict[int, str] = {}
    for path, leaf in select(mask, pairs):
        if id(leaf) in found:
            raise ValueError(
                f"{where}: got one mutable array (`jax.new_ref`) at {found[id(leaf)]} and at {keystr(path)}, expected "
                "it once. Give it once, and use its row twice."
            )
        found[id(leaf)] = keystr(path)
    if not any(mask):
        return xs, NO_REFERENCES
    values = [leaf[...] if is_one else leaf for (_, leaf), is_one in zip(pairs, mask, strict=True)]
    return treedef.unflatten(values), ReferenceRows([leaf for _, leaf in select(mask, pairs)], mask)
