"""Random vectors with the identity as their second moment: E[w w^H] = I."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int

from loopax._src.pytrees.leaves import describe

Probes = Literal["rademacher", "normal", "sphere"]


def draw(probes: Probes, key: Array, numbers: Int[Array, " k"], size: int, dtype: Any) -> Inexact[Array, "k n"]:
    """The probes of these numbers, one a row; the same number is the same probe, however many are drawn at once."""
    return jax.vmap(lambda number: _SAMPLERS[probes](jax.random.fold_in(key, number), size, dtype))(numbers)


def check_probes(what: str, probes: Any) -> None:
    """An error for what is not the name of a distribution."""
    if probes not in get_args(Probes):
        choices = ", ".join(repr(name) for name in get_args(Probes))
        raise ValueError(f"{what}: got {describe(probes)}, expected one of {choices}.")


def is_rotation_invariant(probes: Probes) -> bool:
    """Whether the distribution looks the same from every direction."""
    return probes != "rademacher"


def _rademacher(key: Array, size: int, dtype: Any) -> Array:
    """Signs; for complex dtypes numbers of modulus one (Steinhaus), whose estimates vary half as much."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        angle = jax.random.uniform(key, (size,), jnp.finfo(dtype).dtype, maxval=2 * jnp.pi)
        return jax.lax.complex(jnp.cos(angle), jnp.sin(angle)).astype(dtype)
    words = jax.random.bits(key, (-(-size // 32),), jnp.uint32)  # 32 signs from each, as drawing words is what costs
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None]) & jnp.uint32(1)
    return 1 - 2 * bits.reshape(-1)[:size].astype(dtype)


def _normal(key: Array, size: int, dtype: Any) -> Array:
    return jax.random.normal(key, (size,), dtype)


def _sphere(key: Array, size: int, dtype: Any) -> Array:
    """Uniform on the sphere of radius sqrt(size)."""
    direction = _normal(key, size, dtype)
    return direction * (jnp.sqrt(size) / jnp.linalg.norm(direction)).astype(dtype)


_SAMPLERS: dict[str, Callable[[Array, int, Any], Array]] = {
    "rademacher": _rademacher,
    "normal": _normal,
    "sphere": _sphere,
}
