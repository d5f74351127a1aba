"""The outputs of a durable scan as a pytree of arrays on disk."""

from collections.abc import Sequence
from typing import Any

from loopax._carry import Dynamic, Spec
from loopax.durable.chunk import row_types
from loopax.durable.directory import Directory
from loopax.durable.hosts import on_first
from loopax.durable.rows import Rows, all_begun, create, is_there, rows_at


def open_outputs(where: str, directory: Directory, spec: Spec, capacity: int, is_new: bool) -> list[Rows]:
    """The arrays on disk, one for each of `spec`; an error where those of a run that has begun are gone."""
    types = row_types(spec)
    paths = [directory.outputs / f"{i:04d}" for i in range(len(types))]
    if gone := [str(path) for path in paths if not (is_new or is_there(path))]:
        raise RuntimeError(
            f"{where}: the outputs of the stored run, {', '.join(gone)}, are gone. Restore them, or delete the "
            "directory of the run to start anew."
        )

    def create_all() -> None:
        for path, name, (shape, dtype, key_impl) in zip(paths, spec.names(), types, strict=True):
            create(path, name, (capacity, *shape), dtype, key_impl)
        all_begun(directory.outputs)

    on_first(create_all)
    return [rows_at(path) for path in paths]


def with_rows(spec: Spec, arrays: Sequence[Rows]) -> Any:
    """The pytree of outputs."""
    rest = iter(arrays)
    return spec.treedef.unflatten(next(rest) if isinstance(leaf, Dynamic) else leaf.value for leaf in spec.leaves)
