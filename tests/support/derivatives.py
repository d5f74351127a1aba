"""What the loops of `problem` give, and their first and second derivatives, from one compiled program.

The recurrence as a `lax.scan` over all rows, in which a `where` passes over those that a loop does not take. Which loop
it is, its number of steps and all arrays are arguments: whatever tests ask for, they compile it once.
`test_compositions.py` compares it with Python loops.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support import problem
from tests.support.problem import BOUND, PLAIN, Step, mixed

W: Any = np.asarray(problem.W)
H: Any = np.asarray(problem.H)
XS: Any = np.asarray(problem.XS)
SIZES = (W.size, H.size, XS.size)


class Form(NamedTuple):
    """What distinguishes the loops."""

    reverse: bool = False
    stop: bool = False
    has_rows: bool = False  # which it returns


FORMS = {
    "scan": Form(has_rows=True),
    "rollout": Form(has_rows=True),
    "reverse": Form(has_rows=True, reverse=True),
    "stop": Form(has_rows=True, stop=True),
    "reverse_stop": Form(has_rows=True, reverse=True, stop=True),
    **dict.fromkeys(["while", "fori", *problem.UNBOUNDED], Form()),
}


class Cut(NamedTuple):
    """Where a derivative ends: it is that of the last steps, or of each window of so many."""

    last: int | None = None
    window: int | None = None


def walked(form: Any, step: Step, cut: Cut, total: Any, w: Any, h: Any, xs: Any, n: Any) -> Any:
    """The last carry, and the rows."""

    def body(state: Any, k: Any) -> Any:
        carry, ys, done = state
        row = jnp.clip(jnp.where(form.reverse, n - 1 - k, k), 0, BOUND - 1)
        active, x = (k < n) & ~done, xs[row]
        before = carry
        if cut.window is not None:
            held = (k > 0) & (k % cut.window == 0)
            before = jax.tree.map(lambda leaf: jnp.where(held, lax.stop_gradient(leaf), leaf), carry)
        new = step.take(w, before, x)
        y = step.row(x, new)
        if cut.last is not None:
            held = k < total - cut.last
            new, y = jax.tree.map(lambda leaf: jnp.where(held, lax.stop_gradient(leaf), leaf), (new, y))
        write = lambda row_y, rows: rows.at[row].set(jnp.where(active, row_y, rows[row]))
        done = done | (active & form.stop & step.stop(new, y))
        kept = jax.tree.map(lambda new, old: jnp.where(active, new, old), new, carry)
        return (kept, jax.tree.map(write, y, ys), done), None

    start = step.start(h)
    like = jax.eval_shape(lambda: step.row(xs[0], start))
    ys = jax.tree.map(lambda y: jnp.zeros((BOUND, *y.shape), y.dtype), like)
    start = jax.tree.map(jnp.asarray, start)
    (carry, ys, _), _ = lax.scan(body, (start, ys, jnp.bool_(False)), jnp.arange(BOUND))
    return carry, ys


def steps_taken(form: Any, w: Any, h: Any, xs: Any, n: Any, step: Step = PLAIN, cut: Cut = Cut()) -> Any:  # noqa: B008
    """The scalar that the programs of `problem` return."""
    # The last steps are known when all have been taken.
    total = n if cut.last is None else walked(form, step, Cut(), n, w, h, xs, n)[0][-1]
    (*values, _), ys = walked(form, step, cut, total, w, h, xs, n)
    return mixed((values, jax.tree.map(lambda rows: jnp.where(form.has_rows, rows, 0.0), ys)))


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


def derivatives(loop: str, n: Any, w: Any = W, h: Any = H, xs: Any = XS) -> Derivatives:
    """Of a loop of `problem` with these arguments."""
    found = _derivatives(FORMS[loop], vector(w, h, xs), np.asarray(n, np.int64))
    value, gradient, hessian = map(np.asarray, found)
    w, h, xs = np.split(gradient, np.cumsum(SIZES)[:-1])
    return Derivatives(value, (w.reshape(W.shape), h, xs.reshape(XS.shape)), hessian)
