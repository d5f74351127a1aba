"""Derivatives of NumPy functions without a compilation: exact to rounding where a function is analytic.

The imaginary part of `f(x + ih)` is `h f'(x)`, to rounding if h is tiny: so Python loops over NumPy arrays, which
define what a loop means, give their gradients too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

TINY = 1e-30
WIDE = 3e-4


def gradient(f: Callable[[Any], Any], x: Any) -> np.ndarray:
    """Of a scalar function of one array."""
    x = np.asarray(x, np.complex128)
    found = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        moved = x.copy()
        moved[place] += TINY * 1j
        found[place] = np.imag(f(moved)) / TINY
    return found


def value_and_gradient(f: Callable[[Any], Any], x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both, as `jax.value_and_grad` returns them."""
    return np.asarray(f(np.asarray(x))), gradient(f, x)


def hessian(f: Callable[[Any], Any], x: Any) -> np.ndarray:
    """Differences of exact gradients, of fourth order: about ten digits."""
    x = np.asarray(x)
    columns = [hessian_product(f, x, unit.reshape(x.shape)) for unit in np.eye(x.size)]
    return np.stack(columns, -1).reshape(x.shape + x.shape)


def hessian_product(f: Callable[[Any], Any], x: Any, direction: Any) -> np.ndarray:
    """The derivative of the gradient in one direction."""
    x, direction = np.asarray(x), np.asarray(direction)
    at = lambda steps: gradient(f, x + steps * WIDE * direction)
    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * WIDE)
