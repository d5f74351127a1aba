"""Small tools for jaxprs: trace, prune, look through, split lists of operands."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from itertools import chain
from math import prod
from sys import maxsize
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src.jax_internals import (
    AbstractValue,
    ClosedJaxpr,
    Jaxpr,
    Literal,
    ad,
    axis_of_index,
    collective_name,
    communicates_over,
    dce,
    equation_context,
    held_program,
    inlinable,
    is_axis_index,
    is_custom_vjp,
    is_number,
    item_bytes,
    keep_bits,
    mapped_aval,
    on_device,
    on_mesh,
    replace_jaxpr,
    strong,
    unmapped_aval,
    with_held_program,
    zeros,
)

T = TypeVar("T")
Mask = tuple[bool, ...]

INDEX = jax.ShapeDtypeStruct((), jnp.int32)  # the type of row numbers and step counts
MOST_STEPS = 2**31 - 1  # the largest; the count of a loop without a bound stays there


def split_list(items: Iterable[T], sizes: Sequence[int]) -> list[list[T]]:
    """Cut a list into pieces of these sizes, and a last piece of what remains."""
    items, pieces = list(items), []
    for size in sizes:
        pieces.append(items[:size])
        items = items[size:]
    return [*pieces, items]


def select(mask: Sequence[bool], items: Iterable[T]) -> list[T]:
    """The items whose mask is True."""
    return [item for chosen, item in zip(mask, items, strict=True) if chosen]


def reject(mask: Sequence[bool], items: Iterable[T]) -> list[T]:
    """The items whose mask is False."""
    return [item for chosen, item in zip(mask, items, strict=True) if not chosen]


def merge_lists(mask: Sequence[bool], false: Iterable[T], true: Iterable[T]) -> list[T]:
    """The inverse of `reject` and `select`."""
    sources = (iter(list(false)), iter(list(true)))
    merged = [next(sources[chosen]) for chosen in mask]
    for rest in sources:
        assert next(rest, None) is None
    return merged


def of_selected(function: Callable[..., Any], mask: Sequence[bool], values: Sequence[Any]) -> Callable[..., Any]:
    """The function of those arguments alone whose mask is True; the others have these values."""
    fixed = reject(mask, values)
    return lambda *selected: function(*merge_lists(mask, fixed, selected))


def invert(mask: Sequence[bool]) -> Mask:
    """Not, elementwise."""
    return tuple(not chosen for chosen in mask)


def either(a: Sequence[bool], b: Sequence[bool]) -> Mask:
    """Or, elementwise."""
    return tuple(x or y for x, y in zip(a, b, strict=True))


def stacked(aval: AbstractValue, rows: int, axis: int = 0, mesh_axis: Any = None) -> AbstractValue:
    """The type of `rows` such arrays stacked along a new axis, which may be spread along one of a mesh."""
    return unmapped_aval(rows, axis, aval if mesh_axis is None else on_mesh(aval), mesh_axis)


def padded(x: Any, rows: int) -> Any:
    """The array with rows of zeros behind its own."""
    if not is_number(x.dtype):  # of which `jnp.pad` has no zeros
        return jnp.concatenate([x, zeros(stacked(mapped_aval(x.shape[0], 0, jax.typeof(x)), rows))])
    return keep_bits(lambda x: jnp.pad(x, [(0, rows), *[(0, 0)] * (x.ndim - 1)]), x)


def put_rows(ys: Any, rows: Any, first: Any) -> Any:
    """The rows `ys` with these in the place of those from `first` on."""
    put = partial(lax.dynamic_update_slice_in_dim, axis=0)
    return on_device(lambda ys, rows: keep_bits(put, ys, rows, jnp.int32(first)), ys, rows)


def num_bytes(avals: Iterable[AbstractValue]) -> int:
    """The size of these arrays together; one with a symbolic dimension (of `jax.export`) counts as large.

    What is chosen by size, a schedule say, is chosen when a loop is traced.
    """
    size = sum(prod(aval.shape) * item_bytes(aval.dtype) for aval in avals)
    return size if isinstance(size, int) else maxsize


def written_out(ct: Any) -> Any:
    """A cotangent with symbolic zeros written out."""
    return zeros(ct.aval) if isinstance(ct, ad.Zero) else ct


def trace(function: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> ClosedJaxpr:
    """A function of flat arrays as a jaxpr without dead code; it keeps all its inputs."""
    arguments = [a if isinstance(a, jax.ShapeDtypeStruct) else strong(a) for a in avals]
    closed = jax.make_jaxpr(function)(*arguments)
    return dce(closed, [True] * len(closed.out_avals), True)[0]


def evaluate(
    closed: ClosedJaxpr,
    inputs: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    context: Callable[[Any], AbstractContextManager[None]] = equation_context,
) -> list[Any]:
    """Evaluate a jaxpr; `equation(eqn, operands)` gives the results of each of its equations, in a context for it."""
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        with context(eqn):
            values.update(zip(eqn.outvars, equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def evaluate_inlined(
    closed: ClosedJaxpr,
    inputs: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    program_of: Callable[[Any], ClosedJaxpr | None],
) -> list[Any]:
    """Evaluate a jaxpr as `evaluate` does, and inline the calls for which `program_of` gives a program."""

    def inline(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        inner = program_of(eqn)
        if inner is None:
            return equation(eqn, operands)
        return evaluate_inlined(inner, operands, equation, program_of)

    return evaluate(closed, inputs, inline)


def bind_again(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, as it stands."""
    outputs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return outputs if eqn.primitive.multiple_results else [outputs]


