"""The carry that a body returns, beside the one that it was given: arrays that fit, or an error that names leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from loopax._src.jax_internals import convert, memory_space, spec_of, vary_like
from loopax._src.pytrees import leaves as trees


class CarryMismatchError(Exception):
    """Internal: the body's carry does not fit, but it may to another start. `changed`: Python values in it are arrays.

    A function for each leaf converts it, and is called where the trace has ended.
    """

    def __init__(self, converts: list[Callable[[Any], Any]], changed: list[str]) -> None:
        super().__init__()
        self.converts, self.changed = converts, changed

    def restart(self, init: Any) -> Any:
        """The other start."""
        leaves, treedef = jax.tree.flatten(init)
        return treedef.unflatten(convert(leaf) for convert, leaf in zip(self.converts, leaves, strict=True))


def match_carry(where: str, init: Any, spec: trees.Spec, out: Any) -> list[jax.Array]:
    """The arrays of the carry that a body returned, of the types that `spec` has.

    Raises CarryMismatchError where another start would fit: weak types are promoted as `jax.lax` does, a
    Python bool that becomes an array starts as one, and a start varies over the `shard_map` axes over
    which the result does. Raises TypeError, leaf by leaf, where none would.
    """
    if not trees.same_structure(jax.tree.structure(out), spec.treedef):
        lines = list(trees.differences(init, out)) or [
            f"got the structure      {jax.tree.structure(out)}",
            f"expected the structure {jax.tree.structure(init)}",
        ]
        raise TypeError(
            f"{where} must return a carry of the same structure as it is given. It does not:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nReturn the same containers and classes, with the same keys, static fields and as many elements."
        )
    pairs = list(zip(jax.tree.leaves(init), jax.tree.leaves(out), strict=True))
    outcomes = [_match_leaf(leaf, *pair) for leaf, pair in zip(spec.leaves, pairs, strict=True)]
    if any(outcome is None or callable(outcome) for outcome in outcomes):
        names = [keystr(path) or "the carry itself" for path, _ in tree_flatten_with_path(init)[0]]
        lines = [
            f"  {name}: got {trees.describe(new)}, expected {trees.describe(old)}"
            for name, (old, new) in zip(names, pairs, strict=True)
        ]
        if problems := [line for line, outcome in zip(lines, outcomes, strict=True) if outcome is None]:
            raise TypeError(
                f"{where} must return a carry of the same types as it is given. It does not, at:\n"
                + "\n".join(problems)
                + f"\nConvert the initial value or the result ({conversion(problems)}) so that they agree; "
                "what is not an array must be returned as it came (a function that is made anew is another one)."
            )
        converts = [outcome if callable(outcome) else lambda leaf: leaf for outcome in outcomes]
        of_leaves = zip(spec.leaves, lines, outcomes, strict=True)
        changed = [line for leaf, line, outcome in of_leaves if callable(outcome) and isinstance(leaf, trees.Static)]
        raise CarryMismatchError(converts, changed)
    return [o for leaf, o in zip(spec.leaves, outcomes, strict=True) if isinstance(leaf, trees.Dynamic)]


NO_RETURN = "A function without a `return` returns None."


def refuse_none(where: str, carry: Any, out: Any) -> None:
    """An error where a body that is given a carry returns none."""
    if out is None and carry is not None:
        raise TypeError(
            f"{where} must return the next carry, as it is given {trees.describe_node(carry)}. Got None. {NO_RETURN}"
        )


def _match_leaf(spec: trees.Static | trees.Dynamic, old: Any, new: Any) -> Any:
    """The array of a leaf, a function that converts its start, or None: it does not fit. A static leaf gives itself."""
    if isinstance(spec, trees.Static):
        if trees.same_value(old, new):
            return spec
        # A Python bool or number was the start of what the body returns as an array, or as another number.
        is_bool = isinstance(new, bool) or (
            not trees.is_static(new) and jnp.shape(new) == () and jnp.result_type(new) == jnp.bool_
        )
        fits = is_bool if isinstance(old, bool) else trees.is_number(old) and not trees.is_static(new)
        return jnp.asarray if fits else None
    if trees.is_static(new) and not isinstance(new, bool):
        return None
    array, described = trees.to_array(new)
    if described.key_impl != spec.key_impl:
        return None
    a, b = spec.aval, described.aval
    if a.shape != b.shape or memory_space(a) is not memory_space(b) or spec_of(a) != spec_of(b):
        return None
    if a.dtype != b.dtype:
        # A weakly typed start takes the dtype of the result, a weakly typed result that of the start.
        if not getattr(a, "weak_type", False):
            return None
        dtype = jnp.result_type(old, jax.ShapeDtypeStruct((), b.dtype))
        return (lambda leaf: convert(leaf, dtype)) if dtype != a.dtype else None
    if b.mat.varying - a.mat.varying:
        return lambda leaf: spec.wrap(vary_like(trees.to_array(leaf)[0], b))
    return vary_like(array, a)


def conversion(problems: Sequence[str]) -> str:
    """How to convert an array whose type is wrong; the problems describe it."""
    if any("<host>" in problem for problem in problems):
        return "`jax.device_put(x, ...)`"
    return "`x.astype(...)`" + ", `jax.reshard(x, ...)`" * any(" sharded as " in problem for problem in problems)
