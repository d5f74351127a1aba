"""The outputs of a durable scan as a pytree of arrays on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopax._src.durable.chunk import row_types
from loopax._src.durable.described import Description
from loopax._src.durable.directory import Directory
from loopax._src.durable.hosts import on_first
from loopax._src.durable.outputs import Rows, all_begun, array_name, rows_at
from loopax._src.durable.pieces import Journal
from loopax._src.durable.row_plan import RowPlan
from loopax._src.durable.zarr import create, is_there, make_room, open_array, pieces_of
from loopax._src.pytrees.leaves import Dynamic, Spec


@dataclass(frozen=True)
class Outputs:
    """The arrays of a scan, one for each of `spec`."""

    where: str
    directory: Directory
    spec: Spec
    plan: RowPlan
    fill: Mapping[int, int] = field(default_factory=dict)  # what rows hold that are not written, by array, if not zero

    @property
    def paths(self) -> list[Path]:
        """Where they stand."""
        return [self.directory.outputs / array_name(i) for i in range(len(self.spec.avals))]

    def refuse_gone(self) -> None:
        """Raise where those of a run that has begun are gone, or what describes them is damaged."""
        if gone := [str(path) for path in self.paths if not is_there(path)]:
            raise RuntimeError(
                f"{self.where}: the outputs of the stored run, {', '.join(gone)}, are gone. Restore them, or delete "
                "the directory of the run to start anew."
            )
        for path in self.paths:
            rows_at(path)

    def check(self, steps: int) -> None:
        """Raise where the rows of so many steps, all those that belong to a save, are not on disk as written."""

        def check_all() -> None:
            for pieces in filter(None, (rows_at(path).pieces for path in self.paths)):
                pieces.check_settled(*self.plan.taken(steps))

        on_first(check_all)

    def open(self, steps: int) -> tuple[list[Rows], list[Journal]]:
        """The arrays, to be written after the rows of so many steps, and, in the first process, their journals."""
        journals: list[Journal] = []
        types = zip(self.paths, self.spec.names(), row_types(self.spec), strict=True)

        def open_all() -> None:
            for i, (path, name, (shape, dtype, key_impl)) in enumerate(types):
                description = Description(name, key_impl, self.plan.reverse)
                shape = (self.plan.capacity, *shape)
                fill = self.fill.get(i, 0)
                journals.append(_open(path, description, shape, dtype, self.plan.taken(steps), fill))
            all_begun(self.directory.outputs, len(self.paths))

        on_first(open_all)
        return [rows_at(path) for path in self.paths], journals


def _open(
    path: Path, description: Description, shape: Sequence[int], dtype: Any, good: tuple[int, int], fill: int
) -> Journal:
    """Make an array, or go on with the one of which so many rows are good."""
    is_new = good[0] == good[1]
    if is_new:
        create(path, description, shape, dtype, fill)
    trusted = not Description.stored(path).has_checksums
    pieces = pieces_of(path, open_array(path), description)
    last = pieces.settle(*good, trusted)
    if not is_new:  # the checksums are there, so it can say so now
        make_room(path, description, shape[0])
    return Journal(pieces, last)


def with_rows(spec: Spec, arrays: Sequence[Rows]) -> Any:
    """The pytree of outputs."""
    rest = iter(arrays)
    return spec.treedef.unflatten(next(rest) if isinstance(leaf, Dynamic) else leaf.value for leaf in spec.leaves)
