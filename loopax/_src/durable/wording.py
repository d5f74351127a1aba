"""A traced program written down by what it means: the same text in every version of JAX and loopax.

Two programs with the same text compute the same. What changes no value is left out: names of functions, places in the
source, `jit` and `jax.checkpoint` around a part, rules for derivatives, what is only shown, what nobody uses.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.durable import equations
from loopax._src.durable.equations import Program, fingerprint
from loopax._src.jax_internals import ClosedJaxpr, Literal


@dataclass(eq=False)
class _Value:
    """An array in a program."""

    type: str
    text: str = ""  # of a number, and of what has a name
    array: Any = None  # what is closed over


@dataclass(eq=False)
class _Operation:
    """An equation."""

    word: str
    settings: Mapping[str, Any]
    blocks: dict[str, "_Block"]
    operands: list[_Value]
    results: list[_Value]
    acts: bool


@dataclass(eq=False)
class _Block:
    """A program: those of its operations that its results need."""

    inputs: list[_Value]
    operations: list[_Operation]
    results: list[_Value]


@dataclass
class Written:
    """The text of a program, and what it cannot show."""

    lines: list[str] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)  # what is closed over, by the names in the text
    callbacks: dict[str, dict[str, str]] = field(default_factory=dict)  # functions of Python, by the names in the text


def write(closed: ClosedJaxpr, inputs: Sequence[str | None], named: Mapping[int, str], given: Sequence[Any]) -> Written:
    """Write a program down.

    Parameters
    ----------
    closed
        The program.
    inputs
        The name of each input; None: it is one of `given`, in order, which the program closes over.
    named
        Names of closed-over arrays, by `id`.

    """
    arrays = iter(given)
    values = [
        _Value(_type(aval), name) if name is not None else _constant(next(arrays))
        for name, aval in zip(inputs, closed.in_avals, strict=True)
    ]
    writer = _Writer(named)
    writer.write(replace(_block(closed, values), inputs=[]), "")  # they have names, in the order of somebody else
    return writer.written


# ---- from a jaxpr to operations


def _block(program: Program, inputs: Sequence[_Value] | None = None) -> _Block:
    jaxpr = getattr(program, "jaxpr", program)
    inputs = [_Value(_type(x.aval)) for x in jaxpr.invars] if inputs is None else list(inputs)
    operations: list[_Operation] = []
    results = _operations(program, inputs, operations)
    return _Block(inputs, _needed(operations, results), results)


def _operations(program: Program, inputs: Sequence[_Value], operations: list[_Operation]) -> list[_Value]:
    """Append the operations of a program, those of programs that it calls in their places; returns its results."""
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    values: dict[Any, _Value] = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Value:
        return _constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if equations.is_shown(eqn):
            continue
        if equations.is_same(eqn):
            results = operands[: len(eqn.outvars)]
        elif (inner := equations.program_of(eqn)) is not None:
            results = _operations(inner, operands, operations)
        else:
            results = [_Value(_type(out.aval)) for out in eqn.outvars]
            operations.append(_operation(eqn, operands, results))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operation(eqn: Any, operands: list[_Value], results: list[_Value]) -> _Operation:
    found = equations.meaning(eqn)
    blocks = {name: _block(program) for name, program in found.programs.items()}
    return _Operation(found.word, found.settings, blocks, operands, results, equations.acts(eqn))


def _needed(operations: Sequence[_Operation], results: Iterable[_Value]) -> list[_Operation]:
    """Those on which the results depend, and those that act on the world."""
    needed, kept = set(results), []
    for operation in reversed(operations):
        if operation.acts or not needed.isdisjoint(operation.results):
            needed.update(operation.operands)
            kept.append(operation)
    return kept[::-1]


def _constant(value: Any, aval: Any = None) -> _Value:
    """A number, or an array."""
    aval = jax.typeof(value) if aval is None else aval
    kind = _type(aval)
    if jnp.ndim(value) or not isinstance(getattr(aval, "dtype", None), np.dtype):
        return _Value(kind, array=value)
    return _Value(kind, f"{np.asarray(value).item()!r}:{aval.dtype}")


def _type(aval: Any) -> str:
    if not hasattr(aval, "shape"):
        return str(aval)
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


# ---- from operations to text


class _Writer:
    """Numbers values in the order in which they are written."""

    def __init__(self, named: Mapping[int, str]) -> None:
        self.written = Written()
        self._named, self._names, self._numbers = named, {}, {}

    def write(self, block: _Block, indent: str) -> None:
        """Append the lines of a block."""
        if block.inputs:
            self._line(indent, f"takes {', '.join(f'{self._name(x)}:{x.type}' for x in block.inputs)}")
        for operation in block.operations:
            settings = [f"{name}={text}" for name, text in self._settings(operation.settings)]
            words = [operation.word, *settings, *(self._name(x) for x in operation.operands)]
            results = [f"{self._name(x)}:{x.type}" for x in operation.results]
            self._line(indent, f"{', '.join(results)} = {' '.join(words)}")
            for name, inner in operation.blocks.items():
                self._line(indent, f"  {name}:")
                self.write(inner, indent + "    ")
        self._line(indent, f"gives {', '.join(map(self._name, block.results))}")

    def _line(self, indent: str, text: str) -> None:
        self.written.lines.append(indent + text)

    def _name(self, value: _Value) -> str:
        if value.array is not None:
            return self._array(value)
        return value.text or f"x{self._numbers.setdefault(id(value), len(self._numbers))}"

    def _array(self, value: _Value) -> str:
        """The name of something closed over; it is in the arrays from then on."""
        key = id(value.array)
        if key not in self._names:
            found = f"closed-over value {sum(k not in self._named for k in self._names)}, {value.type}"
            self._names[key] = self._named.get(key, found)
            self.written.arrays[self._names[key]] = value.array
        return f"<{self._names[key]}>"

    def _settings(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Without those that say no: a new version of JAX may have more of them."""
        for name, value in sorted(settings.items()):
            if value is not None and value is not False:
                yield name, self._text(value)

    def _text(self, value: Any) -> str:
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return f"({', '.join(map(self._text, value))})"
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return str(np.dtype(value))
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return self._array(_Value(_type(value), array=value)) if hasattr(value, "__array__") else _type(value)
        if callable(value) and not isinstance(value, type):
            return self._callback(value)
        return re.sub(r" at 0x[0-9a-f]+", "", str(value))

    def _callback(self, function: Any) -> str:
        name = f"callback {len(self.written.callbacks)}"
        self.written.callbacks[name] = fingerprint(function)
        return f"<{name}>"
