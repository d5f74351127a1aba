"""Describes the run that is asked for, and lets all hosts settle whether it goes on: `stored_program.check` decides."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from loopax._src.durable import stored_program as programs
from loopax._src.durable.chunk import TracedChunk, row_types
from loopax._src.durable.directory import Directory
from loopax._src.durable.hosts import all_agree, on_first
from loopax._src.durable.orbax import tensorstore as import_tensorstore
from loopax._src.durable.wording import Written, write
from loopax._src.frontend.trace import Traced
from loopax._src.jax_internals import dce
from loopax._src.pytrees.leaves import Spec, to_array


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
) -> programs.StoredProgram:
    """Describe a run from its first carry and a traced step; `named` are ids of closed-over arrays that have names."""
    carry = types_of("carry", traced.spec)
    types = {path: aval.str_short() for path, aval in carry}
    types |= {f"a row of outputs {i}": str(row) for i, row in enumerate(row_types(traced.y_spec))}
    written = _written(step, [path for path, _ in carry], named)
    values = {f"first {path}": x for (path, _), x in zip(carry, first, strict=True)}
    values |= {name: to_array(x)[0] for name, x in written.arrays.items()}
    if key_data is not None:
        values["key"] = key_data
    return programs.describe(loop, settings, types, values, written)


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
    new: programs.StoredProgram,
    first: Callable[[], programs.StoredProgram],
    anyway: bool,
) -> None:
    """Compare a program with the stored one, and store it where it is new; `first` describes it in format 1."""
    found: list[programs.StoredProgram | None] = []
    on_first(lambda: found.append(programs.stored(where, directory)))
    old = found[0] if found else None
    described = first() if all_agree(old is not None and old.format == programs.FIRST) else new

    def settle_with_stored() -> None:
        if old is not None:
            programs.check(where, directory, old, described, anyway)
        if old != new:
            programs.store(directory, new)

    on_first(settle_with_stored)
