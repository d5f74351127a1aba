"""A program that has been traced before is recognised, whatever function it was traced from.

Caches ask whether a program is the same object: those of the rules here, and JAX's own of compiled programs. But a
lambda is a new function each time that its line is run, and a program traced from it a new object. So the program of a
step is compared with those that are in use: equation by equation, with all parameters, types, literals and settings,
and the lines of the user's that the equations come from. What else is the user's in parameters is the same only if it
is one object: functions, arrays, objects whose class may have an equality of its own. Where anything is not known for
certain, programs are not the same.
"""

import os
import struct
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import singledispatch
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import jax
import numpy as np
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef

from loopax._src.jax_internals.tracing import JAX_FOLDER, LOOPAX_FOLDER, trace_context

# Each program by what it is. Nothing is kept alive: what stands for functions and arrays are weak references, and an
# entry goes with its program.
_programs: WeakValueDictionary[Hashable, ClosedJaxpr] = WeakValueDictionary()

_EXACT = (bool, int, str, bytes, type(None), object)
_OURS = ("builtins", "jax", "jaxlib", "loopax", "numpy")  # packages whose values are equal if they mean the same
_BY_VALUE = (_core.AbstractValue, _core.Effect, AbstractMesh, Mesh, PartitionSpec, Sharding, np.dtype)
_REMEMBERED = ("_len", "_hash", "_hashable")  # what parameters of `scan` compute of themselves
_CONTAINERS = (tuple, list, dict, type(None))


class _Only:
    """An object that is equal to no other; it is not kept alive."""

    def __init__(self, value: Any) -> None:
        self.place, self.value = id(value), ref(value)

    def __hash__(self) -> int:
        return self.place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Only) and (value := self.value()) is not None and value is other.value()


class _Token:
    """It stands for a description, and is compared and hashed faster. Equal descriptions have the same."""


# Of programs, and of JAX's closures, which hold each other in several places.
_tokens: WeakValueDictionary[Hashable, _Token] = WeakValueDictionary()
_described: WeakKeyDictionary[Any, _Token] = WeakKeyDictionary()


def _once(describe: Callable[[Any], Hashable]) -> Callable[[Any], _Token]:
    """The token of what describes an object that does not change."""

    def token(value: Any) -> _Token:
        if value not in _described:
            _described[value] = _tokens.setdefault(describe(value), _Token())
        return _described[value]

    return token


