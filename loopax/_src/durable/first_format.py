"""How format 1 described runs: by the text that JAX prints of a compiled chunk. Runs that are stored so can go on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.jaxpr.util import inner_programs
from loopax._src.durable.checksum import checksums
from loopax._src.durable.stored_program import FIRST, StoredProgram
from loopax._src.jax_internals import ClosedJaxpr, Literal
from loopax._src.pytrees.leaves import to_array


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
