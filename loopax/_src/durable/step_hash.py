"""A step as a hash, and the functions of Python that it calls as fingerprints: `stored_program.py` compares them."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src import jax_internals as jaxi
from loopax._src.core.ir.lanes import Lanes
from loopax._src.core.lane_effects import OnlyIf, only_if_p
from loopax._src.jax_internals import ClosedJaxpr, Literal
from loopax._src.pytrees.leaves import type_in_words

# The Python functions that a program calls while it runs, or in rules for derivatives, and what tells two apart.
#
# A jaxpr holds such a function as an object. What can be compared is its code: instructions, constants and names,
# also those of functions that it closes over, and of functions of its own module that it calls; and numbers, strings
# and NumPy arrays that are given to it for good, as defaults or by `functools.partial`. What it reads when it is
# called (variables, attributes, files) cannot be: it may rightly be another in each process.

_LIBRARIES = ("jax", "equinox", "loopax")


def fingerprint(callback: Any) -> dict[str, str]:
    """The name of a function, and a checksum of its code (none where it has no Python code)."""
    parts: list[Any] = []
    todo = [callback]
    while todo:
        one = todo.pop(0)
        if not any(one is other for other in parts):
            parts.append(one)
            todo += _within(one)
    # Libraries are looked through: what counts is the user's.
    users = [one for one in parts if isinstance(one, FunctionType) and not _is_of_a_library(one)]
    lines = [line for function in users for line in _code(function.__code__)]
    # Values that are given for good, as far as they can be compared between processes.
    for one in parts:
        given: dict[Any, Any] = {}
        if isinstance(one, functools.partial) and not _is_of_a_library(one.func):
            given = {**dict(enumerate(one.args)), **one.keywords}
        elif isinstance(one, FunctionType) and not _is_of_a_library(one):
            given = {**dict(enumerate(one.__defaults__ or ())), **(one.__kwdefaults__ or {})}
        lines += [f"{name}: {text}" for name, value in given.items() if (text := _text_of_value(value)) is not None]
    named = users[0] if users else callback
    name = getattr(named, "__qualname__", None) or getattr(named, "__name__", None) or type(named).__qualname__
    module = getattr(named, "__module__", None) or type(named).__module__
    return {"name": f"{module}.{name}", "code": hash_of(*lines) if lines else ""}


def _within(one: Any) -> Iterator[Any]:
    """The functions of which a callable is made."""
    if isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, MethodType):
        yield one.__func__
    elif isinstance(one, FunctionType):
        yield from _named_in(one)
    elif hasattr(one, "call_wrapped"):  # what JAX makes of the functions of a rule for derivatives
        yield one.f
    elif hasattr(one, "callback_func"):  # and of the function of `jax.pure_callback`
        yield one.callback_func
    elif hasattr(one, "__wrapped__"):
        yield one.__wrapped__
    elif not isinstance(one, type) and callable(one):
        yield type(one).__call__


def _named_in(function: FunctionType) -> Iterator[Any]:
    """The functions that a function closes over, and those of its own module that it calls."""
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if callable(value) or hasattr(value, "call_wrapped"):
            yield value
    if not _is_of_a_library(function):
        called = (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from (f for f in called if isinstance(f, FunctionType) and f.__module__ == function.__module__)


def _is_of_a_library(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] in _LIBRARIES


def _code(code: CodeType) -> Iterator[str]:
    """Instructions, constants and names, without places in the source."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_freevars} {code.co_argcount} {code.co_flags}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _text_of_value(value: Any) -> str | None:
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return f"{value.dtype}{value.shape} {sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, tuple | list):
        texts = [_text_of_value(item) for item in value]
        return None if None in texts else f"{type(value).__name__} {texts}"
    return repr(value) if value is None or isinstance(value, bool | int | float | complex | str | bytes) else None


def hash_of(*texts: str) -> str:
    """Of texts in this order."""
    return sha256("\n".join(texts).encode()).hexdigest()[:32]


# Parameters of loopax that change no value: how reverse mode stores, how lanes run, what is shown, what finished lanes
# compute, of what a batch is. The program that a derivative or a batch makes is another one by itself.
_NO_VALUE = ("kind", "derivative", "is_fixed", "bound_is_loose", "share", "reporting", "rules", "static", "when")


@dataclass(frozen=True)
class _Constant:
    """What a program closes over. It gets a name where an operation reads it."""

    array: Any


