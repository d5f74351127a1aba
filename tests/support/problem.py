"""One small recurrence in the form of each loop, for the tests of derivatives and transformations.

All take `(w, h, xs, n)`: weights float64[3, 3], a start float64[3], rows float64[11, 3], and a number of
steps; all return a scalar that depends on everything. `BOUND` is 11, so a block has 4 steps; 3 checkpoints
are too few for blocks. What they give is in `derivatives`, from one `lax.scan`; Python loops here give it, too.
"""

import functools as ft
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
Make = Callable[[Callable[..., Any], Callable[..., Any]], lx.Kind]  # from an inverse, and from what a step loses


def argument_of(choice: Any) -> dict[str, Any]:
    """The argument of a loop: a kind, or a derivative."""
    return {"derivative" if isinstance(choice, lx.Derivative) else "kind": choice}


def name_of(value: Any) -> str:
    """A short name for pytest's parameters."""
    if isinstance(value, lx.Kind):
        return type(value).__name__ + str(getattr(value, "checkpoints", None) or "")
    return getattr(value, "__name__", str(value))


def mixed(outputs: Any) -> Array:
    """A scalar that weighs every output differently."""
    return sum(((o**2).sum() * (i + 1.0) for i, o in enumerate(jax.tree.leaves(outputs))), jnp.zeros(()))


# ---- steps


class Step(NamedTuple):
    """A step, whose carry ends with the number of steps so far."""

    start: Callable[[Array], Any]  # the first carry, from h
    take: Callable[[Array, Any, Any], Any]  # (w, carry, x) -> carry
    row: Callable[[Any, Any], Any]  # (x, carry after the step) -> the row of outputs, of which one depends on x
    stop: Callable[[Any, Any], Array]  # (carry, row) -> after a few steps
    back: Any = None  # (w, carry after the step, x, what it has lost) -> carry
    lost: Any = None  # carry before a step -> what the step loses of it


def plain(w: Array, c: Any, x: Any) -> Any:
    h, count = c
    return jnp.tanh(w @ h + x * jnp.sin(h)), count + 1


def below_half(c: Any, y: Any) -> Array:
    return (c[0].sum() < -0.4) & (y[1].sum() < 100)


PLAIN = Step(lambda h: (h, 0), plain, lambda x, c: (c[0] * 2.0, c[0].sum() * x), below_half)


def in_halves(w: Array, c: Any, x: Any) -> Any:
    """Each half changes one part of the carry by a function of the other, so that it can be undone."""
    p, q, count = c
    p = p + jnp.sin(w @ q + x)
    return p, 1.1 * q - jnp.tanh(p), count + 1


def halves_back(w: Array, c: Any, x: Any, row: Any = None) -> Any:
    """The inverse. It is given what `lossy` loses."""
    p, q, count = c
    q = (q + jnp.tanh(p)) / 1.1
    q = q if row is None else q.at[0].set(row["q"])
    return p - jnp.sin(w @ q + x), q, count - 1 if row is None else row["count"]


def lossy(w: Array, c: Any, x: Any) -> Any:
    """The first element of q is lost."""
    p, q, count = in_halves(w, c, x)
    return p, q.at[0].set(0.2 * jnp.cos(p[0])), count


HALVES = Step(
    start=lambda h: (h, 2.0 * h, 0),
    take=in_halves,
    row=lambda x, c: (c[0] * x, c[1].sum()),
    stop=lambda c, y: abs(c[0]).max() >= 2.4,
    back=halves_back,
    lost=lambda before: {"q": before[1][0], "count": before[2]},
)
LOSSY = HALVES._replace(take=lossy)


def scan_step(w: Array) -> Callable[[Any, Any], Any]:
    """The plain step, for `scan`."""

    def step(carry: Any, x: Array) -> Any:
        carry = plain(w, carry, x)
        return carry, PLAIN.row(x, carry)

    return step


def while_body(w: Array, xs: Array) -> Callable[[Any], Any]:
    """The plain step, which gathers its own row."""
    return lambda carry: plain(w, carry, xs[carry[1]])


# ---- loops


def kind_of(kind: lx.Kind | Make, inverse: Any, record: Any) -> lx.Kind:
    return kind if isinstance(kind, lx.Kind) else kind(inverse, record)


