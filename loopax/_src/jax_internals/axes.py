"""Mapped axes, of `jax.vmap` and of `shard_map`: what they are called, and what communicates over them."""

from collections.abc import Sequence
from typing import Any

from jax._src import core as _core
from jax._src.interpreters import batching as _batching
from jax.extend.core import ClosedJaxpr


def axis_arguments(axis_data: Any) -> dict[str, Any]:
    """Arguments that make `jax.vmap` map over the axis of a batching rule (its fields are private)."""
    name = axis_data.name
    named = name is not None and type(name) is not object and "NoAxisName" not in type(name).__name__
    return {
        "axis_size": axis_data.size,
        "axis_name": name if named else None,
        "spmd_axis_name": axis_data.spmd_name,
    }


def mesh_axis(axis_data: Any) -> Any:
    """The `Explicit` mesh axis along which lanes are spread; None: they are not. Its name is not public."""
    return axis_data.explicit_mesh_axis


def communicates_over(eqn: Any) -> frozenset[Any]:
    """The mapped axes, also of a `shard_map`, over which an equation communicates (`NamedAxisEffect` is not public)."""
    axes = {e.name for e in eqn.effects if isinstance(e, _core.NamedAxisEffect)}
    if eqn.primitive.name in ("ppermute", "pbroadcast"):  # before JAX 0.12 they say so in their parameters only
        names = eqn.params["axis_name"]
        axes.update(names if isinstance(names, tuple | list) else [names])
    return frozenset(axes)


def batched_outputs(closed: ClosedJaxpr, axis_data: Any, batched: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr are batched, exactly; the public `jax.vmap` wants to be told."""
    return list(_batching.batch_jaxpr(closed, axis_data, list(batched), False)[1])
