"""Items on the host: their arrays, which must be alike."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.frontend.references import refuse_references_in
from loopax._src.nnx.functional import freeze
from loopax._src.pytrees.diff import same_structure, same_value
from loopax._src.pytrees.leaves import Dynamic, Spec, pack

_ALIKE = "All items go through one compiled program: give each the structure, shapes and dtypes of the first."


class ItemTypes:
    """What all items are like: the first."""

    def __init__(self) -> None:
        """No item is known."""
        self.count = 0  # of items that were made ready
        self._spec: Spec | None = None

    @property
    def spec(self) -> Spec:
        """From the first item on."""
        assert self._spec is not None
        return self._spec

    def ready(self, item: Any) -> tuple[int, list[np.ndarray]]:
        """The next item: its index and its arrays; an error where it is not like the others."""
        found = self.ready_again(self.count, item)
        self.count += 1
        return found

    def ready_again(self, index: int, item: Any) -> tuple[int, list[np.ndarray]]:
        """One that has an index."""
        if self._spec is None:
            self._spec = _spec_of(item, index)
        return index, _arrays_of(item, index, self._spec)


def _spec_of(item: Any, index: int) -> Spec:
    frozen = freeze(item)
    refuse_references_in(f"item {index} of lanes_stream", frozen, "Give its value (`ref[...]`).")
    arrays, spec = pack(frozen)
    types = iter([jax.typeof(np.asarray(x)) for x in arrays])  # a Python number is an array like others
    leaves = [replace(leaf, aval=next(types)) if isinstance(leaf, Dynamic) else leaf for leaf in spec.leaves]
    return Spec(spec.treedef, tuple(leaves))


def _arrays_of(item: Any, index: int, spec: Spec) -> list[np.ndarray]:
    leaves, treedef = jax.tree.flatten(freeze(item))
    if not same_structure(treedef, spec.treedef):
        raise TypeError(f"lanes_stream: item {index} has the structure {treedef}, expected {spec.treedef}. {_ALIKE}")
    arrays = []
    for place, (leaf, expected) in enumerate(zip(leaves, spec.leaves, strict=True)):
        if isinstance(expected, Dynamic):
            arrays.append(_array(leaf, expected, spec, place, index))
        elif not same_value(leaf, expected.value):  # a part of the program
            raise ValueError(_message(spec, place, index, repr(leaf), repr(expected.value)))
    return arrays


def _array(leaf: Any, of: Dynamic, spec: Spec, place: int, index: int) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    impl = jax.random.key_impl(leaf) if is_key else None
    if impl != of.key_impl:
        raise TypeError(_message(spec, place, index, _kind_of_key(impl), _kind_of_key(of.key_impl)))
    given = np.asarray(jax.random.key_data(leaf)) if is_key else _copied(leaf)
    array = given
    if array.dtype.kind in "biufcV":
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if array is not given and array.dtype.kind in "iu" and (array != given).any():
        raise OverflowError(_message(spec, place, index, str(given), f"integers that fit into {array.dtype}"))
    if (array.shape, array.dtype) != (of.aval.shape, of.aval.dtype):
        raise TypeError(_message(spec, place, index, described(array), described(of.aval)))
    return array


def _copied(leaf: Any) -> np.ndarray:
    """Arrays of JAX do not change; into others, the iterable may write again."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)


def _kind_of_key(impl: Any) -> str:
    return "no PRNG key" if impl is None else f"a PRNG key of {impl}"


def described(aval: Any) -> str:
    """The dtype and shape of an array."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _message(spec: Spec, place: int, index: int, got: str, expected: str) -> str:
    return f"lanes_stream: item {index}{spec.paths()[place]} is {got}, expected {expected}. {_ALIKE}"
