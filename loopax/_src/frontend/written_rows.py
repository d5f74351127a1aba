"""What a body writes to its row of xs, where that holds mutable arrays or NNX objects: further rows of outputs.

After the loop they are written to the arrays and objects of the caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves_with_path, tree_map_with_path

from loopax._src.frontend.options import SCAN, no_capacity
from loopax._src.frontend.references import overwrite
from loopax._src.frontend.trace import Step
from loopax._src.jax_internals import is_reference
from loopax._src.nnx.functional import Key, freeze_numbered, is_object, roots, take_back, values_of, write
from loopax._src.pytrees.leaves import pack
from loopax._src.pytrees.match_carry import CarryMismatchError, match_carry


@dataclass(frozen=True)
class Outputs:
    """A row of ys, and what the step wrote to its row of xs."""

    y: Any
    written: list[Any]
    places: tuple[int | Key, ...]  # of it: the number of a mutable array among the leaves, or the place in NNX objects


jax.tree_util.register_pytree_with_keys(
    Outputs,  # errors name what is in a row of ys as if it stood alone
    lambda x: ([("", x.y), (" (of xs)", x.written)], x.places),
    lambda places, children: Outputs(*children, places=places),
)


def take_references(where: str, xs: Any) -> tuple[Any, dict[int, Any]]:
    """The xs with values in the places of mutable arrays, and these arrays by their numbers among the leaves."""
    pairs, treedef = tree_flatten_with_path(xs, is_leaf=is_object)
    leaves = [leaf for _, leaf in pairs]
    references = {i: leaf for i, leaf in enumerate(leaves) if is_reference(leaf) and not is_object(leaf)}
    found: dict[int, str] = {}
    for i, leaf in references.items():
        path = keystr(pairs[i][0])
        if id(leaf) in found:
            raise ValueError(
                f"{where}: got one mutable array (`jax.new_ref`) at {found[id(leaf)]} and at {path}, expected "
                "it once. Give it once, and use its row twice."
            )
        found[id(leaf)], leaves[i] = path, leaf[...]
    return treedef.unflatten(leaves) if references else xs, references


def returning_written(step: Step, references: Mapping[int, Any], has_rows: bool) -> Step:
    """The step of a loop on rows of values, with `Outputs` for its rows of ys, as far as there may be any."""

    def call(row: Any, extras: Any, carry: Any, x: Any) -> tuple[Any, Any, Any]:
        leaves, treedef = jax.tree.flatten(x, is_leaf=is_object)
        own = {i: jax.new_ref(leaves[i]) for i in references}
        frozen, objects = freeze_numbered(x)
        given = jax.tree.map(lambda leaf: leaf, frozen)  # a body may change the containers that a Variable holds
        rows = treedef.unflatten([own.get(i, leaf) for i, leaf in enumerate(leaves)])
        carry, y, goes_on = step.call(row, extras, carry, rows)
        written = _of_objects(step.where, given, objects, x) | {i: jax.freeze(one) for i, one in own.items()}
        if written and not has_rows:
            raise no_capacity(SCAN, "NNX objects in xs", "set up what they hold before the scan")
        return carry, Outputs(y, list(written.values()), tuple(written)), goes_on

    return replace(step, call=call, options=(step.options, tuple(references), has_rows))


def _of_objects(where: str, given: Any, objects: list[Any], live: Any) -> dict[Any, Any]:
    """The values that a body changed in a row, frozen as it was given; a Variable may hold other containers then."""
    after, changes = take_back(where, given, objects, live, of_rows=True)
    if not changes.written:
        return {}
    spec = pack(given)[1]
    try:
        # Arrays in the places of others have the types of these.
        fitting = match_carry(f"{where}, which changes rows of xs,", given, spec, _overlay(given, after))
    except CarryMismatchError:
        raise TypeError(
            f"{where} changes an NNX object in a row of xs to another dtype. Convert xs to the dtype before the scan."
        ) from None
    values = values_of(roots(_overlay(after, spec.unpack(fitting))))
    return {key: value for key, value in values.items() if key in changes.written}


def _overlay(tree: Any, other: Any) -> Any:
    """The pytree with the leaves that the other has at the same places."""
    found = {keystr(path): leaf for path, leaf in tree_leaves_with_path(other)}
    return tree_map_with_path(lambda path, leaf: found.get(keystr(path), leaf), tree)


def hand_over_rows(
    where: str, xs: Any, frozen: Any, references: Mapping[int, Any], written: Mapping[Any, Any], taken: jax.Array
) -> None:
    """Give the mutable arrays and the objects in xs what steps wrote; rows that were not `taken` stay as they are.

    `frozen` are the xs before the loop. What is new is zero in rows that were not taken.
    """
    old = values_of(roots(frozen)) | {i: reference[...] for i, reference in references.items()}

    def after(new: Any, old: Any) -> Any:
        return jnp.where(taken.reshape(-1, *[1] * (new.ndim - 1)), new, old) if isinstance(new, jax.Array) else new

    new = {key: jax.tree.map(after, rows, _overlay(rows, old[key])) for key, rows in written.items()}
    for i, reference in references.items():
        overwrite(reference, new.pop(i))
    write(where, xs, new)
