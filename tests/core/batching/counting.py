"""What the tests of lanes share: lanes one by one, and what a batch evaluates."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def alone(function: Callable[..., Any], *lanes: Any) -> Any:
    """Every lane by itself, one after the other."""
    single = jax.jit(function)
    results = [single(*lane) for lane in zip(*jax.tree.map(np.asarray, lanes), strict=True)]
    return jax.tree.map(lambda *values: np.stack(values), *results)


class LaneCounter:
    """Counts evaluations of a body when the program runs: batched ones, and those of all lanes in them."""

    def __init__(self) -> None:
        """Nothing counted."""
        self.iterations = self.lane_steps = 0

    def __call__(self, x: Any) -> Any:
        """The identity on a scalar, without a derivative."""
        shape = jax.ShapeDtypeStruct((), x.dtype)
        return jax.pure_callback(self._count, shape, jax.lax.stop_gradient(x), vmap_method="expand_dims")

    def _count(self, x: Any) -> Any:
        self.iterations += 1
        self.lane_steps += x.size
        return x

    def of(self, function: Callable[..., Any], *args: Any) -> tuple[int, int]:
        """The iterations and lane-steps of one call."""
        self.iterations = self.lane_steps = 0
        jax.block_until_ready(function(*args))
        return self.iterations, self.lane_steps
