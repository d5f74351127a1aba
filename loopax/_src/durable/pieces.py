"""Checksums of the pieces in which an array of outputs is stored, each a file of some rows.

A piece gets its rows in several writes. A run that is killed after a save may have written more rows, which it writes
again when it goes on. So each checksum is of the rows that a piece has at one save. It continues the checksum of the
rows before, in the order in which rows are taken. It is a line of a journal (`first row, row after the last, checksum,
checksum of the line`), written when the rows are on disk and before the save begins. So for every save, the journal
has a line for each piece with rows of that save.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from loopax._src.durable.described import damaged
from loopax._src.durable.directory import write_whole

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
