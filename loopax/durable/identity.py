"""Whether the run in a directory is the one that is asked for, and whether its state can be written."""

from collections.abc import Sequence
from typing import Any

import jax

from loopax._carry import Spec, to_array
from loopax.durable import program as programs
from loopax.durable.chunk import Traced, row_types
from loopax.durable.directory import Directory
from loopax.durable.hosts import on_first
from loopax.durable.orbax import tensorstore as import_tensorstore


def refuse_unsavable(name: str, traced: Traced) -> None:
    """Refuse arrays of types that cannot be written."""
    tensorstore = import_tensorstore()
    found = [*_types("carry", traced.spec), *_types("outputs", traced.y_spec)]
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


def _types(what: str, spec: Spec) -> list[tuple[str, Any]]:
    """The types of the arrays of a pytree, by path."""
    return [(f"{what}{path}", aval) for path, aval in zip(spec.names(), spec.avals, strict=True)]


def describe(
    loop: str,
    traced: Traced,
    first: Sequence[jax.Array],
    named: dict[str, Any],
    key_data: Any,
    settings: dict[str, str],
) -> programs.Program:
    """Describe a run from its first carry and its traced chunk; `named` are arrays with names among its constants."""
    names_of = {id(x): name for name, x in named.items()}
    carry = _types("carry", traced.spec)
    types = {path: aval.str_short() for path, aval in carry}
    types |= {f"a row of outputs {i}": str(row) for i, row in enumerate(row_types(traced.y_spec))}
    values = {f"first {path}": x for (path, _), x in zip(carry, first, strict=True)}
    for i, x in enumerate(traced.constants):
        values[names_of.get(id(x), f"closed-over value {i}, {jax.typeof(x).str_short()}")] = to_array(x)[0]
    if key_data is not None:
        values["key"] = key_data
    return programs.describe(loop, traced.text, settings, types, values)


def settle(where: str, directory: Directory, new: programs.Program, anyway: bool) -> None:
    """Compare a program with the stored one, and store it where it is new."""

    def settle_with_stored() -> None:
        old = programs.stored(where, directory)
        if old is not None:
            programs.check(where, directory, old, new, anyway)
        if old != new:
            programs.store(directory, new)

    on_first(settle_with_stored)
