"""Count how often a body is evaluated, for benchmarks and tests."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class Counter:
    """Counts evaluations of a body when the program runs, also in replays and derivatives.

    A `pure_callback` in the primal part of a step is called whenever that part is evaluated.
    """

    def __init__(self) -> None:
        """Nothing counted."""
        self.calls = 0

    def __call__(self, x: Any) -> Any:
        """The identity."""

        @jax.custom_jvp
        def counted(x: Any) -> Any:
            return jax.pure_callback(self._count, jax.ShapeDtypeStruct((), x.dtype), x, vmap_method="expand_dims")

        @counted.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            value = counted(primals[0])
            return value, tangents[0] * jnp.cos(value)

        return counted(x)

    def _count(self, x: Any) -> Any:
        self.calls += 1
        return x

    def of(self, function: Callable[..., Any], *args: Any) -> int:
        """The evaluations in one call."""
        self.calls = 0
        jax.block_until_ready(function(*args))
        return self.calls
