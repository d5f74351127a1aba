"""Which program a stored run is of: described when the run is stored, and compared when it goes on."""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from loopax._src.durable.chunk import Job, TracedChunk, row_types
from loopax._src.durable.files import patiently, write_whole
from loopax._src.durable.options import AnotherProgramWarning, on_first
from loopax._src.durable.options import tensorstore as import_tensorstore
from loopax._src.durable.saves import checksums
from loopax._src.durable.step_hash import Written
from loopax._src.frontend.trace import Traced
from loopax._src.jax_internals import dce
from loopax._src.pytrees.leaves import Spec, to_array, type_in_words
from loopax._version import __version__

FORMAT = 3
_PYTHON = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"  # writes code in its own way


@dataclass(frozen=True)
class StoredProgram:
    """Everything on which the states of a run depend, as text and checksums."""

    format: int
    loopax: str
    jax: str
    python: str
    loop: str
    settings: dict[str, str]  # arguments of the loop, numbers of rows
    types: dict[str, str]  # of the carry and of rows of outputs, by path
    values: dict[str, str]  # checksums: the key, xs, the first carry, what is closed over
    functions: dict[str, dict[str, str]]  # of Python, that a step calls or has as rules for derivatives
    step: str  # its hash
    went_on_anyway: list[str] = field(default_factory=list)  # when, and what differed

    @property
    def versions(self) -> str:
        """By what it was described: a hash means something in these alone."""
        return f"loopax {self.loopax} and JAX {self.jax}"


def stored_program_of(
    loop: str,
    settings: dict[str, str],
    types: dict[str, str],
    values: Mapping[str, Any],
    written: Written,
    others: Mapping[str, str] = MappingProxyType({}),
) -> StoredProgram:
    """Describe a run; `values` are arrays, `others` checksums."""
    values = {**values, **{name: to_array(x)[0] for name, x in written.arrays.items()}}
    sums = dict(zip(values, checksums(list(values.values())), strict=True)) | dict(others)
    versions = FORMAT, __version__, jax.__version__, _PYTHON
    return StoredProgram(*versions, loop, settings, types, sums, written.functions, written.hash)


def describe(job: Job, step: Traced, traced: TracedChunk, first: Sequence[jax.Array]) -> StoredProgram:
    xs, key_data = job.arrays, job.options.key_data
    carry = types_of("carry", traced.spec)
    types = {path: aval.str_short() for path, aval in carry}
    types |= {f"a row of outputs {i}": str(row) for i, row in enumerate(row_types(traced.y_spec))}
    values = xs | ({} if key_data is None else {"key": key_data})
    values |= {f"first {path}": x for (path, _), x in zip(carry, first, strict=True)}
    settings = job.settings | {
        f"a row of {name}": type_in_words(jax.typeof(x).update(shape=x.shape[1:])) for name, x in xs.items()
    }

    # Before: (row, *closed over, *start, [goes on], *carry, *flags) -> ([goes on], *carry, *flags, *y)
    # After: without the flags of checks among the results, for they never change another result.
    body, given, num_flags, num_ys = step.body, step.closed_over, sum(step.flags.sizes), len(step.found.y_spec.avals)
    num_start = len(body.in_avals) - 1 - len(given) - (len(body.out_avals) - num_ys)
    goes_on = ["goes on"] * (len(body.out_avals) - len(carry) - num_flags - num_ys)
    last = [*goes_on, *(path for path, _ in carry), *(f"flag {i}" for i in range(num_flags))]
    used = [True] * (len(goes_on) + len(carry)) + [False] * num_flags + [True] * num_ys
    inputs = ["row", *[None] * len(given), *(f"start {i}" for i in range(num_start)), *last]
    written = Written(dce(body, used, True)[0], inputs, {id(x): name for name, x in xs.items()}, given)
    return stored_program_of(job.options.name, settings, types, values, written)


def types_of(what: str, spec: Spec) -> list[tuple[str, Any]]:
    """The types of the arrays of a pytree, by path."""
    return [(f"{what}{path}", aval) for path, aval in zip(spec.names(), spec.avals, strict=True)]


def refuse_unsavable(name: str, found: Iterable[tuple[str, Any]]) -> None:
    problems = []
    for path, aval in found:
        try:
            import_tensorstore().dtype(aval.dtype)
        except (TypeError, ValueError):
            problems.append(f"  {path}: {aval.str_short()}\n")
    if problems:
        raise TypeError(
            f"{name} cannot save these arrays, whose dtypes TensorStore does not know:\n{''.join(problems)}"
            "Convert them (`x.astype(...)`), and back in the body."
        )


