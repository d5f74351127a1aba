"""PRNG keys that a loop consumes, for JAX's check that none is used twice (`jax.debug_key_reuse`).

The check looks at programs, and knows keys by their types. Loops carry the integers behind keys, so a step says
what it does with keys when it is traced, and the loop says it where it runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.errors import KeyReuseError

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.util import select, split_list
from loopax._src.jax_internals import ClosedJaxpr
from loopax._src.pytrees.leaves import Dynamic, Spec


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
