"""What is stored of a program, and whether a stored program is the one that is asked for."""

import difflib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from loopax._src.durable.callbacks import PYTHON
from loopax._src.durable.checksum import checksums
from loopax._src.durable.directory import Directory, write_whole
from loopax._src.durable.errors import AnotherProgramWarning
from loopax._src.durable.wording import Written
from loopax._version import __version__

FORMAT = 2
FIRST = 1  # recognised a program by the text that JAX prints of it
_MOST_LINES = 40


@dataclass(frozen=True)
class StoredProgram:
    """Everything on which the states of a run depend, as text and checksums."""

    format: int
    loopax: str
    jax: str
    loop: str
    settings: dict[str, str]  # options that the text does not show
    types: dict[str, str]  # of the carry and of rows of outputs, by path
    values: dict[str, str]  # checksums: the first carry, rows of xs, what is closed over, the key
    text: list[str]  # a step, by what it means
    python: str = ""
    callbacks: Mapping[str, Mapping[str, str]] | None = None  # functions of Python that a step calls

    @property
    def versions(self) -> str:
        """By what it was described."""
        return f"loopax {self.loopax} and JAX {self.jax} (format {self.format})"


def describe(
    loop: str, settings: dict[str, str], types: dict[str, str], values: Mapping[str, Any], written: Written
) -> StoredProgram:
    """Describe a run; `values` are arrays."""
    sums = dict(zip(values, checksums(list(values.values())), strict=True))
    versions = FORMAT, __version__, jax.__version__
    return StoredProgram(*versions, loop, settings, types, sums, written.lines, PYTHON, written.callbacks)


def store(directory: Directory, program: StoredProgram) -> None:
    """Write it down."""
    write_whole(directory.program, json.dumps(asdict(program), indent=1))


def stored(where: str, directory: Directory) -> StoredProgram | None:
    """The program of the run that the directory holds; None: it holds none."""
    if not directory.program.exists():
        return None
    try:
        found = json.loads(directory.program.read_text())
        if found["format"] not in (FIRST, FORMAT):
            raise RuntimeError(
                f"{where}: {directory.program} has format {found['format']}, and this version of loopax (format "
                f"{FORMAT}) cannot read it. Go on with loopax {found['loopax']}, or give another directory."
            )
        return StoredProgram(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{where}: {directory.program} is no description of a run that loopax has written ({error}). Give a "
            "directory of its own to each run."
        ) from error


def check(where: str, directory: Directory, old: StoredProgram, new: StoredProgram, anyway: bool) -> None:
    """Whether a stored run may go on as the one that is asked for; both are of one format."""
    if misfits := list(_misfits(old, new)):
        raise ValueError(
            f"{where}: the run in {directory.root} has a state of other types than this one:\n"
            + "\n".join(misfits)
            + "\nGive another directory, or delete that one to start anew."
        )
    changes = list(_changes(old, new))
    if not changes:
        if old.jax != new.jax:
            _warn(f"{where}: the run in {directory.root} goes on under another version of JAX{_last_bits(old, new)}")
        return
    if old.jax != new.jax:
        changes.insert(0, f"  JAX{_last_bits(old, new)}")
    shown = "\n".join(changes)
    if not anyway:
        raise ValueError(
            f"{where}: the run in {directory.root} is one of another program:\n{shown}\nGive another directory, delete "
            'that one to start anew, or give resume="anyway" to go on from its state nevertheless.' + _versions(old)
        )
    _warn(f"{where}: going on with a run of another program:\n{shown}")


def _warn(text: str) -> None:
    warnings.warn(text, AnotherProgramWarning, stacklevel=2)


def _last_bits(old: StoredProgram, new: StoredProgram) -> str:
    return f": stored {old.jax}, now {new.jax} (results may differ in their last bits)"


def _versions(old: StoredProgram) -> str:
    """What to know where another version has described the run."""
    now = f"loopax {__version__} and JAX {jax.__version__} (format {FORMAT})"
    if old.versions == now:
        return ""
    return (
        f"\nThe run was stored by {old.versions}, and this is {now}: versions may write the same program in different "
        'ways. If the functions are the same, give resume="anyway", or go on with the versions that have stored it.'
    )


def _misfits(old: StoredProgram, new: StoredProgram) -> Iterator[str]:
    if old.loop != new.loop:
        yield f"  the loop: stored {old.loop}, now {new.loop}"
    yield from _differences(old.types, new.types)


def _differences(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"  {name}: stored {old.get(name, 'nothing')}, now {new.get(name, 'nothing')}"


def _changes(old: StoredProgram, new: StoredProgram) -> Iterator[str]:
    yield from _differences(old.settings, new.settings)
    for name in sorted(old.values.keys() | new.values.keys()):
        if old.values.get(name) != new.values.get(name):
            yield f"  {name}: other values"
    yield from _changed_callbacks(old, new)
    if _words(old.text) != _words(new.text):
        yield "  the program (- stored, + now):"
        yield from _shortened(list(difflib.unified_diff(old.text, new.text, n=1, lineterm=""))[2:])


def _changed_callbacks(old: StoredProgram, new: StoredProgram) -> Iterator[str]:
    """Functions with other code; each version of Python writes code in its own way."""
    nothing = {"name": "nothing", "code": ""}
    before, now = old.callbacks or {}, new.callbacks or {}
    for name in sorted(before.keys() | now.keys()):
        a, b = before.get(name, nothing), now.get(name, nothing)
        has_code = bool(a["code"] and b["code"])
        if has_code and old.python == new.python and a["code"] != b["code"]:
            yield f"  {name}: stored {a['name']}, now {b['name']} with other code"
        elif not has_code and a != b:
            yield f"  {name}: stored {a['name']}, now {b['name']}"


def _words(text: Sequence[str]) -> list[str]:
    """Without line breaks, which JAX makes where a line gets long."""
    return " ".join(text).split()


def _shortened(lines: Sequence[str]) -> list[str]:
    shown = [f"    {line}" for line in lines[:_MOST_LINES]]
    left_out = len(lines) - len(shown)
    return [*shown, f"    ... and {left_out} more lines"] if left_out > 0 else shown
