"""Loops that take different numbers of steps on the devices of a `shard_map`.

Nothing in their bodies may communicate: a device that has finished would keep the others waiting for ever. But where a
shared value meets a varying one, JAX marks the shared value as varying (`pvary`). The transpose of this mark is a sum
over the devices, in every step of the backward loop. So

- the inputs of such a loop are marked before the loop, and their cotangents are summed once, after the backward loop;
- marks in the body become local marks, which keep the types. The transpose of a local mark changes the type back, to
  that of a shared value, and sums nothing. Each device works on its own part of a cotangent until the loop has ended.

So types in such a body may say "shared" of values that differ. All results of the loop are typed as varying.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax

from loopax._src import jax_internals as jaxi
from loopax._src.core.jaxpr.dependence import computed, dependence
from loopax._src.core.jaxpr.util import (
    INDEX,
    Mask,
    bind_again,
    collective_over,
    evaluate,
    rewriting,
    stacked,
    trace,
    weakly_cached,
)
from loopax._src.jax_internals import (
    ClosedJaxpr,
    Literal,
    Primitive,
    ad,
    equations_in,
    inner_jaxprs,
    jaxpr_as_fun,
    map_programs,
    programs_in,
)

# Which types the bodies in an equation expect of its operands: (group, expected, given). Only `check_jaxpr` asks, under
# `jax_enable_checks` say.
#
# A rule that mixes up operands, or forgets one, makes an equation that is wrong but can be traced: the types of
# results follow from the bodies alone.
Expected = Iterator[tuple[str, Sequence[Any], Sequence[Any]]]


def rows_expected(group: str, expected: Sequence[Any], given: Sequence[Any], rows: int | None) -> Expected:
    """Arrays with so many rows of these types."""
    yield group, [stacked(aval, rows or 0) for aval in expected], given


def numbers_expected(group: str, given: Sequence[Any], shape: tuple[int, ...] = ()) -> Expected:
    """Numbers of rows, which may vary over the axes of a `shard_map`."""
    number = core.ShapedArray(shape, INDEX.dtype)
    yield group, [jaxi.with_varying_axes(number, jaxi.varying_axes(aval)) for aval in given], given


# NaN for what is not valid.


def nan_if(failed: Any, x: jax.Array) -> jax.Array:
    """NaN in the place of numbers, and of their derivatives, where `failed` is True: one bool, or one for each lane.

    No other NaN is computed on the way: under `jax_debug_nans` that would be an error, though it were not selected.
    """
    failed = jnp.asarray(failed)
    failed = failed.reshape(*failed.shape, *(1,) * (x.ndim - failed.ndim)) if failed.ndim else failed
    nan_or_one = jaxi.convert(lax.sqrt(1 - 2 * failed.astype(jnp.float32)), x.dtype)
    return jnp.where(failed, nan_or_one * x, x)


# The mapped axis of a batching rule: where it stands in operands, and bodies that are mapped over it.


@dataclass(frozen=True)
class Axis:
    """A mapped axis in a form that can key a cache."""

    size: int
    name: Any
    spmd_name: Any
    similar: bool = False  # its lanes take similar numbers of steps
    mesh_axis: Any = None  # the `Explicit` mesh axis along which its lanes are spread

    @classmethod
    def of(cls, data: Any) -> "Axis":
        """What matters of JAX's description of the axis."""
        arguments = jaxi.axis_arguments(data)
        names = arguments["axis_name"], arguments["spmd_axis_name"]
        return cls(arguments["axis_size"], *names, mesh_axis=jaxi.mesh_axis(data))

    def resized(self, size: int, similar: bool = False) -> "Axis":
        """The axis with another number of lanes."""
        return replace(self, size=size, similar=similar)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `jax.vmap`."""
        return {"axis_size": self.size, "axis_name": self.name, "spmd_axis_name": self.spmd_name}


def refuse_gathering(axis: Axis) -> None:
    """Raise where lanes would be gathered that are on several devices, or of which nobody knows how many they are."""
    if (name := axis.mesh_axis) is not None:
        name = name[0] if isinstance(name, tuple) and len(name) == 1 else name
        raise NotImplementedError(
            "the lanes of a loop with lanes='compact' or 'sequential' take different numbers of steps, and are spread "
            f"over the devices along the `Explicit` mesh axis {name!r}. Gathering them would move them between "
            f"devices. Use `loopax.sharded_lanes(f, mesh, {name!r})` in place of `jax.vmap(f)`: each device then runs "
            "a loop of its own. Or leave lanes='lockstep', which asks all devices in every step whether a lane goes on."
        )
    if not isinstance(axis.size, int):
        raise NotImplementedError(
            f"lanes='compact' or 'sequential': the batch has {axis.size} lanes, a symbolic dimension. How these lanes "
            "run is decided when the loop is compiled, so the number of lanes has to be known. Export a fixed size, or "
            "leave lanes='lockstep'."
        )


def fill_axis(axis: Axis, x: Any, dim: Any, to: int = 0) -> Any:
    """With the mapped axis at `to`, also where there was none."""
    if dim is not None:
        return jnp.moveaxis(x, int(dim), to)
    if axis.mesh_axis is not None:
        aval = stacked(jax.typeof(x), axis.size, to, axis.mesh_axis)
        others = [place for place in range(len(aval.shape)) if place != to]
        return jax.lax.broadcast_in_dim(x, aval.shape, others, out_sharding=aval.sharding)
    x = jnp.expand_dims(x, to)
    return jnp.broadcast_to(x, (*x.shape[:to], axis.size, *x.shape[to + 1 :]))


def batch_if_mapped(primitive: Primitive, rule: Callable[..., Any]) -> Callable[..., Any]:
    """The batching rule of a primitive, but for an equation that is the same for all lanes: it stays as it is.

    JAX asks about every equation of a function that is mapped, also where no operand has lanes. Such an equation
    depends on lanes only if a program in it communicates over their axis, or asks for a lane's place on it.
    """

    def batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any) -> Any:
        name, programs = Axis.of(axis_data).name, programs_in(tuple(params.values()))
        if any(d is not None for d in dims) or any(collective_over(program, name) for program in programs):
            return rule(axis_data, operands, dims, **params)
        outputs = primitive.bind(*operands, **params)
        return outputs, [None] * len(outputs) if primitive.multiple_results else None

    return batch


def batch_filled(primitive: Primitive) -> Callable[..., Any]:
    """The batching rule of a primitive whose operands and results have any axes of lanes in front."""

    def batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any) -> Any:
        axis = Axis.of(axis_data)
        results = primitive.bind(*(fill_axis(axis, x, d) for x, d in zip(operands, dims, strict=True)), **params)
        return results, [0] * len(results)

    return batch_if_mapped(primitive, batch)


def without_tangents(primitive: Primitive) -> Callable[..., Any]:
    """The rule for tangents of a primitive whose results, such as limits and flags, have none."""

    def jvp(primals: Sequence[Any], _: Sequence[Any], /, **params: Any) -> Any:
        results = primitive.bind(*primals, **params)
        return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]

    return jvp


def batch_in_front(primitive: Primitive, num_axes: str) -> Callable[..., Any]:
    """The batching rule of a primitive that has a parameter for how many axes of lanes are in front of all operands."""

    def batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any) -> Any:
        axis = Axis.of(axis_data)
        filled = [fill_axis(axis, x, d) for x, d in zip(operands, dims, strict=True)]
        out = primitive.bind(*filled, **{**params, num_axes: params[num_axes] + 1})
        return out, [0] * len(out) if primitive.multiple_results else 0

    return batch_if_mapped(primitive, batch)


def is_batched(dims: Sequence[Any]) -> Mask:
    """Which operands have a mapped axis."""
    return tuple(d is not None for d in dims)


def axes_of(mask: Sequence[bool], axis: int = 0) -> list[int | None]:
    """Arguments for `jax.vmap`: `axis` for those that are batched."""
    return [axis if batched else None for batched in mask]


def lane_avals(avals: Sequence[Any], batched: Sequence[bool], axis: Axis) -> list[Any]:
    """The types of operands for all lanes."""
    return [stacked(a, axis.size, mesh_axis=axis.mesh_axis) if b else a for a, b in zip(avals, batched, strict=True)]


def uniform_body(body: ClosedJaxpr, axis: Axis, inputs: Sequence[bool], outputs: Sequence[bool]) -> ClosedJaxpr:
    """The body for all lanes at once, where all take the same steps."""
    mapped = jax.vmap(jaxpr_as_fun(body), in_axes=(None, *axes_of(inputs)), out_axes=axes_of(outputs), **axis.arguments)
    return trace(mapped, [body.in_avals[0], *lane_avals(body.in_avals[1:], inputs, axis)])


Axes = frozenset[Any]

# The identity, of a type that varies over other axes; nothing is communicated. Its transpose is one as well, but for
# the axes in `summed`, over which it takes the place of a real mark.
retyped_p = Primitive("retyped")


def retyped(x: Any, varying: Axes, summed: Axes = frozenset()) -> Any:
    """An array as it is, typed as varying over these axes and no others."""
    return x if jaxi.varying_axes(x) == varying else retyped_p.bind(x, varying=varying, summed=summed)


def _transpose(ct: Any, x: Any, *, varying: Axes, summed: Axes) -> list[Any]:
    """The cotangent of `x`, typed as `x` is: summed over the axes in `summed`, and as it is over all others.

    The one operand is `x`, in which the identity is linear. A sum over an axis is the transpose of `pvary`.
    """
    del varying
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval)]
    ct = retyped(ct, jaxi.varying_axes(x.aval) | summed)
    return [jax.linear_transpose(lambda x: jaxi.vary(x, summed), x.aval)(ct)[0] if summed else ct]


jaxi.register(
    retyped_p,
    impl=lambda x, **_: x,
    lowering=lambda _, x, **__: [x],
    abstract_eval=lambda x, *, varying, summed: jaxi.with_varying_axes(x, varying),  # noqa: ARG005
    linear_in=[0],
    transpose=_transpose,
    batch_without_axis=lambda operands, dims, **params: (retyped_p.bind(*operands, **params), dims[0]),
)
computed[retyped_p] = lambda _: []


def unvarying(numbers: Any) -> Any:
    """Numbers of rows, typed as if all devices had the same; only where a loop is compiled.

    The body of a loop is traced for a row whose type does not vary.
    """
    return retyped(numbers, frozenset())


def differing(deciding: Sequence[Any]) -> Axes:
    """The mesh axes over which what decides on a number of steps varies; arrays or types."""
    return frozenset().union(*map(jaxi.varying_axes, deciding))


def varying(values: Sequence[Any], axes: Axes) -> list[Any]:
    """The arrays, marked as varying over these axes, too. Undefined primals stay as they are."""
    if not axes:
        return list(values)
    return [x if ad.is_undefined_primal(x) else jaxi.vary(x, axes - jaxi.varying_axes(x)) for x in values]


def trace_carrying(step: Callable[..., list[Any]], row: Any, carry: Sequence[Any], rest: Sequence[Any]) -> ClosedJaxpr:
    """Trace `step(row, *carry, *rest) -> (*carry, *y)`, all given as types.

    The carry varies from the start over the axes over which it comes to vary.
    """

    def as_given(row: Any, *operands: Any) -> list[Any]:
        out = step(row, *operands)
        return [*map(jaxi.vary_like, out[: len(carry)], map(jax.typeof, operands)), *out[len(carry) :]]

    while True:
        closed = trace(as_given, [row, *carry, *rest])
        found = [jaxi.varying_axes(aval) for aval in closed.out_avals[: len(carry)]]
        if found == list(map(jaxi.varying_axes, carry)):
            return closed
        carry = list(map(jaxi.with_varying_axes, carry, found))


@weakly_cached
def localized(body: ClosedJaxpr, axes: Axes) -> ClosedJaxpr | None:
    """A body (row, *operands) for devices that take different numbers of steps; None: this one is.

    All that it takes and returns varies over these axes, and nothing in it communicates over them.
    """
    for eqn in equations_in(body):
        # An equation with programs inside communicates where an equation in these does, which has the name.
        over = jaxi.communicates_over(eqn) & axes
        if over and not jaxi.is_axis_index(eqn) and not any(inner_jaxprs(eqn)):
            name, axis = jaxi.collective_name(eqn), min(over, key=str)
            raise NotImplementedError(
                f"the body of a loop communicates over the axis {axis!r} of a `jax.shard_map` (`{name}`), but the "
                "devices along it take different numbers of steps: one that has finished would keep the others waiting "
                "for ever. Give all of them the same number of steps and mask inside the body, or move the collective "
                "out of the loop. If they do take the same number, say so to JAX: decide on it by what does not vary, "
                f"such as the result of `jax.lax.pmax(..., {axis!r})`."
            )

    @rewriting
    def marked_locally(eqn: Any) -> Any:
        over = jaxi.marked_varying(eqn)
        if not over & axes:
            return map_programs(eqn, marked_locally)
        params = {"varying": jaxi.varying_axes(eqn.outvars[0].aval), "summed": over - axes}
        return eqn.replace(primitive=retyped_p, params=params)

    (row, *avals), marked = body.in_avals, marked_locally(body)
    if all(axes <= jaxi.varying_axes(aval) for aval in (*avals, *body.out_avals)) and marked is body:
        return None
    function = jaxpr_as_fun(marked)

    # Before: (row, *operands, typed as the body has them) -> results, typed as they come
    # After: (row, *operands that vary over the axes) -> results that do
    def step(row: Any, *operands: Any) -> list[Any]:
        given = [retyped(x, jaxi.varying_axes(aval)) for x, aval in zip(operands, avals, strict=True)]
        return [retyped(x, jaxi.varying_axes(x) | axes) for x in function(row, *given)]

    return trace(step, [row, *(jaxi.with_varying_axes(aval, jaxi.varying_axes(aval) | axes) for aval in avals)])


# Where all devices take the same number of steps, shared inputs are marked before the loop, too: else a gradient would
# sum whole cotangents over the devices in every step.


@weakly_cached
def marked_before(closed: ClosedJaxpr, carry: range) -> tuple[ClosedJaxpr, Mask, Axes] | None:
    """The body (row, *operands) of a loop of which some operands vary, which ones, and over which axes.

    None: there are none, or something communicates. The carry, the inputs at these positions, stays as it is, and what
    a shared result or a program inside needs: the first has its whole cotangent on each device, which a sum after the
    loop would count once for each, and the second has marks of its own.
    """
    axes: Axes = frozenset().union(*map(jaxi.marked_varying, closed.eqns))
    communicating = (eqn for eqn in equations_in(closed) if axes and jaxi.communicates_over(eqn) & axes)
    if not axes or not all(map(jaxi.is_axis_index, communicating)):
        return None
    called = lambda eqn: jaxi.called(eqn) if jaxi.is_jit(eqn) else None  # noqa: E731
    body = trace(lambda *inputs: evaluate(closed, inputs, bind_again, inlined=called), closed.in_avals)
    inside = [atom for eqn in body.eqns if any(inner_jaxprs(eqn)) for atom in eqn.invars]
    is_shared = lambda atom: not (isinstance(atom, Literal) or axes <= jaxi.varying_axes(atom.aval))  # noqa: E731
    ends = list(filter(is_shared, [*body.outvars, *inside]))
    fixed = reduce(or_, dependence(jaxi.replace_jaxpr(body, body.invars, ends)), 0)
    shared = [is_shared(v) and jaxi.has_tangents(v.aval) for v in body.invars]
    marked = [m and i not in (0, *carry) and not fixed >> i & 1 for i, m in enumerate(shared)]
    if not any(marked):
        return None

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if over := jaxi.marked_varying(eqn):
            return varying(operands, over)
        if not any(inner_jaxprs(eqn)):  # what meets a value that varies is marked
            operands = varying(operands, differing(operands))
        return bind_again(eqn, operands)

    pairs = zip(body.in_avals, marked, strict=True)
    avals = [jaxi.with_varying_axes(aval, jaxi.varying_axes(aval) | axes) if m else aval for aval, m in pairs]
    return trace(lambda *inputs: evaluate(body, inputs, equation), avals), tuple(marked[1:]), axes
