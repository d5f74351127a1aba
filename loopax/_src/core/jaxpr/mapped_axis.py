"""The mapped axis of a batching rule: where it stands in operands, and bodies that are mapped over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from loopax._src.core.jaxpr.util import Mask, collective_over, programs_in, stacked, trace
from loopax._src.jax_internals import ClosedJaxpr, Primitive, axis_arguments, jaxpr_as_fun, mesh_axis
from loopax._src.messages import sharded_lanes_message


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
        arguments = axis_arguments(data)
        names = arguments["axis_name"], arguments["spmd_axis_name"]
        return cls(arguments["axis_size"], *names, mesh_axis=mesh_axis(data))

    def resized(self, size: int, similar: bool = False) -> "Axis":
        """The axis with another number of lanes."""
        return replace(self, size=size, similar=similar)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `jax.vmap`."""
        return {"axis_size": self.size, "axis_name": self.name, "spmd_axis_name": self.spmd_name}


def refuse_sharded_lanes(axis: Axis) -> None:
    """Raise where lanes would be gathered that are on several devices of an `Explicit` mesh."""
    if axis.mesh_axis is not None:
        raise NotImplementedError(sharded_lanes_message(axis.mesh_axis))


def move(x: Any, dim: Any, to: int) -> Any:
    """An operand with its mapped axis, if it has one, at `to`."""
    return x if dim is None else jnp.moveaxis(x, int(dim), to)


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
