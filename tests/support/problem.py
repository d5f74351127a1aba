"""One small recurrence in the form of each loop, for the tests of derivatives and transformations.

All take `(w, h, xs, n)`: weights float64[3, 3], a start float64[3], rows float64[11, 3], and a number of
steps; all return a scalar that depends on everything. `BOUND` is 11, so a block has 4 steps; 3 checkpoints
are too few for blocks.
"""

import functools as ft
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import loopax as lx
from tests.support.reference import fori_reference, scan_reference, while_reference

BOUND = 11
W = jnp.asarray(np.random.RandomState(0).randn(3, 3)) * 0.5
H = jnp.array([0.3, -0.2, 0.5])
XS = jnp.asarray(np.random.RandomState(1).randn(BOUND, 3))

KINDS = [lx.Checkpointed(), lx.Checkpointed(3), lx.Bounded(), lx.Residuals()]
WITH_LAX = [*KINDS, lx.Lax()]

Program = Callable[..., Array]


def name_of(value: Any) -> str:
    """A short name for pytest's parameters."""
    if isinstance(value, lx.Kind):
        return type(value).__name__ + str(getattr(value, "checkpoints", None) or "")
    return getattr(value, "__name__", str(value))


def mixed(outputs: Any) -> Array:
    """A scalar that weighs every output differently."""
    return sum(((o**2).sum() * (i + 1.0) for i, o in enumerate(jax.tree.leaves(outputs))), jnp.zeros(()))


def scan_step(w: Array) -> Callable[[Any, Any], Any]:
    """A step with an integer in the carry, and two outputs of which one depends on the row."""

    def step(carry: Any, x: Array) -> Any:
        h, count = carry
        h = jnp.tanh(w @ h + x * jnp.sin(h))
        return (h, count + 1), (h * 2.0, h.sum() * x)

    return step


def scan_program(kind: lx.Kind, reverse: bool = False, stop: Any = None, lanes: Any = "lockstep") -> Program:
    """A scan of n of the rows."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        (h, _), ys = lx.scan(scan_step(w), (h, 0), xs, length=n, reverse=reverse, stop=stop, kind=kind, lanes=lanes)
        return mixed((h, ys))

    return program


def scan_expected(reverse: bool = False, stop: Any = None) -> Program:
    """The same as a Python loop."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        (h, _), ys, _ = scan_reference(scan_step(w), (h, 0), xs, int(n), reverse, stop)
        return mixed((h, ys))

    return program


def below_half(carry: Any, y: Any) -> Array:
    """A condition that stops after a few steps."""
    return (carry[0].sum() < -0.4) & (y[1].sum() < 100)


def while_body(w: Array, xs: Array) -> Callable[[Any], Any]:
    """A step that counts in the carry and gathers its own row."""

    def body(carry: Any) -> Any:
        h, i = carry
        return jnp.tanh(w @ h + xs[i] * jnp.sin(h)), i + 1

    return body


def while_program(kind: lx.Kind, lanes: Any = "lockstep") -> Program:
    """A while loop of n steps."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        h, _ = lx.while_loop(lambda c: c[1] < n, while_body(w, xs), (h, 0), max_steps=BOUND, kind=kind, lanes=lanes)
        return mixed(h)

    return program


def while_expected() -> Program:
    """The same as a Python loop."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        (h, _), _ = while_reference(lambda c: c[1] < n, while_body(w, xs), (h, 0))
        return mixed(h)

    return program


def fori_program(kind: lx.Kind, lanes: Any = "lockstep") -> Program:
    """A for loop from 1 to n + 1 over the rows from the second on."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        body = lambda i, h: while_body(w, xs)((h, i - 1))[0] * 1.1
        return mixed(lx.fori_loop(1, n + 1, body, h, max_steps=BOUND, kind=kind, lanes=lanes))

    return program


def fori_expected() -> Program:
    """The same as a Python loop."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        return mixed(fori_reference(1, int(n) + 1, lambda i, h: while_body(w, xs)((h, i - 1))[0] * 1.1, h))

    return program


LOOPS = {
    "scan": (scan_program, scan_expected()),
    "reverse": (partial(scan_program, reverse=True), scan_expected(reverse=True)),
    "stop": (partial(scan_program, stop=below_half), scan_expected(stop=below_half)),
    "reverse_stop": (
        partial(scan_program, reverse=True, stop=below_half),
        scan_expected(reverse=True, stop=below_half),
    ),
    "while": (while_program, while_expected()),
    "fori": (fori_program, fori_expected()),
}


# What Python loops give is computed once for each loop and number of steps, not again for each kind.


@ft.cache
def expected_gradient(loop: str, n: int) -> Any:
    """The value, and its gradient with respect to weights, start and rows."""
    return jax.value_and_grad(LOOPS[loop][1], (0, 1, 2))(W, H, XS, n)
