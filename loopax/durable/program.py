"""What a stored run is a run of, and whether it is the one that is asked for."""

import difflib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from loopax._version import __version__
from loopax.durable.checksum import checksums
from loopax.durable.directory import Directory, write_whole
from loopax.durable.errors import AnotherProgramWarning

FORMAT = 1
_MOST_LINES = 40


@dataclass(frozen=True)
class Program:
    """Everything on which the states of a run depend, as text and checksums."""

    format: int
    loopax: str
    jax: str
    loop: str
    settings: dict[str, str]  # options that the text does not show
    types: dict[str, str]  # of the carry and of rows of outputs, by path
    values: dict[str, str]  # checksums: the first carry, rows of xs, what is closed over, the key
    text: list[str]  # the jaxpr of a chunk, without positions in the source


def describe(loop: str, text: str, settings: dict[str, str], types: dict[str, str], values: dict[str, Any]) -> Program:
    """Describe a run; `values` are arrays."""
    sums = dict(zip(values, checksums(list(values.values())), strict=True))
    lines = re.sub(r" at 0x[0-9a-f]+", "", text).splitlines()
    return Program(FORMAT, __version__, jax.__version__, loop, settings, types, sums, lines)


def store(directory: Directory, program: Program) -> None:
    """Write it down."""
    write_whole(directory.program, json.dumps(asdict(program), indent=1))


def stored(where: str, directory: Directory) -> Program | None:
    """The program of the run that the directory holds; None: it holds none."""
    if not directory.program.exists():
        return None
    try:
        found = json.loads(directory.program.read_text())
        if found["format"] != FORMAT:
            raise RuntimeError(
                f"{where}: {directory.program} has format {found['format']}, and this version of loopax (format "
                f"{FORMAT}) cannot read it. Go on with loopax {found['loopax']}, or give another directory."
            )
        return Program(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{where}: {directory.program} is no description of a run that loopax has written ({error}). Give a "
            "directory of its own to each run."
        ) from error


def check(where: str, directory: Directory, old: Program, new: Program, anyway: bool) -> None:
    """Whether a stored run may go on as the one that is asked for."""
    if misfits := list(_misfits(old, new)):
        raise ValueError(
            f"{where}: the run in {directory.root} has a state of other types than this one:\n"
            + "\n".join(misfits)
            + "\nGive another directory, or delete that one to start anew."
        )
    other_jax = old.jax != new.jax
    changes = list(_changes(old, new, with_text=not other_jax))
    if other_jax:
        changes.insert(0, f"  JAX: stored {old.jax}, now {new.jax} (results may differ in their last bits)")
    if not changes:
        return
    shown = "\n".join(changes)
    if not anyway:
        raise ValueError(
            f"{where}: the run in {directory.root} is one of another program:\n{shown}\nGive another directory, delete "
            'that one to start anew, or give resume="anyway" to go on from its state nevertheless.'
        )
    warnings.warn(f"{where}: going on with a run of another program:\n{shown}", AnotherProgramWarning, stacklevel=2)


def _misfits(old: Program, new: Program) -> Iterator[str]:
    if old.loop != new.loop:
        yield f"  the loop: stored {old.loop}, now {new.loop}"
    yield from _differences(old.types, new.types)


def _differences(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"  {name}: stored {old.get(name, 'nothing')}, now {new.get(name, 'nothing')}"


def _changes(old: Program, new: Program, with_text: bool) -> Iterator[str]:
    yield from _differences(old.settings, new.settings)
    for name in sorted(old.values.keys() | new.values.keys()):
        if old.values.get(name) != new.values.get(name):
            yield f"  {name}: other values"
    if with_text and _words(old.text) != _words(new.text):
        yield "  the program, as JAX has traced it (- stored, + now):"
        yield from _shortened(list(difflib.unified_diff(old.text, new.text, n=1, lineterm=""))[2:])


def _words(text: Sequence[str]) -> list[str]:
    """Without line breaks, which depend on how long the numbers are that have been taken out."""
    return " ".join(text).split()


def _shortened(lines: Sequence[str]) -> list[str]:
    shown = [f"    {line}" for line in lines[:_MOST_LINES]]
    left_out = len(lines) - len(shown)
    return [*shown, f"    ... and {left_out} more lines"] if left_out > 0 else shown
