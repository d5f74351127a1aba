"""Lines of the user's code, from which calls come."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import equinox
import jaxtyping

# Calls go through these packages: Equinox wraps methods of modules, ours among them, and jaxtyping checks types.
_BETWEEN = tuple(f"{Path(file).parent}{os.sep}" for file in (equinox.__file__, jaxtyping.__file__))


class Line(NamedTuple):
    """A line of a function."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """As it is shown: `solver.py:31 (solve)`."""
        path, here = Path(self.file), Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path.name
        return f"{shown}:{self.number} ({self.function})"


def of_user(lines: Iterable[tuple[str, int, str]]) -> Iterator[Line]:
    """Those that are not of what stands between loopax and the user."""
    return (Line(*line) for line in lines if not line[0].startswith(_BETWEEN))
