"""What the loops of `problem` give, and their first and second derivatives, from one compiled program.

The recurrence as a `lax.scan` over all rows, in which a `where` passes over those that a loop does not take. Which loop
it is, its number of steps and all arrays are arguments: whatever tests ask for, they compile it once.
`autodiff/test_grad.py` compares it with Python loops.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support import problem
from tests.support.problem import BOUND, mixed

W: Any = np.asarray(problem.W)
H: Any = np.asarray(problem.H)
XS: Any = np.asarray(problem.XS)
SIZES = (W.size, H.size, XS.size)


class Form(NamedTuple):
    """What distinguishes the loops."""

    reverse: bool = False
    stop: bool = False
    has_rows: bool = False  # which it returns
    factor: float = 1.0


FORMS = {
    "scan": Form(has_rows=True),
    "reverse": Form(has_rows=True, reverse=True),
    "stop": Form(has_rows=True, stop=True),
    "reverse_stop": Form(has_rows=True, reverse=True, stop=True),
    "while": Form(),
    "fori": Form(factor=1.1),
}


def steps_taken(form: Any, w: Any, h: Any, xs: Any, n: Any) -> Any:
    """The scalar that the programs of `problem` return."""
    reverse, stop, has_rows, factor = form

    def step(carry: Any, k: Any) -> Any:
        h, ys, done = carry
        row = jnp.where(reverse, n - 1 - k, k)
        active = (k < n) & ~done
        x = xs[jnp.clip(row, 0, BOUND - 1)]
        new = jnp.tanh(w @ h + x * jnp.sin(h)) * factor
        y = (new * 2.0, new.sum() * x)
        keep = active & (jnp.arange(BOUND) == row)[:, None]
        ys = [jnp.where(keep, row, rows) for row, rows in zip(y, ys, strict=True)]
        done = done | (active & stop & (new.sum() < -0.4) & (y[1].sum() < 100))
        return (jnp.where(active, new, h), ys, done), None

    (h, ys, _), _ = lax.scan(step, (h, [jnp.zeros((BOUND, 3))] * 2, False), jnp.arange(BOUND))
    return mixed((h, *[jnp.where(has_rows, rows, 0.0) for rows in ys]))


def parts(flat: Any) -> tuple[Any, Any, Any]:
    """Weights, start and rows from one vector."""
    w, h, xs = jnp.split(flat, np.cumsum(SIZES)[:-1])
    return w.reshape(W.shape), h, xs.reshape(XS.shape)


def vector(w: Any, h: Any, xs: Any) -> Any:
    """And back."""
    return np.concatenate([np.ravel(w), np.ravel(h), np.ravel(xs)])


@jax.jit
def _derivatives(form: Any, flat: Any, n: Any) -> Any:
    f = lambda flat: steps_taken(form, *parts(flat), n)
    value, gradient = jax.value_and_grad(f)(flat)
    return value, gradient, jax.hessian(f)(flat)


class Derivatives(NamedTuple):
    """Of one loop, as NumPy arrays."""

    value: Any
    gradient: Any  # with respect to weights, start and rows
    flat_hessian: Any  # with respect to all of them, in one vector

    @property
    def of_start(self) -> Any:
        """The gradient with respect to the start."""
        return self.gradient[1]

    @property
    def hessian(self) -> Any:
        """With respect to the start."""
        start = slice(SIZES[0], SIZES[0] + SIZES[1])
        return self.flat_hessian[start, start]

    def along(self, w: Any, h: Any, xs: Any) -> Any:
        """The derivative in a direction."""
        return np.asarray(sum((np.vdot(g, d) for g, d in zip(self.gradient, (w, h, xs), strict=True))))


def derivatives(loop: str, n: Any, w: Any = W, h: Any = H, xs: Any = XS) -> Derivatives:
    """Of a loop of `problem` with these arguments."""
    found = _derivatives(FORMS[loop], vector(w, h, xs), np.asarray(n, np.int64))
    value, gradient, hessian = map(np.asarray, found)
    w, h, xs = np.split(gradient, np.cumsum(SIZES)[:-1])
    return Derivatives(value, (w.reshape(W.shape), h, xs.reshape(XS.shape)), hessian)
