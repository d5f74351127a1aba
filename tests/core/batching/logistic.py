"""A small loop for many derivatives, and what it gives, in NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np

import loopax as lx

COMPACT = lx.Compact(shrink=2, min_lanes=2)
STEPS = 6
A, X, N = np.linspace(1.1, 3.5, 7), np.linspace(0.2, 0.7, 7), np.array([2, 6, 0, 1, 3, 1, 5])


def logistic(lanes: Any, kind: Any = None, unknown: bool = False) -> Callable[[Any, Any, Any], Any]:
    """`n` steps of x <- a x (1 - x), of which the number is known before they are taken or not."""
    kind = lx.Checkpointed() if kind is None else kind

    def f(a: Any, x: Any, n: Any) -> Any:
        body = lambda x: a * x * (1.0 - x)
        options: Any = {"max_steps": STEPS, "kind": kind, "lanes": lanes}
        if unknown:
            far = lambda c: c[1] < n
            return lx.while_loop(far, lambda c: (body(c[0]), c[1] + 1), (x, 0), **options)[0]
        return lx.fori_loop(0, n, lambda _, x: body(x), x, **options)

    return f


def logistic_expected(a: Any, x: Any, n: Any) -> tuple[Any, tuple[Any, ...], tuple[tuple[Any, ...], ...]]:
    """The results of all lanes, their derivatives with respect to a and x, and their second derivatives."""
    a, y, n = map(np.array, (a, x, n))
    slopes, curvatures = np.stack([0.0 * y, 1.0 + 0.0 * y]), np.zeros((2, 2, *y.shape))
    of_a = np.array([1.0, 0.0]).reshape(2, *(1,) * y.ndim)
    outer = lambda u, v: u[:, None] * v[None]
    for step in range(STEPS):
        mixed = outer(of_a, slopes)
        bent = -2 * a * outer(slopes, slopes) + (1 - 2 * y) * (mixed + mixed.swapaxes(0, 1))
        going = step < n
        curvatures = np.where(going, a * (1 - 2 * y) * curvatures + bent, curvatures)
        slopes = np.where(going, a * (1 - 2 * y) * slopes + of_a * y * (1 - y), slopes)
        y = np.where(going, a * y * (1 - y), y)
    return y, tuple(slopes), tuple(tuple(row) for row in curvatures)
