"""PRNG keys that a loop consumes, for JAX's check that none is used twice (`jax.debug_key_reuse`).

The check looks at programs, and knows keys by their types. Loops carry the integers behind keys, so a step says what it
does with keys when it is traced, and the loop says it where it runs.
"""

from typing import Any, NamedTuple

import jax
from jax.errors import KeyReuseError

from loopax._src.core.jaxpr.util import select, split_list
from loopax._src.jax_internals import ClosedJaxpr, checks_keys, consume_keys, keys_of
from loopax._src.nnx.functional import freeze
from loopax._src.pytrees.leaves import Dynamic, Spec


class KeyUse(NamedTuple):
    """The keys that a step consumes, and those of the carry that it returns as they came."""

    closed_over: list[Any]
    carry: list[bool]  # which arrays they are
    x: list[bool]
    kept: list[bool]


def key_use(
    where: str, raw: ClosedJaxpr, num_extras: int, carry: Spec, x: Spec, num_go: int, once: bool
) -> KeyUse | None:
    """What a traced step (row, *extras, *carry, *x, ...) -> (*go, *carry, ...) does with keys; None: nobody asks.

    A step that is taken once may consume what it likes. Others must carry on a new key in the place of one that they
    consume.
    """
    if not checks_keys():
        return None
    is_key = [[leaf.key_impl is not None for leaf in spec.leaves if isinstance(leaf, Dynamic)] for spec in (carry, x)]
    num_after = len(raw.in_avals) - 1 - num_extras - len(is_key[0]) - len(is_key[1])
    given = [False] * (1 + num_extras) + is_key[0] + is_key[1] + [False] * num_after
    consumed, made, forwarded = keys_of(raw, given)
    sizes = [len(consumed) - len(given), 1 + num_extras, len(is_key[0]), len(is_key[1])]
    closed_over, _, of_carry, of_x, _ = split_list(consumed, sizes)
    spent = (uses and not new for uses, new in zip(of_carry, made[num_go:], strict=False))
    old = select(list(spent), carry.names("carry"))
    if not once and any(closed_over):
        raise KeyReuseError(f"{where} consumes a PRNG key that it closes over in each step. Give the loop `key=`.")
    if not once and old:
        raise KeyReuseError(f"{where} consumes the PRNG key {old[0]}, and returns no new one in its place. Split it.")
    first = sum(sizes[:2])
    unchanged = [forwarded.get(num_go + i) == first + i for i in range(len(of_carry))]
    return KeyUse(select(closed_over, raw.consts), of_carry, of_x, unchanged)


def note_key_use(use: KeyUse | None, carry: tuple[Any, Spec], xs: tuple[Any, Spec], seen: list[Any]) -> None:
    """Say it to JAX, but for keys that other branches have consumed already (`seen`)."""
    if use is None:
        return
    keys = [*use.closed_over, *select(use.carry, _arrays(*carry)), *select(use.x, _arrays(*xs))]
    new = [key for key in keys if not any(key is other for other in seen)]
    seen.extend(new)
    consume_keys(new)


def with_kept_keys(use: KeyUse | None, init: Any, spec: Spec, carry: Any) -> Any:
    """The last carry, with the first one's keys where each step returns them: whoever uses both uses one key twice."""
    if use is None or not any(use.kept):
        return carry
    leaves, structure = jax.tree.flatten(carry)
    old, kept = jax.tree.leaves(freeze(init)), iter(use.kept)
    is_kept = [isinstance(leaf, Dynamic) and next(kept) for leaf in spec.leaves]
    return structure.unflatten([a if kept else b for kept, a, b in zip(is_kept, old, leaves, strict=True)])


def _arrays(tree: Any, spec: Spec) -> list[Any]:
    """The leaves that are arrays in the loop, keys as they are."""
    return select([isinstance(leaf, Dynamic) for leaf in spec.leaves], jax.tree.leaves(freeze(tree)))
