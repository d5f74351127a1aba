"""The mapped axis of a batching rule: where it stands in operands, and bodies that are mapped over it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopax._compat import ClosedJaxpr, axis_arguments, jaxpr_as_fun
from loopax.core.jaxprs import Mask, stacked, trace


class Axis:
    """A mapped axis in a form that can key a cache."""

    def __init__(self, data: Any) -> None:
        """Take what matters from JAX's description of the axis."""
        self.arguments = axis_arguments(data)
        self.size: int = self.arguments["axis_size"]
        self._key = tuple(self.arguments.items())

    def __hash__(self) -> int:
        """By value."""
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        """By value."""
        return isinstance(other, Axis) and self._key == other._key


def move(x: Any, dim: Any, to: int) -> Any:
    """An operand with its mapped axis, if it has one, at `to`."""
    return x if dim is None else jnp.moveaxis(x, int(dim), to)


def fill_axis(axis: Axis, x: Any, dim: Any, to: int = 0) -> Any:
    """With the mapped axis at `to`, also where there was none."""
    if dim is not None:
        return jnp.moveaxis(x, int(dim), to)
    x = jnp.expand_dims(x, to)
    return jnp.broadcast_to(x, (*x.shape[:to], axis.size, *x.shape[to + 1 :]))


def is_batched(dims: Sequence[Any]) -> Mask:
    """Which operands have a mapped axis."""
    return tuple(d is not None for d in dims)


def axes_of(mask: Sequence[bool], axis: int = 0) -> list[int | None]:
    """Arguments for `jax.vmap`: `axis` for those that are batched."""
    return [axis if batched else None for batched in mask]


def lane_avals(avals: Sequence[Any], batched: Sequence[bool], axis: Axis) -> list[Any]:
    """The types of operands for all lanes."""
    return [stacked(a, axis.size) if b else a for a, b in zip(avals, batched, strict=True)]


def uniform_body(body: ClosedJaxpr, axis: Axis, inputs: Sequence[bool], outputs: Sequence[bool]) -> ClosedJaxpr:
    """The body for all lanes at once, where all take the same steps."""
    mapped = jax.vmap(jaxpr_as_fun(body), in_axes=(None, *axes_of(inputs)), out_axes=axes_of(outputs), **axis.arguments)
    return trace(mapped, [body.in_avals[0], *lane_avals(body.in_avals[1:], inputs, axis)])
