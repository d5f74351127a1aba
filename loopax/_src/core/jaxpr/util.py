"""Small tools for jaxprs: trace, prune, look through, split lists of operands."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from itertools import accumulate, pairwise
from math import prod
from sys import maxsize
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax

from loopax._src import jax_internals as jaxi
from loopax._src.jax_internals import ClosedJaxpr, Literal, ad, equations_in, jaxpr_as_fun, map_programs
from loopax._src.settings import settings

T = TypeVar("T")
Mask = tuple[bool, ...]

INDEX = jax.ShapeDtypeStruct((), jnp.int32)  # the type of row numbers and step counts
MOST_STEPS = 2**31 - 1  # the largest; the count of a loop without a bound stays there


def split_list(items: Iterable[T], sizes: Sequence[int]) -> list[list[T]]:
    """Cut a list into pieces of these sizes, and a last piece of what remains."""
    items = list(items)
    return [items[start:end] for start, end in pairwise([0, *accumulate(sizes), len(items)])]


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

    def of_some(*selected: Any) -> Any:
        given = iter(selected)
        return function(*(next(given) if chosen else value for chosen, value in zip(mask, values, strict=True)))

    return of_some


def invert(mask: Sequence[bool]) -> Mask:
    """Not, elementwise."""
    return tuple(not chosen for chosen in mask)


def either(a: Sequence[bool], b: Sequence[bool]) -> Mask:
    """Or, elementwise."""
    return tuple(x or y for x, y in zip(a, b, strict=True))


def stacked(aval: jaxi.AbstractValue, rows: int, axis: int = 0, mesh_axis: Any = None) -> jaxi.AbstractValue:
    """The type of `rows` such arrays stacked along a new axis, which may be spread along one of a mesh."""
    return jaxi.unmapped_aval(rows, axis, aval if mesh_axis is None else jaxi.on_mesh(aval), mesh_axis)


def padded(x: Any, rows: int) -> Any:
    """The array with rows of zeros behind its own."""
    if not jaxi.is_number(x.dtype):  # of which `jnp.pad` has no zeros
        return jnp.concatenate([x, jaxi.zeros(stacked(jaxi.mapped_aval(x.shape[0], 0, jax.typeof(x)), rows))])
    return jaxi.keep_bits(lambda x: jnp.pad(x, [(0, rows), *[(0, 0)] * (x.ndim - 1)]), x)


def put_rows(ys: Any, rows: Any, first: Any) -> Any:
    """The rows `ys` with these in the place of those from `first` on."""
    put = partial(lax.dynamic_update_slice_in_dim, axis=0)
    return jaxi.on_device(lambda ys, rows: jaxi.keep_bits(put, ys, rows, jnp.int32(first)), ys, rows)


def num_bytes(avals: Iterable[jaxi.AbstractValue]) -> int:
    """The size of these arrays together; one with a symbolic dimension (of `jax.export`) counts as large.

    What is chosen by size, a schedule say, is chosen when a loop is traced.
    """
    size = sum(prod(aval.shape) * jaxi.item_bytes(aval.dtype) for aval in avals)
    return size if isinstance(size, int) else maxsize


def written_out(ct: Any) -> Any:
    """A cotangent with symbolic zeros written out."""
    return jaxi.zeros(ct.aval) if isinstance(ct, ad.Zero) else ct


def trace(function: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> ClosedJaxpr:
    """A function of flat arrays as a jaxpr without dead code; it keeps all its inputs."""
    arguments = [a if isinstance(a, jax.ShapeDtypeStruct) else jaxi.strong(a) for a in avals]
    closed = jax.make_jaxpr(function)(*arguments)
    return jaxi.dce(closed, [True] * len(closed.out_avals), True)[0]


def evaluate(
    closed: ClosedJaxpr,
    inputs: Sequence[Any],
    equation: Callable[[Any, list[Any]], Sequence[Any]],
    context: Callable[[Any], AbstractContextManager[None]] = jaxi.equation_context,
    inlined: Callable[[Any], ClosedJaxpr | None] = lambda _: None,
) -> list[Any]:
    """Evaluate a jaxpr; `equation(eqn, operands)` gives the results of each of its equations, in a context for it.

    A call for which `inlined` gives a program is evaluated equation by equation, too.
    """
    values: dict[Any, Any] = jaxi.constants_of(closed)
    values.update(zip(closed.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.eqns:
        with context(eqn):
            operands, program = [read(atom) for atom in eqn.invars], inlined(eqn)
            results = evaluate(program, operands, equation, context, inlined) if program else equation(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.outvars]


def bind_again(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, as it stands."""
    outputs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return outputs if eqn.primitive.multiple_results else [outputs]