def recognised(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The first program in use that is the same; this one, if there is none."""
    try:
        return _programs.setdefault((trace_context(), _value(closed)), closed)
    except (TypeError, RecursionError):  # also of what cannot be hashed
        return closed


class _Variables(dict[Any, int]):
    """Numbers of variables, in the order in which they appear."""

    def atoms(self, atoms: Sequence[Any]) -> Hashable:
        """Variables and literals, with their types."""
        literal = lambda x: (type(x.val), np.asarray(x.val).tobytes())  # noqa: E731
        return tuple(
            (literal(x) if isinstance(x, Literal) else self.setdefault(x, len(self)), _value(x.aval)) for x in atoms
        )

    def equation(self, eqn: Any) -> Hashable:
        """All of an equation."""
        operands, results = self.atoms(eqn.invars), self.atoms(eqn.outvars)
        return eqn.primitive, operands, results, _parts(eqn.params), eqn.ctx, _origin_in_step(eqn)


def _value(value: Any) -> Hashable:
    """What a parameter is: equal for two of them only if they are the same in everything."""
    kind = type(value)
    if kind in _EXACT or isinstance(value, Enum):
        return kind, value
    is_ours = kind.__module__.partition(".")[0] in _OURS
    return (kind, _parts(value)) if is_ours and not isinstance(value, jax.Array) else _Only(value)


@singledispatch
def _parts(value: Any) -> Hashable:
    kind = type(value)
    if kind.__eq__ is object.__eq__:
        return _Only(value)  # raises `TypeError` where there are no weak references to it
    if is_dataclass(value):  # also JAX's policies of `jax.checkpoint`, which are called
        return tuple(_value(getattr(value, field.name)) for field in fields(value))
    if callable(value):
        return _Only(value)
    if kind.__module__ == "jax._src.flattree":  # parameters of `scan` from JAX 0.12 on
        return _parts({name: x for name, x in vars(value).items() if name not in _REMEMBERED})
    if not isinstance(value, _BY_VALUE):
        raise TypeError("not to be compared")
    return value


@_parts.register(tuple)
@_parts.register(list)
def _(values: Sequence[Any]) -> Hashable:
    return tuple(map(_value, values))


@_parts.register(set)
@_parts.register(frozenset)
def _(values: set[Any]) -> Hashable:
    return frozenset(map(_value, values))


@_parts.register
def _(values: dict) -> Hashable:
    return tuple((_value(name), _value(value)) for name, value in values.items())


@_parts.register(float)
@_parts.register(complex)
def _(number: complex) -> Hashable:
    return struct.pack("dd", number.real, number.imag)  # 0.0 == -0.0, and NaN != NaN


@_parts.register
def _(number: np.generic) -> Hashable:
    return number.dtype, number.tobytes()


@_parts.register(PyTreeDef)
def _(tree: Any) -> Hashable:
    kind, data = tree.node_data() or (None, None)
    if kind is not None and kind not in _CONTAINERS:  # it may hold static values of the user's
        raise TypeError("not to be compared")
    return kind, _value(data), tuple(map(_parts, tree.children()))


@_parts.register
def _(eqn: JaxprEqn) -> Hashable:  # in a closure of JAX's
    return _Variables().equation(eqn)


@_parts.register(Jaxpr)
@_parts.register(ClosedJaxpr)
@_once
def _(program: Any) -> Hashable:
    variables, jaxpr = _Variables(), getattr(program, "jaxpr", program)
    inputs = variables.atoms(jaxpr.constvars), variables.atoms(jaxpr.invars)
    eqns, outputs = tuple(map(variables.equation, jaxpr.eqns)), variables.atoms(jaxpr.outvars)
    others = jaxpr.effects, jaxpr.debug_info, *getattr(program, "consts", ())
    return *inputs, eqns, outputs, *map(_value, others)


# A function with derivatives of its own hands JAX its rules in closures, which JAX makes for each call: around the rule
# are functions of JAX, what they are given, and places for what they will find. There is no public way to the rule.
_JAX, _LOOPAX = (f"{folder}{os.sep}" for folder in (JAX_FOLDER, LOOPAX_FOLDER))
_FOUND_LATER = (_core.Trace, _core.TraceTag, _lu.Store, _lu.EqualStore)


@_parts.register
def _(rule: _lu.WrappedFun) -> Hashable:
    return _parts([rule.f, rule.params, *((function, *_settled(given)) for function, given in rule.transforms)])


@_parts.register
def _(function: FunctionType) -> Hashable:
    return _closure(function) if function.__code__.co_filename.startswith(_JAX) else _Only(function)


@_once
def _closure(function: Any) -> Hashable:
    """A function of JAX."""
    code = function.__code__
    try:
        cells = dict(zip(code.co_freevars, (x.cell_contents for x in function.__closure__ or ()), strict=True))
    except ValueError:  # a cell is empty
        return _Only(function)
    if function.__qualname__ == "_memoize.<locals>.memoized":
        cells = {"fn": cells["fn"]}  # without what it remembers
    return code.co_filename, code, _parts([_settled(cells.values()), function.__defaults__, function.__kwdefaults__])


def _settled(parts: Iterable[Any]) -> list[Any]:
    return [x for x in parts if not isinstance(x, _FOUND_LATER)]


def _origin_in_step(eqn: Any) -> tuple[Any, ...]:
    """The name stack of an equation, and the calls of the user's that led to it from the function that was traced last.

    A call is a code object, and the place of an instruction in it: they are compared much faster than lines are found.
    """
    info, calls = eqn.source_info, []
    codes, places = info.traceback.raw_frames() if info.traceback else ([], [])
    for code, place in zip(codes, places, strict=True):
        if code.co_filename.startswith(_LOOPAX):
            if calls:
                break
        elif not code.co_filename.startswith(_JAX):
            calls.append((code.co_filename, code, place))
    return info.name_stack, tuple(calls)
