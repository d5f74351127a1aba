"""What stands beside an array of outputs on disk, and whether it is as it was written."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from loopax._src.durable.directory import write_whole

DESCRIPTION = ".loopax.json"
METADATA = ".zarray"  # Zarr's own


@dataclass(frozen=True)
class Description:
    """Of one array; those that format 1 has written have the first two fields only, and no checksums."""

    path: str  # in the pytree of outputs
    key_impl: str | None  # of PRNG keys, which stand there as integers
    reverse: bool = False  # whether rows are written from the last to the first
    rows: tuple[int, ...] = ()  # how many there are; also how many there were, until a longer run has made room
    metadata: Mapping[str, Any] | None = None  # Zarr's, without the number of rows

    @property
    def has_checksums(self) -> bool:
        """Whether the rows have checksums."""
        return self.metadata is not None

    def store(self, directory: Path) -> None:
        """Write it, with a checksum of its own."""
        write_whole(directory / DESCRIPTION, json.dumps(asdict(self) | {"seal": self._seal()}))

    def _seal(self) -> str:
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @staticmethod
    def stored(directory: Path) -> "Description":
        """What stands beside this array, which is as it describes it; an error where one of them is damaged."""
        file = directory / DESCRIPTION
        try:
            found = json.loads(file.read_text())
            seal = found.pop("seal", None)
            description = Description(**{**found, "rows": tuple(found.get("rows", ()))})
            if seal is None and len(found) == 2:  # of format 1
                return description
            if seal != description._seal():
                raise ValueError("its checksum differs")
            file = directory / METADATA
            rows, metadata = zarr_metadata(directory)
            if metadata != description.metadata or rows not in description.rows:
                raise ValueError("it describes another array than was written")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise damaged(file, f"cannot be read ({type(error).__name__}: {error})") from error
        return description


def zarr_metadata(directory: Path) -> tuple[int, dict[str, Any]]:
    """The number of rows, and everything else."""
    found = json.loads((directory / METADATA).read_text())
    rows, *shape = found["shape"]
    return rows, {**found, "shape": shape}


def damaged(file: Path, what: str, remedy: str = "") -> RuntimeError:
    """The error for a file of outputs: what is wrong with it, and, on a line of its own, what to do."""
    return RuntimeError(
        f"the outputs of a loopax.durable.scan are damaged: {file} {what}.\nRestore the file from a backup,{remedy} "
        "or delete the directory of the run to start anew."
    )
