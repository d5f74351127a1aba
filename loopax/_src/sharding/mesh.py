"""The devices along one axis of a mesh: what is spread over them, and what each of them runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from loopax._src.core.batching.groups import take


@dataclass(frozen=True)
class Devices:
    """One axis of a mesh."""

    mesh: Mesh
    axis: str

    @property
    def number(self) -> int:
        """How many devices share the lanes."""
        return self.mesh.shape[self.axis]

    def with_shardings_of(self, arrays: Sequence[Any]) -> "Devices":
        """These devices, on a mesh whose axes are `Auto` unless the arrays or the mesh in force have other types.

        Types with shardings on a mesh that is not in force cannot leave `jit`.
        """
        in_force = jax.sharding.get_abstract_mesh()
        if AxisType.Manual in in_force.axis_types:
            # Within a `shard_map`, lanes are spread over one of the axes that it leaves.
            types = dict(zip(in_force.axis_names, in_force.axis_types, strict=True))
            left = [name for name, axis_type in types.items() if axis_type != AxisType.Manual]
            if self.axis in left:
                return replace(self, mesh=in_force)
            names = ", ".join(map(repr, left)) or "none"
            raise ValueError(
                f"sharded_lanes(axis={self.axis!r}) is called within a `jax.shard_map` that leaves it no such axis. "
                f"Axes that are left: {names}. Name fewer axes in its `axis_names`, or use `jax.vmap` there: each "
                "device runs its own loop."
            )
        meshes = [in_force, *(jax.typeof(x).sharding.mesh for x in arrays)]
        if any(AxisType.Explicit in mesh.axis_types for mesh in meshes if not mesh.empty):
            return self
        decided = (AxisType.Auto,) * len(self.mesh.axis_names)
        return replace(self, mesh=Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=decided))

    def map(self, function: Callable[..., Any], axes: Sequence[int | None]) -> Callable[..., Any]:
        """Run a function on each device for its part of the arguments; results have their parts first.

        Nothing that is the same everywhere is marked as such (`check_vma=False`): what all lanes share is then copied
        to each device before its loops, and cotangents are summed behind them. Marked, it would be copied where a loop
        uses it, and its cotangents summed there, in each step.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(PartitionSpec() if at is None else PartitionSpec(*(None,) * at, self.axis) for at in axes),
            out_specs=PartitionSpec(self.axis),
            axis_names={self.axis},
            check_vma=False,
        )

    def spread(self, x: Any, at: int | None) -> Any:
        """An argument of `map` with lanes at this axis, or none. Where JAX decides on shardings, it does so itself."""
        return jax.reshard(x, self._sharding_like(x, at)) if self._is_explicit else x

    def known_everywhere(self, x: Any) -> Any:
        """A copy on each device of what is traced."""
        if not isinstance(x, Tracer):
            return x
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.reshard(x, sharding) if self._is_explicit else lax.with_sharding_constraint(x, sharding)

    def take(self, x: Any, order: Any, at: int | None) -> Any:
        """Lanes in this order, spread over the devices where these divide their number."""
        if at is None:
            return self.spread(x, None)
        sharding = self._sharding_like(x, at, divided=len(order) % self.number == 0)
        if self._is_explicit:  # `out_sharding` would do, but not in a derivative: JAX's transpose raises
            whole = jax.reshard(x, self._sharding_like(x, at, divided=False))
            return jax.reshard(take(whole, at, order, unique=False), sharding)
        return lax.with_sharding_constraint(take(x, at, order, unique=False), sharding)

    @property
    def _is_explicit(self) -> bool:
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return types[self.axis] == AxisType.Explicit

    def _sharding_like(self, x: Any, at: int | None, divided: bool = True) -> NamedSharding:
        """Lanes, at axis `at`, divided among the devices or not; other axes of the array as they are."""
        if self._is_explicit:
            spec = jax.typeof(x).sharding.spec
            others = [_without(self.axis, entry) for entry in (*spec, *(None,) * (x.ndim - len(spec)))]
        else:
            others = [PartitionSpec.UNCONSTRAINED] * x.ndim
        if at is not None:
            others[at] = self.axis if divided else None
        return NamedSharding(self.mesh, PartitionSpec(*others))


def _without(axis: str, entry: Any) -> Any:
    """What is left of an entry of a PartitionSpec: None, the name of an axis, or several."""
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name != axis) or None
    return None if entry == axis else entry
