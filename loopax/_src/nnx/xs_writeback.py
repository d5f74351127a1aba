"""What a body writes to NNX objects in rows of xs: further rows of outputs, of which xs is made after the loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path

from loopax._src.core.jaxpr.util import Mask, select
from loopax._src.pytrees.leaves import CarryMismatchError, Dynamic, Spec, match_carry, pack


@dataclass(frozen=True)
class WrittenRows:
    """A row of xs as the body leaves it, and where the arrays of it come from."""

    spec: Spec
    places: tuple[int | None, ...]  # for each array, the one of xs that was there before
    written: Mask  # and whether the body wrote it

    def xs_after(self, xs: Sequence[jax.Array], rows: Sequence[jax.Array], taken: jax.Array) -> Any:
        """The xs, frozen, with the rows that were written where they were taken; others of what is new are zero."""
        following = iter(rows)
        arrays = []
        for place, is_written in zip(self.places, self.written, strict=True):
            old, new = None if place is None else xs[place], next(following) if is_written else None
            arrays.append(old if new is None else new if old is None else _mixed(taken, new, old))
        return self.spec.unpack(arrays)


def _mixed(taken: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(taken.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def written_rows(where: str, start: Any, spec: Spec, end: Any) -> tuple[list[jax.Array], WrittenRows]:
    """The arrays that the body wrote to a row, frozen before and after; a Variable may hold other containers then."""
    old, new = dict(tree_leaves_with_path(start)), dict(tree_leaves_with_path(end))
    numbers = {path: number for number, path in enumerate(_paths_of_arrays(old, spec))}
    ends, end_spec = pack(end)
    paths = _paths_of_arrays(new, end_spec)
    written = tuple(path not in old or new[path] is not old[path] for path in paths)
    after = WrittenRows(end_spec, tuple(map(numbers.get, paths)), written)
    if not any(written):
        return [], after
    fitting = _fitting(where, start, spec, [new.get(path, leaf) for path, leaf in old.items()])
    ends = [x if place is None else fitting[place] for x, place in zip(ends, after.places, strict=True)]
    return select(written, ends), after


def _paths_of_arrays(leaves: dict[Any, Any], spec: Spec) -> list[Any]:
    return [path for path, leaf in zip(leaves, spec.leaves, strict=True) if isinstance(leaf, Dynamic)]


def _fitting(where: str, start: Any, spec: Spec, leaves: Sequence[Any]) -> list[jax.Array]:
    """The arrays of a row with other leaves, of the types that it had."""
    try:
        return match_carry(f"{where}, which changes rows of xs,", start, spec, spec.treedef.unflatten(leaves))
    except CarryMismatchError:
        raise TypeError(
            f"{where} changes an NNX object in a row of xs to another dtype. Convert xs to the dtype before the scan."
        ) from None