def scan_program(kind: Any, reverse: bool = False, stop: bool = False, step: Step = PLAIN, **options: Any) -> Program:
    """A scan of n of the rows."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        f = lambda c, x: (new := step.take(w, c, x), step.row(x, new))
        own = kind_of(kind, lambda c, x, *row: step.back(w, c, x, *row), lambda before, after, x: step.lost(before))
        given = {"reverse": reverse, "stop": step.stop if stop else None, **options}
        (*values, _), ys = lx.scan(f, step.start(h), xs, length=n, kind=own, **given)
        return mixed((values, ys))

    return program


def rollout_program(kind: Any, step: Step = PLAIN, **options: Any) -> Program:
    """A rollout over n of the rows, which is a scan with a state and outputs."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        f = lambda c, x: (new := step.take(w, c, x), step.row(x, new))
        own = kind_of(kind, lambda c, x, *row: step.back(w, c, x, *row), lambda before, after, x: step.lost(before))
        done = lx.rollout(f, step.start(h), n, inputs=xs, kind=own, **options)
        return mixed((done.state[:-1], done.outputs))

    return program


def while_program(kind: Any, step: Step = PLAIN, max_steps: int | None = BOUND, **options: Any) -> Program:
    """A while loop of n steps."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        back = lambda c, *row: step.back(w, c, xs[c[-1] - 1], *row)
        own = kind_of(kind, back, lambda before, after: step.lost(before))
        given = {"max_steps": max_steps, "kind": own, **options}
        body = lambda c: step.take(w, c, xs[c[-1]])
        return mixed(lx.while_loop(lambda c: c[-1] < n, body, step.start(h), **given)[:-1])

    return program


def fori_program(kind: Any, step: Step = PLAIN, max_steps: int | None = BOUND, **options: Any) -> Program:
    """A for loop from 1 to n + 1."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        back = lambda i, c, *row: step.back(w, c, xs[i - 1], *row)
        own = kind_of(kind, back, lambda i, before, after: step.lost(before))
        given = {"max_steps": max_steps, "kind": own, **options}
        return mixed(lx.fori_loop(1, n + 1, lambda i, c: step.take(w, c, xs[i - 1]), step.start(h), **given)[:-1])

    return program


def stop_program(kind: Any, step: Step = PLAIN, **options: Any) -> Program:
    """A scan without rows and without a bound, which ends by a condition alone."""

    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        back = lambda c, _, *row: step.back(w, c, xs[c[-1] - 1], *row)
        own = kind_of(kind, back, lambda before, after, _: step.lost(before))
        f = lambda c, _: (step.take(w, c, xs[c[-1]]), None)
        return mixed(lx.scan(f, step.start(h), stop=lambda c, _: c[-1] >= n, kind=own, **options)[0][:-1])

    return program


# ---- the same as Python loops


def scan_expected(reverse: bool = False, stop: bool = False) -> Program:
    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        (h, _), ys, _ = scan_reference(scan_step(w), (h, 0), xs, int(n), reverse, below_half if stop else None)
        return mixed((h, ys))

    return program


def while_expected(w: Array, h: Array, xs: Array, n: Any) -> Array:
    return mixed(while_reference(lambda c: c[1] < n, while_body(w, xs), (h, 0))[0][0])


def fori_expected(w: Array, h: Array, xs: Array, n: Any) -> Array:
    return mixed(fori_reference(1, int(n) + 1, lambda i, c: plain(w, c, xs[i - 1]), (h, 0))[0])


LOOPS: dict[str, tuple[Callable[..., Program], Program]] = {
    "scan": (scan_program, scan_expected()),
    "reverse": (partial(scan_program, reverse=True), scan_expected(reverse=True)),
    "stop": (partial(scan_program, stop=True), scan_expected(stop=True)),
    "reverse_stop": (partial(scan_program, reverse=True, stop=True), scan_expected(reverse=True, stop=True)),
    "while": (while_program, while_expected),
    "fori": (fori_program, fori_expected),
}
UNBOUNDED: dict[str, Callable[..., Program]] = {
    "unbounded while": partial(while_program, max_steps=None),
    "unbounded fori": partial(fori_program, max_steps=None),
    "unbounded stop": stop_program,  # which takes a step at least
}


@ft.cache
def expected_gradient(loop: str, n: int) -> Any:
    """The value, and its gradient with respect to weights, start and rows: once for each loop, not for each kind."""
    return jax.value_and_grad(LOOPS[loop][1], (0, 1, 2))(W, H, XS, n)
