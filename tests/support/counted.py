"""How often a step is evaluated, replays and derivatives included."""

from collections.abc import Callable
from typing import Any

import jax


def counting(count: Callable[[], None], x: Any) -> Any:
    """`x`, where `count` is called each time that the program computes it. It is no effect: replays repeat it."""

    @jax.custom_jvp
    def counted(x: Any) -> Any:
        return jax.pure_callback(call, x, x, vmap_method="sequential")

    def call(x: Any) -> Any:
        count()
        return x

    counted.defjvp(lambda primals, dots: (counted(*primals), dots[0]))
    return counted(x)


def evaluations(run: Callable[..., Any], *args: Any) -> int:
    """How often `run(count, *args)` calls `count`."""
    calls: list[int] = []
    jax.block_until_ready(run(lambda: calls.append(1), *args))
    jax.effects_barrier()
    return len(calls)