class Written:
    """The hash of a program, and what it leaves out, by the names that stand in it: arrays and functions of Python.

    Each value is the hash of the operation that computes it, of its parameters and of the hashes of its operands. So
    names of variables, the order of independent operations, and operations that nobody uses have no part in it.
    """

    def __init__(
        self, closed: ClosedJaxpr, inputs: Sequence[str | None], named: Mapping[int, str], given: Sequence[Any]
    ) -> None:
        """Write a program down, from the names of its inputs and, by `id`, of arrays that it closes over.

        An input without a name is one of `given`, in order, which the program closes over.
        """
        self.arrays: dict[str, Any] = {}
        self.functions: dict[str, dict[str, str]] = {}
        self._named, self._names, arrays = named, {}, map(_Constant, given)
        self.hash = self.program(closed, [next(arrays) if name is None else name for name in inputs])

    def program(self, program: ClosedJaxpr, inputs: Sequence[Any] | None = None) -> str:
        """The hash of what it computes and does."""
        inputs = inputs or [f"input {i} {_type_of(x.aval)}" for i, x in enumerate(program.invars)]
        happened: list[str] = []
        results = self._results(program, inputs, happened)
        return hash_of(*map(self._text, results), "does", *happened)

    def _results(self, program: ClosedJaxpr, inputs: Sequence[Any], happened: list[str]) -> list[Any]:
        """The hashes of the results; what happens besides is added to the list. Calls are looked into."""
        values = dict(zip(program.invars, inputs, strict=True))
        values |= {variable: _constant(x, variable.aval) for variable, x in jaxi.constants_of(program).items()}

        def read(atom: Any) -> Any:
            return _constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

        for eqn in _needed(program):
            operands = [read(atom) for atom in eqn.invars]
            if jaxi.is_identity(eqn):
                results = operands[: len(eqn.outvars)]
            elif (inner := jaxi.inlinable(eqn)) is not None:
                results = self._results(inner, operands, happened)
            else:
                word = hash_of(self._operation(eqn), *map(self._text, operands))
                if _acts(eqn):  # the second time is not the first: a reference, say, holds something else by then
                    word = hash_of(word, str(len(happened)))
                    happened.append(word)
                results = [f"{word} {i} {_type_of(out.aval)}" for i, out in enumerate(eqn.outvars)]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in program.outvars]

    def _operation(self, eqn: Any) -> str:
        """What an equation does to its operands."""
        kind = "rule" if jaxi.is_custom(eqn) else "callback"
        if (function := jaxi.function_object(eqn)) is not None:
            program = jaxi.held_program(function)
            params = {name: value for name, value in function.params.items() if name != "traced"}
            return self._text({"": type(function).__name__, "program": program, **params}, kind)
        params = {
            name: value
            for name, value in jaxi.meaningful_params(eqn).items()
            if not (name in _NO_VALUE or isinstance(value, Lanes))
        }
        return f"{eqn.primitive.name} {self._text(params, kind)}"

    def _text(self, value: Any, kind: str = "callback") -> str:
        """What stands for a value, a parameter or a part of one; `kind` is what a function is called."""
        if isinstance(value, _Constant):
            return self._array(value.array)
        if (program := jaxi.held_program(value)) is not None:
            return self.program(program)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name}: {self._text(value[name], kind)}' for name in sorted(value, key=str))}}}"
        if isinstance(value, tuple | list):
            return f"({', '.join(self._text(item, kind) for item in value)})"
        if isinstance(value, frozenset | set):
            return str(sorted(self._text(item, kind) for item in value))
        if isinstance(value, type) and issubclass(value, np.generic):
            return str(np.dtype(value))
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return self._array(value) if hasattr(value, "__array__") else _type_of(value)
        is_function = callable(value) and not isinstance(value, type | ContextDecorator)
        if is_function or hasattr(value, "call_wrapped"):
            return self._function(value, kind)
        return re.sub(r" at 0x[0-9a-f]+", "", str(value))

    def _array(self, array: Any) -> str:
        """The name of something closed over; it is in the arrays from then on."""
        if id(array) not in self._names:
            found = f"closed-over value {sum(k not in self._named for k in self._names)}, {_type_of(jax.typeof(array))}"
            self._names[id(array)] = self._named.get(id(array), found)
            self.arrays[self._names[id(array)]] = array
        return self._names[id(array)]

    def _function(self, function: Any, kind: str) -> str:
        """The name of a function; two with the same fingerprint have the same."""
        functions, found = self.functions, fingerprint(function)
        if not found["code"] and found["name"].startswith(_LIBRARIES):
            return found["name"]
        name = next((name for name, other in functions.items() if other == found and name.startswith(kind)), None)
        name = name or f"{kind} {sum(name.startswith(kind) for name in functions)}"
        functions[name] = found
        return name


def _needed(jaxpr: ClosedJaxpr) -> list[Any]:
    """The equations on which results depend or that act on the world, without those that only show something."""
    needed, kept = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        shows = jaxi.only_shows(OnlyIf(**eqn.params).happening if eqn.primitive is only_if_p else eqn.primitive)
        if not shows and (_acts(eqn) or not needed.isdisjoint(map(id, eqn.outvars))):
            needed.update(map(id, eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def _acts(eqn: Any) -> bool:
    """Whether an equation has effects that count, also where nobody uses its results."""
    return any("Debug" not in type(effect).__name__ for effect in eqn.effects)


def _constant(value: Any, aval: Any) -> Any:
    """A number as its text, or something that is closed over."""
    if jnp.ndim(value) or not isinstance(getattr(aval, "dtype", None), np.dtype):
        return _Constant(value)
    return f"{np.asarray(value).item()!r}:{aval.dtype}"


def _type_of(aval: Any) -> str:
    return type_in_words(aval) if hasattr(aval, "shape") else str(aval)
