"""Checksums of the pieces in which an array of outputs is stored, each a file of some rows.

A piece gets its rows in several writes. A run that is killed after a save may have written more rows, which it writes
again when it goes on. So each checksum is of the rows that a piece has at one save. It continues the checksum of the
rows before, in the order in which rows are taken. It is a line of a journal (`first row, row after the last, checksum,
checksum of the line`), written when the rows are on disk and before the save begins. So for every save, the journal
has a line for each piece with rows of that save.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopax._src.durable.options import write_whole

# What stands beside an array of outputs on disk, and whether it is as it was written.


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


# Checksums of arrays that do not depend on how they are spread over devices.


_SEED = 0x9E3779B1  # the golden ratio: a number without a pattern


def checksums(arrays: Sequence[Any]) -> list[str]:
    """Sixteen hexadecimal digits for each array.

    Sums of integers modulo 2**32 are the same in whatever order they are taken, so each device adds up what it holds.
    """
    sums = [np.asarray(pair) for pair in _sums(list(arrays))]
    return ["".join(f"{int(word):08x}" for word in pair) for pair in sums]


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_sum(_words(x)) for x in arrays]


def _sum(words: jax.Array) -> jax.Array:
    """Two sums of what each word and where it stands are mixed to; sums of weighted words would miss some swaps."""
    mixed = _mix(words ^ _mix(_positions(words.shape)))
    return jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in (mixed, _mix(mixed ^ jnp.uint32(_SEED)))])


def _positions(shape: Sequence[int]) -> jax.Array:
    """Where each element stands, counted from 1."""
    positions = jnp.ones(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        positions += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return positions


def _mix(x: jax.Array) -> jax.Array:
    """Each bit of a word depends on all of the given one, and no two words give the same (MurmurHash3's last step)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers, small elements one to a word."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    if x.dtype == jnp.bool_ or x.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return x.astype(jnp.int32).astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


JOURNAL = ".checksums"
_REMEDY = " call the same function again (where a save precedes the rows, it computes them again),"


@dataclass(frozen=True)
class Span:
    """Rows of one piece."""

    start: int
    stop: int
    total: int  # their checksum

    @property
    def line(self) -> str:
        """As it stands in the journal."""
        text = f"{self.start} {self.stop} {self.total:08x}"
        return f"{text} {crc32(text.encode()):08x}\n"

    @staticmethod
    def of_line(line: str) -> "Span":
        """The span of a line; an error where it is none."""
        start, stop, total, _ = line.split(" ")
        span = Span(int(start), int(stop), int(total, 16))
        if span.line != line + "\n":
            raise ValueError(f"the checksum of the line {line!r} differs")
        return span


@dataclass(frozen=True)
class Pieces:
    """The files of an array."""

    directory: Path
    rows: int  # of a piece
    row_bytes: int
    ndim: int
    reverse: bool  # whether rows are taken from the last to the first

    def file(self, start: int) -> Path:
        """The one that holds this row."""
        return self.directory / ".".join([str(start // self.rows), *["0"] * (self.ndim - 1)])

    def parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Some rows by piece, in the order in which they are taken."""
        edges = range(start - start % self.rows, stop, self.rows) if start < stop else ()
        parts = [(max(start, edge), min(stop, edge + self.rows)) for edge in edges]
        return parts[::-1] if self.reverse else parts

    def total(self, rows: np.ndarray, before: int = 0) -> int:
        """The checksum of rows that come after others."""
        return crc32((rows[::-1] if self.reverse else rows).tobytes(), before)

    def on_disk(self, start: int, stop: int) -> Span:
        """Rows of one piece as they are on disk; those of a piece that is not there are zero."""
        content = self._content(self.file(start))[start % self.rows :][: stop - start]
        return Span(start, stop, self.total(content))

    def _content(self, file: Path) -> np.ndarray:
        """All rows of a piece, as bytes."""
        size = self.rows * self.row_bytes
        content = file.read_bytes() if file.exists() else bytes(size)
        if len(content) != size:
            raise damaged(file, f"has {len(content)} bytes, and {size} are expected", _REMEDY)
        return np.frombuffer(content, np.uint8).reshape(self.rows, self.row_bytes)

    def check(self, span: Span) -> None:
        """Raise where its rows are not those that were written."""
        if self.on_disk(span.start, span.stop) != span:
            what = f"does not hold rows {span.start} to {span.stop - 1} as they were written"
            raise damaged(self.file(span.start), what, _REMEDY)

    def check_settled(self, start: int, stop: int) -> None:
        """Raise where some of these rows, all those that belong to a save, are lost."""
        known = {(span.start, span.stop): span for span in self.journal()}
        for part in self.parts(start, stop):
            if part not in known:
                raise damaged(self.directory / JOURNAL, f"has no checksum of rows {part[0]} to {part[1] - 1}")
            self.check(known[part])

    def check_read(self, numbers: Iterable[int]) -> None:
        """Raise where these pieces are not as they were written, as far as the journal goes."""
        newest = {span.start // self.rows: span for span in self.journal()}
        for number in numbers:
            if number in newest:
                self.check(newest[number])

    def journal(self) -> Sequence[Span]:
        """What has been written, in order."""
        file = self.directory / JOURNAL
        try:
            about = file.stat()
            return _parsed(file, about.st_mtime_ns, about.st_size)
        except (OSError, ValueError) as error:
            raise damaged(file, f"cannot be read ({type(error).__name__}: {error})") from error

    def settle(self, start: int, stop: int, trusted: bool) -> Span | None:
        """Begin to write after these rows, which are good; gives the span of the last piece, if it has some.

        Pieces and checksums of rows that will be written again go; those of fewer rows stay, for saves before this one.
        `trusted`: what is on disk gets its checksums now.
        """
        parts = self.parts(start, stop)
        known = self.journal() if parts and not trusted else [self.on_disk(*part) for part in parts]
        spans = [span for span in known if start <= span.start and span.stop <= stop]
        write_whole(self.directory / JOURNAL, "".join(span.line for span in spans))
        kept = {self.file(low) for low, _ in parts}
        for path in self.directory.iterdir():
            if path.name[0].isdigit() and path not in kept:
                path.unlink()
        return next((span for span in spans if (span.start, span.stop) == parts[-1]), None)


@lru_cache(maxsize=64)
def _parsed(file: Path, modified: int, size: int) -> tuple[Span, ...]:
    """The lines of a journal; one that is being written has no end yet."""
    del modified, size
    whole, _, _ = file.read_text().rpartition("\n")
    return tuple(map(Span.of_line, whole.split("\n") if whole else ()))


class Journal:
    """Keeps the checksums of an array that is being written."""

    def __init__(self, pieces: Pieces, last: Span | None) -> None:
        """Go on after the span of the last piece."""
        self._pieces, self._last, self._written = pieces, last, last
        self._waiting: list[Span] = []

    def add(self, start: int, rows: np.ndarray) -> None:
        """Rows from `start` on, which come after those before."""
        for low, high in self._pieces.parts(start, start + len(rows)):
            last = self._last
            if last is not None and last.start // self._pieces.rows != low // self._pieces.rows:
                self._waiting.append(last)
                last = None
            total = self._pieces.total(rows[low - start : high - start], last.total if last else 0)
            self._last = Span(min(low, last.start), max(high, last.stop), total) if last else Span(low, high, total)

    def write(self) -> None:
        """Write down what has been added: those rows are on disk."""
        is_new = self._last is not None and self._last != self._written
        spans = [*self._waiting, self._last] if is_new else self._waiting
        self._waiting, self._written = [], self._last
        if spans:
            with open(self._pieces.directory / JOURNAL, "a") as file:
                file.writelines(span.line for span in spans)
                file.flush()
                os.fsync(file.fileno())
