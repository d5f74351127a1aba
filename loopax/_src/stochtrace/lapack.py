"""Factorizations under `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import sequential_vmap


def lane_by_lane(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which `jax.vmap` evaluates for one lane after another on a CPU, without derivatives.

    A call of LAPACK for a batch takes a thread of XLA's pool, and waits in it for parts that need threads too. Where a
    program has two such calls that do not depend on each other, both can wait for ever (jaxlib 0.10 on two cores).
    """
    in_turn = sequential_vmap(function)

    def on_any_platform(*operands: Any) -> Any:
        return jax.lax.platform_dependent(*operands, cpu=in_turn, default=function)

    return on_any_platform
