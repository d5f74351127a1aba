"""A gradient in reverse mode, beside forward mode of the client's own program and beside differences."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Program = Callable[[Any], Any]  # an array -> a scalar


def check_gradient(
    program: Program, at: Any, *, original: Program | None = None, step: float = 1e-5, tolerance: float = 1e-5
) -> None:
    """Compare a value and its gradient.

    `original` is the program as the client has it, without a loop of loopax: the value is that of `original`, and the
    gradient along a random direction is that of forward mode. Differences have this `step`, along this direction, too.
    """
    at = jnp.asarray(at)
    assert at.dtype == jnp.float64
    compiled = jax.jit(jax.value_and_grad(program))
    value, gradient = compiled(at)
    direction = jnp.asarray(np.random.RandomState(0).randn(*at.shape))
    found = jnp.vdot(gradient, direction)
    ahead, behind = (compiled(at + sign * step * direction)[0] for sign in (1, -1))
    np.testing.assert_allclose(found, (ahead - behind) / (2 * step), rtol=tolerance)
    if original is not None:
        pair = jax.jit(lambda x, dx: jax.jvp(original, (x,), (dx,)))(at, direction)
        np.testing.assert_allclose((value, found), pair, rtol=1e-8)