def calls_custom_vjp(jaxpr: ClosedJaxpr) -> bool:
    """Whether a `jax.custom_vjp` is called, by an inner program too."""
    return any(map(jaxi.is_custom_vjp, equations_in(jaxpr)))


def collective_over(program: ClosedJaxpr, axis_name: Any) -> bool:
    """Whether a jaxpr communicates over this mapped axis, or asks for a lane's place on it; None: it has no name."""
    return axis_name is not None and any(axis_name in jaxi.communicates_over(eqn) for eqn in equations_in(program))


def refuse_collectives(program: ClosedJaxpr, axis_name: Any, why: str = "") -> None:
    """Raise where lanes that take different numbers of steps, or take them at other times, communicate."""
    why = why or (
        "its lanes take different numbers of steps: a lane that has finished has nothing to contribute. Give all lanes "
        "the same number of steps (which finite= does not) and mask inside the body"
    )
    if collective_over(program, axis_name):
        raise NotImplementedError(
            f"the body of a loop communicates over the mapped axis {axis_name!r} (`jax.lax.psum` or the like), but "
            f"{why}, or move the collective out of the loop. A lane's own place (`jax.lax.axis_index`) can be taken in "
            "the body itself, but not in a `jit` or `cond` there."
        )


def take_out_places(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr with its own `axis_index`es as first inputs, and their values: a lane's place never changes."""
    places = list(filter(jaxi.is_axis_index, closed.eqns))
    if not places:
        return closed, []
    invars = [*(eqn.outvars[0] for eqn in places), *closed.invars]
    rest = jaxi.replace_jaxpr(
        closed, invars, closed.outvars, [eqn for eqn in closed.eqns if not jaxi.is_axis_index(eqn)]
    )
    return rest, [lax.axis_index(jaxi.axis_of_index(eqn)) for eqn in places]


def weakly_cached(function: Callable[..., T]) -> Callable[..., T]:
    """Cache on the first argument's jaxpr, weakly, so that a jaxpr that is no longer used goes away.

    The first argument is a jaxpr, or a NamedTuple whose first field is one. Cached values must not
    hold that jaxpr themselves, or they would keep their own key alive. What is computed under a mesh or a setting of
    JAX is not for others.
    """
    cache: WeakKeyDictionary[ClosedJaxpr, dict[Any, T]] = WeakKeyDictionary()

    @wraps(function)
    def cached(key: Any, *arguments: Any) -> T:
        jaxpr, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        entries, place = cache.setdefault(jaxpr, {}), (rest, arguments, settings(), jaxi.trace_context())
        if place not in entries:
            entries[place] = function(key, *arguments)
        return entries[place]

    return cached


def rewriting(equation: Callable[[Any], Any]) -> Callable[[ClosedJaxpr], ClosedJaxpr]:
    """Make a function of programs, in which each equation is rewritten; itself where none changes."""

    @weakly_cached
    def new(closed: ClosedJaxpr) -> ClosedJaxpr | None:
        eqns = list(map(equation, closed.eqns))
        same = all(new is old for new, old in zip(eqns, closed.eqns, strict=True))
        return None if same else jaxi.replace_jaxpr(closed, eqns=eqns)

    return lambda closed: new(closed) or closed


@rewriting
def given_once(eqn: Any) -> Any:
    """A branch that is given each value once: `lax.cond(p, x, f, x, g)` gives `x` twice, and each branch knows one."""
    new = map_programs(eqn, given_once)
    if not jaxi.is_cond(eqn):
        return new
    index, *atoms = eqn.invars
    values = {id(atom): atom for atom in atoms}
    if len(values) == len(atoms):
        return new
    places, avals = {key: i for i, key in enumerate(values)}, [atom.aval for atom in values.values()]

    def once(branch: ClosedJaxpr) -> ClosedJaxpr:
        return trace(lambda *given: jaxpr_as_fun(branch)(*(given[places[id(atom)]] for atom in atoms)), avals)

    params = {**new.params, "branches": tuple(map(once, jaxi.branches(new)))}
    return new.replace(invars=[index, *values.values()], params=params)


@weakly_cached
def makers(closed: ClosedJaxpr) -> dict[Any, tuple[Any, int]]:
    """The equation of which each variable is a result, and which one."""
    return {variable: (eqn, i) for eqn in closed.eqns for i, variable in enumerate(eqn.outvars)}


def forwarded_from(closed: ClosedJaxpr, variable: Any) -> Any:
    """The variable of which this one is a copy, looking through calls without derivatives of their own."""
    if isinstance(variable, Literal) or variable not in makers(closed):
        return variable
    eqn, position = makers(closed)[variable]
    inner = jaxi.inlinable(eqn)
    if inner is not None:
        source = forwarded_from(inner, inner.outvars[position])
        for argument, outer in zip(inner.invars, eqn.invars, strict=True):
            if argument is source:
                return forwarded_from(closed, outer)
    return variable


# Leaves in named groups, in place of offsets into a flat list.
#
# JAX hands a rule its operands as one flat list. A rule puts them into a NamedTuple with a sequence for each group,
# and whatever belongs to each operand (its type, its tangent, whether it is known) into another one of the same
# class. These functions work on all groups at once.

Groups = TypeVar("Groups", bound=tuple[Sequence[Any], ...])


def flatten(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """The leaves of all groups in one list."""
    return [leaf for group in groups for leaf in group]


def unflatten(groups: Groups, leaves: Iterable[Any]) -> Groups:
    """The inverse of `flatten`: leaves in groups as long as those given."""
    leaves = list(leaves)
    assert len(leaves) == sum(map(len, groups))
    rest = iter(leaves)
    return type(groups)(*([next(rest) for _ in group] for group in groups))


def grouped(cls: type[Groups], leaves: Iterable[Any], *sizes: int) -> Groups:
    """Leaves of a flat list in the groups of a class: as many in each as the sizes say, the rest in the last."""
    return cls(*split_list(leaves, sizes))


def map_leaves(function: Callable[..., Any], groups: Groups, *others: Groups) -> Groups:
    """Apply a function to each leaf, with those at its place in others. Groups are tuples then: masks are hashable."""
    return type(groups)(*(tuple(map(function, *group)) for group in zip(groups, *others, strict=True)))


def select_each(masks: Groups, groups: Groups) -> Groups:
    """Of each group, the leaves whose mask is True."""
    return type(groups)(*map(select, masks, groups))


def reject_each(masks: Groups, groups: Groups) -> Groups:
    """Of each group, the leaves whose mask is False."""
    return type(groups)(*map(reject, masks, groups))


def merge_each(masks: Groups, false: Groups, true: Groups) -> Groups:
    """The inverse of `reject_each` and `select_each`."""
    return type(false)(*map(merge_lists, masks, false, true))


def fill_each(masks: Groups, false: Any, true: Groups) -> Groups:
    """Like `merge_each`, with one value for all leaves whose mask is False."""
    return merge_each(masks, type(masks)(*([false] * mask.count(False) for mask in masks)), true)


def append_each(groups: Groups, more: Groups) -> Groups:
    """Each group with the leaves of another one behind its own."""
    return type(groups)(*([*group, *others] for group, others in zip(groups, more, strict=True)))