def compare_with_stored(where: str, root: Path, new: StoredProgram, anyway: bool) -> None:
    """Compare a program with the stored one, and store it where it is new."""

    def compare() -> None:
        old, anyways = _stored(where, root), []
        if old is not None:
            anyways = old.went_on_anyway
            if differed := _compare(where, root, old, new, anyway):
                anyways = [*anyways, "\n".join([datetime.now(UTC).isoformat(timespec="seconds"), *differed])]
        found = replace(new, went_on_anyway=anyways)
        if found != old:
            write_whole(root / "program.json", json.dumps(asdict(found), indent=1))

    on_first(compare)


def _stored(where: str, root: Path) -> StoredProgram | None:
    """The program of the run that the directory holds; None: it holds none."""
    if not (file := root / "program.json").exists():
        refuse_gone(where, file)
        return None
    try:
        found = json.loads(patiently(lambda: file.read_text(encoding="utf-8")))
        if found["format"] != FORMAT:
            raise RuntimeError(
                f"{where}: the run in {root} was stored by loopax {found['loopax']} and JAX {found['jax']} "
                f"in format {found['format']}, and this is loopax {__version__} with format {FORMAT}. Go on with the "
                "versions that have stored it, or give another directory."
            )
        return StoredProgram(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{where}: {file} is no description of a run that loopax has written ({error}). Give a "
            "directory of its own to each run."
        ) from error


def refuse_gone(where: str, file: Path) -> None:
    """Raise where a file is missing without which the saves beside it may be those of another run."""
    if any(file.parent.glob("saves/[0-9]*")) or any(file.parent.glob("*/saves/[0-9]*")):
        raise RuntimeError(
            f"{where}: there are saves in {file.parent}, but {file.name}, which describes them, is gone. Restore it "
            "from a backup, or delete the directory of the run to start anew."
        )


def _compare(where: str, root: Path, old: StoredProgram, new: StoredProgram, anyway: bool) -> list[str]:
    """Whether a stored run may go on as the one that is asked for; gives what differs nevertheless."""
    run = f"{where}: the run in {root}"
    misfits = [] if old.loop == new.loop else [f"  the loop: stored {old.loop}, now {new.loop}"]
    misfits += _differences(old.types, new.types)
    if misfits:
        raise ValueError(
            f"{run} has a state of other types than this one:\n"
            + "\n".join(misfits)
            + "\nGive another directory, or delete that one to start anew."
        )
    data, program = _differences(old.settings, new.settings), []
    for name in sorted({*old.values, *new.values}):
        if old.values.get(name) != new.values.get(name):
            (data if name == "key" or name.startswith("xs, ") else program).append(f"  {name}: other values")
    if old.versions != new.versions:  # the hashes of two versions cannot be compared, nor the order of values
        program = [f"  stored by {old.versions}, and this is {new.versions}, which write programs in other ways"]
    else:
        program += _changed_functions(old, new)
        if old.step != new.step and old.settings == new.settings:  # the step of other arguments is another one
            program.append("  the step computes something else")
    shown = "\n".join([*data, *program])
    if data and anyway:
        raise ValueError(
            f'{run} cannot go on with other data, also with resume="anyway":\n{shown}\nGive the same data, or another '
            "directory."
        )
    if shown and not anyway:
        raise ValueError(
            f"{run} is one of another program:\n{shown}\nGive another directory, delete that one to start anew, or "
            'give resume="anyway" to go on from its state nevertheless.'
        )
    if shown:
        warnings.warn(f"{where}: going on with a run of another program:\n{shown}", AnotherProgramWarning, stacklevel=2)
    return program


def _differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return [
        f"  {name}: stored {old.get(name, 'nothing')}, now {new.get(name, 'nothing')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _changed_functions(old: StoredProgram, new: StoredProgram) -> Iterator[str]:
    """Functions with other code; each version of Python writes code in its own way."""
    nothing = {"name": "nothing", "code": ""}
    for name in sorted(old.functions.keys() | new.functions.keys()):
        a, b = old.functions.get(name, nothing), new.functions.get(name, nothing)
        has_code = bool(a["code"] and b["code"])
        if (a["code"] != b["code"] and old.python == new.python) if has_code else a != b:
            yield f"  {name}: stored {a['name']}, now {b['name']}" + " with other code" * has_code
