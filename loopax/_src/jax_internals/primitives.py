"""JAX's primitives: their names and parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many constants and leaves of the carry a `lax.scan` has; JAX 0.12 keeps them in trees of its own."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def bind_shard_map(eqn: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
    """A `shard_map` as in this equation, of another function. The name of its axes changed before 0.10."""
    params = eqn.params
    mapped = jax.shard_map(
        lambda *xs: tuple(function(*xs)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*operands)


def bind_checkpoint(eqn: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Sequence[Any]:
    """A `jax.checkpoint` as in this equation, of another function; the primitive's parameters are private."""
    checkpoint = jax.checkpoint(function, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return checkpoint(*operands)
