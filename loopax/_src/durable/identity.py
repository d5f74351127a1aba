"""Describes the run that is asked for, and lets all hosts settle whether it goes on: `stored_program.check` decides."""

import difflib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.jaxpr.util import inner_programs
from loopax._src.durable.checksums import checksums
from loopax._src.durable.chunk import TracedChunk, row_types
from loopax._src.durable.equations import PYTHON
from loopax._src.durable.options import AnotherProgramWarning, Directory, all_agree, on_first, write_whole
from loopax._src.durable.options import tensorstore as import_tensorstore
from loopax._src.durable.wording import Written, write
from loopax._src.frontend.trace import Traced
from loopax._src.jax_internals import ClosedJaxpr, Literal, dce
from loopax._src.pytrees.leaves import Spec, to_array
from loopax._version import __version__

# What is stored of a program, and whether a stored program is the one that is asked for.


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


def stored_program_of(
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


# How format 1 described runs: by the text that JAX prints of a compiled chunk. Runs that are stored so can go on.


def as_first(new: StoredProgram, chunk: ClosedJaxpr, named: Mapping[int, str]) -> StoredProgram:
    """A program as format 1 would have described it."""
    values = {name: total for name, total in new.values.items() if name == "key" or name.startswith("first ")}
    arrays = [*chunk.consts, *_inner_constants(chunk.jaxpr)]
    names = [named.get(id(x), f"closed-over value {i}, {jax.typeof(x).str_short()}") for i, x in enumerate(arrays)]
    values |= _sums(names, arrays)
    text = re.sub(r" at 0x[0-9a-f]+", "", str(chunk)).splitlines()
    return replace(new, format=FIRST, values=values, text=text, python="", callbacks=None)


def _sums(names: Sequence[str], arrays: Sequence[Any]) -> dict[str, str]:
    found = dict(zip(names, arrays, strict=True))
    return dict(zip(found, checksums([to_array(x)[0] for x in found.values()]), strict=True))


def _inner_constants(jaxpr: Any) -> Iterator[Any]:
    """Arrays that functions inside of a jaxpr keep, as `jax.jit` does with those of NumPy."""
    for eqn in jaxpr.eqns:
        yield from (x.val for x in eqn.invars if isinstance(x, Literal) and jnp.ndim(x.val))
        for inner in inner_programs(eqn):
            yield from getattr(inner, "consts", ())
            yield from _inner_constants(getattr(inner, "jaxpr", inner))


def refuse_unsavable(name: str, traced: TracedChunk) -> None:
    """Refuse arrays of types that cannot be written."""
    refuse_unknown(name, [*types_of("carry", traced.spec), *types_of("outputs", traced.y_spec)])


def refuse_unknown(name: str, found: Iterable[tuple[str, Any]]) -> None:
    """Refuse types that cannot be written."""
    tensorstore = import_tensorstore()
    problems = [f"  {path}: {aval.str_short()}" for path, aval in found if not _is_known(tensorstore, aval.dtype)]
    if problems:
        raise TypeError(
            f"{name} cannot save these arrays, whose dtypes TensorStore does not know:\n"
            + "\n".join(problems)
            + "\nConvert them (`x.astype(...)`), and back in the body."
        )


def _is_known(tensorstore: Any, dtype: Any) -> bool:
    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return False
    return True


def types_of(what: str, spec: Spec) -> list[tuple[str, Any]]:
    """The types of the arrays of a pytree, by path."""
    return [(f"{what}{path}", aval) for path, aval in zip(spec.names(), spec.avals, strict=True)]


def describe(
    loop: str,
    step: Traced,
    traced: TracedChunk,
    first: Sequence[jax.Array],
    named: Mapping[int, str],
    key_data: Any,
    settings: dict[str, str],
) -> StoredProgram:
    """Describe a run from its first carry and a traced step; `named` are ids of closed-over arrays that have names."""
    carry = types_of("carry", traced.spec)
    types = {path: aval.str_short() for path, aval in carry}
    types |= {f"a row of outputs {i}": str(row) for i, row in enumerate(row_types(traced.y_spec))}
    written = _written(step, [path for path, _ in carry], named)
    values = {f"first {path}": x for (path, _), x in zip(carry, first, strict=True)}
    values |= {name: to_array(x)[0] for name, x in written.arrays.items()}
    if key_data is not None:
        values["key"] = key_data
    return stored_program_of(loop, settings, types, values, written)


def _written(step: Traced, carry: Sequence[str], named: Mapping[int, str]) -> Written:
    """The text of a step: what it makes of a carry, without the flags of checks, which never change a result."""
    body, given, num_flags = step.body, step.closed_over, len(step.messages)
    num_ys = len(step.found.y_spec.avals)
    goes_on = ["goes on"] * (len(body.out_avals) - len(carry) - num_flags - num_ys)
    last = [*goes_on, *carry, *(f"flag {i}" for i in range(num_flags))]
    start = [f"start {i}" for i in range(len(body.in_avals) - 1 - len(given) - len(last))]
    used = [True] * (len(goes_on) + len(carry)) + [False] * num_flags + [True] * num_ys
    return write(dce(body, used, True)[0], ["row", *[None] * len(given), *start, *last], named, given)


def settle(
    where: str,
    directory: Directory,
    new: StoredProgram,
    first: Callable[[], StoredProgram],
    anyway: bool,
) -> None:
    """Compare a program with the stored one, and store it where it is new; `first` describes it in format 1."""
    found: list[StoredProgram | None] = []
    on_first(lambda: found.append(stored(where, directory)))
    old = found[0] if found else None
    described = first() if all_agree(old is not None and old.format == FIRST) else new

    def settle_with_stored() -> None:
        if old is not None:
            check(where, directory, old, described, anyway)
        if old != new:
            store(directory, new)

    on_first(settle_with_stored)
