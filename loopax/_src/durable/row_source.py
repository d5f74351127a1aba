"""Rows that a long run is given: arrays on devices, in memory or on disk, of which a chunk reads its own."""

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from loopax._src.durable.saves import checksums
from loopax._src.pytrees.leaves import Spec, to_array

_PIECE_BYTES = 4 << 20  # of an array that is not on a device, to take its checksum


class RowSource:
    """A pytree of rows. NumPy arrays, those of `numpy.memmap` and `durable.Rows` are read as they are needed."""

    def __init__(self, where: str, rows: Any) -> None:
        """`rows`: a pytree whose leaves are arrays with one leading axis of the same length; it may have none."""
        leaves, treedef = jax.tree.flatten(rows)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
        shapes: list[tuple[int, ...]] = [getattr(leaf, "shape", ()) for leaf in leaves]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            names = [("xs" if path.startswith("[0]") else "cotangents") + path[3:] for path in paths]
            lines = (f"  {name}: {shape}" for name, shape in zip(names, shapes, strict=True))
            raise ValueError(f"{where} needs arrays with as many rows in xs and cotangents. Got:\n" + "\n".join(lines))
        self._arrays, described = [], []
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf, described_as = to_array(leaf)
            else:
                described_as = to_array(_native(leaf[:1]))[1]
            self._arrays.append(leaf)
            described.append(described_as)
        self.spec = Spec(treedef, tuple(described))
        self.length = len(self._arrays[0]) if self._arrays else None
        self.row_bytes = sum(aval.dtype.itemsize * int(np.prod(aval.shape[1:])) for aval in self.spec.avals)

    def unpack(self, arrays: Sequence[Any]) -> Any:
        """The pytree of rows, from its arrays."""
        return self.spec.unpack(arrays)

    def types(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Those of so many rows."""
        return [jax.ShapeDtypeStruct((rows, *aval.shape[1:]), aval.dtype) for aval in self.spec.avals]

    def read(self, low: int, capacity: int) -> list[Array]:
        """So many rows from one on; what is behind the last row is any number."""
        return [self._read(x, low, capacity) for x in self._arrays]

    def _read(self, x: Any, low: int, capacity: int) -> Array:
        if not len(x):
            x = np.zeros((1, *x.shape[1:]), x.dtype)  # the body is traced anyway
        start = max(min(low, len(x) - capacity), 0)
        if isinstance(x, jax.Array):
            found = _slice(x, np.int32(start), capacity)
        else:
            found = to_array(_native(x[start : start + capacity]))[0]
        return jnp.roll(found, start - low, 0) if start < low else found

    def checksums(self) -> dict[str, str]:
        """One for each array."""
        return {f"xs, array {i}": _checksum(x) for i, x in enumerate(self._arrays)}


def _native(x: Any) -> Any:
    """In the order of bytes of this machine."""
    return x.astype(x.dtype.newbyteorder("="), copy=False) if isinstance(x, np.ndarray) else x


@partial(jax.jit, static_argnums=2)
def _slice(x: Array, start: Any, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size)


def _checksum(x: Any) -> str:
    if isinstance(x, jax.Array):
        return checksums([x])[0]
    some = max(_PIECE_BYTES // max(x.nbytes // max(len(x), 1), 1), 1)
    pieces = (to_array(_native(x[low : low + some]))[0] for low in range(0, len(x), some))
    return sha256("".join(checksums([piece])[0] for piece in pieces).encode()).hexdigest()