def inner_programs(eqn: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """The jaxprs in the parameters of an equation, closed or not."""
    return programs_in(tuple(eqn.params.values()))


def programs_in(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """The jaxprs in a parameter of an equation, or in several of them."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif (held := held_program(value)) is not None:
        yield held
    elif isinstance(value, tuple | list):
        yield from chain.from_iterable(map(programs_in, value))


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs in the parameters of an equation, without their constants."""
    return (inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner for inner in inner_programs(eqn))


def num_equations(jaxpr: Any) -> int:
    """How many equations a program has, those of inner programs included."""
    return sum(1 + sum(map(num_equations, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def calls_custom_vjp(jaxpr: Jaxpr) -> bool:
    """Whether a `jax.custom_vjp` is called, by an inner program too."""
    return any(is_custom_vjp(eqn) or any(map(calls_custom_vjp, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


def map_parameter(
    value: Any, function: Callable[[ClosedJaxpr], ClosedJaxpr], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """A parameter of an equation, with `function` of each jaxpr in it; the same object if nothing changes.

    An open jaxpr is closed for `function`. What is no jaxpr is replaced by `other` of it. A tuple or a list that
    `other` leaves as it is keeps its type, and its items are mapped in turn.
    """
    if isinstance(value, ClosedJaxpr):
        return function(value)
    if isinstance(value, Jaxpr):
        return function(ClosedJaxpr(value, ())).jaxpr
    if (held := held_program(value)) is not None:
        new = function(held)
        return value if new is held else with_held_program(value, new)
    new = other(value)
    if new is not value or not isinstance(value, tuple | list):
        return new
    items = [map_parameter(item, function, other) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def map_programs(eqn: Any, function: Callable[[ClosedJaxpr], ClosedJaxpr]) -> Any:
    """An equation with other programs in its parameters. Its effects stay as they are."""
    return eqn.replace(params={name: map_parameter(value, function) for name, value in eqn.params.items()})


def collective_in(jaxpr: Any, axes: frozenset[Any]) -> tuple[str, Any] | None:
    """The name of a primitive in it that communicates over one of these axes, and that axis."""
    for eqn in jaxpr.eqns:
        inner = list(inner_jaxprs(eqn))
        if not inner and not is_axis_index(eqn) and (over := communicates_over(eqn) & axes):
            return collective_name(eqn), min(over, key=str)
        if found := next(filter(None, (collective_in(jaxpr, axes) for jaxpr in inner)), None):
            return found
    return None


def collective_over(program: ClosedJaxpr | Jaxpr, axis_name: Any) -> bool:
    """Whether a jaxpr communicates over this mapped axis, or asks for a lane's place on it; None: it has no name."""
    return axis_name is not None and any(
        axis_name in communicates_over(eqn) or any(collective_over(inner, axis_name) for inner in inner_programs(eqn))
        for eqn in program.eqns
    )


def take_out_places(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr with its own `axis_index`es as first inputs, and their values: a lane's place never changes."""
    eqns = closed.jaxpr.eqns
    places = list(filter(is_axis_index, eqns))
    if not places:
        return closed, []
    invars = [*(eqn.outvars[0] for eqn in places), *closed.jaxpr.invars]
    rest = replace_jaxpr(closed, invars, closed.jaxpr.outvars, [eqn for eqn in eqns if eqn not in places])
    return rest, [jax.lax.axis_index(axis_of_index(eqn)) for eqn in places]


def weakly_cached(function: Callable[..., T]) -> Callable[..., T]:
    """Cache on the first argument's jaxpr, weakly, so that a jaxpr that is no longer used goes away.

    The first argument is a jaxpr, or a NamedTuple whose first field is one. Cached values must not
    hold that jaxpr themselves, or they would keep their own key alive.
    """
    cache: WeakKeyDictionary[ClosedJaxpr, dict[Any, T]] = WeakKeyDictionary()

    @wraps(function)
    def cached(key: Any, *arguments: Any) -> T:
        jaxpr, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        entries = cache.setdefault(jaxpr, {})
        if (rest, arguments) not in entries:
            entries[rest, arguments] = function(key, *arguments)
        return entries[rest, arguments]

    return cached


def forwarded_from(closed: ClosedJaxpr, variable: Any) -> Any:
    """The variable of which this one is a copy, looking through calls without derivatives of their own."""
    for eqn in closed.jaxpr.eqns:
        position = next((i for i, out in enumerate(eqn.outvars) if out is variable), None)
        inner = inlinable(eqn)
        if position is None or inner is None:
            continue
        source = forwarded_from(inner, inner.jaxpr.outvars[position])
        for argument, outer in zip(inner.jaxpr.invars, eqn.invars, strict=True):
            if argument is source:
                return forwarded_from(closed, outer)
    return variable
