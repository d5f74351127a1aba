"""Loops in loops, and gradients of loops as steps."""

import functools as ft
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.derivatives import derivatives as derivatives_of
from tests.support.problem import KINDS, UNBOUNDED, XS, H, W, name_of
from tests.support.reference import assert_close

ROWS = np.arange(5.0)
INNER_COUNTS = np.array([2, 5, 0, 3])


def nested(kind, inner_kind=None):
    """An outer scan of `m` counts; each is the length of an inner scan."""
    inner_kind = kind if inner_kind is None else inner_kind

    def outer(h, count):
        h, ys = lx.scan(lambda h, x: (jnp.sin(W @ h + x), h.sum()), h, ROWS, length=count, kind=inner_kind)
        return h, ys

    def program(h, counts, m):
        h, ys = lx.scan(outer, h, counts, length=m, kind=kind)
        return (h**2).sum() + jnp.cos(ys).sum()

    return program


def nested_expected(h, counts, m):
    rows = []
    for count in counts[: int(m)]:
        row = [jnp.zeros(())] * 5
        for k in range(int(count)):
            row[k] = h.sum()
            h = jnp.sin(W @ h + ROWS[k])
        rows.append(jnp.stack(row))
    rows += [jnp.zeros(5)] * (4 - int(m))
    return (h**2).sum() + jnp.cos(jnp.stack(rows)).sum()


def derivatives(f):
    """The value, the gradient, and the Hessian, in one program."""
    return jax.jit(lambda h: (f(h), jax.grad(f)(h), jax.hessian(f)(h)))


@ft.cache
def expected_derivatives():
    return derivatives(lambda h: nested_expected(h, INNER_COUNTS, 3))(H)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradient_and_hessians(kind):
    program, (value, gradient, hessian) = nested(kind), expected_derivatives()

    @jax.jit
    def found(h, m):
        f = lambda h: program(h, INNER_COUNTS, m)
        return jax.value_and_grad(f)(h), jax.hessian(f)(h), jax.jacrev(jax.jacrev(f))(h)

    assert_close(found(H, np.int32(3)), ((value, gradient), hessian, hessian))


# Rules that do not depend on the kind are tested with these two, which are most unlike each other.
TWO_KINDS = [
    pytest.param(kind, marks=() if kind in (lx.Checkpointed(), lx.Residuals()) else pytest.mark.slow) for kind in KINDS
]
MIXED = [(lx.Residuals(), lx.Checkpointed()), (lx.Residuals(), lx.Checkpointed(2)), (lx.Checkpointed(2), lx.Bounded())]


@pytest.mark.parametrize(("kind", "inner"), MIXED, ids=name_of)
def test_second_derivatives_of_mixed_kinds(kind, inner):
    """What an inner loop saves may become rows of the outer one, with cotangents that are written out."""

    @jax.jit
    def found(h, m):
        gradient = jax.grad(lambda h: nested(kind, inner)(h, INNER_COUNTS, m))
        return jax.jacfwd(gradient)(h), jax.grad(lambda h: gradient(h) @ h)(h)

    _, gradient, hessian = map(np.asarray, expected_derivatives())
    assert_close(found(H, np.int32(3)), (hessian, hessian @ H + gradient))


LANES = np.stack([H, -H, 2 * H]), np.array([[2, 5, 0, 3], [0, 1, 1, 5], [4, 0, 0, 0]]), np.array([3, 4, 0])


@ft.cache
def expected_lanes():
    """The gradients of three lanes."""
    gradient = lambda h, c, m: jax.grad(lambda h: nested_expected(h, c, m))(h)
    gradients = lambda starts: [gradient(*lane) for lane in zip(starts, *LANES[1:], strict=True)]
    return np.stack(jax.jit(gradients)(list(LANES[0])))


@pytest.mark.parametrize("kind", TWO_KINDS, ids=name_of)
def test_lanes_with_counts_of_their_own(kind):
    @jax.jit
    def found(starts, counts, ms):
        summed = lambda starts: jax.vmap(nested(kind))(starts, counts, ms).sum()
        return jax.vmap(jax.grad(nested(kind)))(starts, counts, ms), jax.grad(summed)(starts)

    assert_close(found(*LANES), (expected_lanes(), expected_lanes()))


def descend(inner, outer):
    """Gradient descent on a loop."""
    return lambda h: outer(lambda h: h - 0.1 * jax.grad(lambda h: (inner(h) ** 2).sum())(h), h).sum()


@ft.cache
def expected_descent():
    plain = lambda n: lambda f, h: jax.lax.scan(lambda h, _: (f(h), None), h, None, length=n)[0]
    return derivatives(descend(lambda h: plain(5)(lambda h: jnp.sin(W @ h), h), plain(3)))(H)


@pytest.mark.parametrize("kind", TWO_KINDS, ids=name_of)
def test_a_gradient_as_the_step_of_a_loop(kind):
    """Gradient descent on an inner loop, differentiated: primal sweeps inside another loop's body."""
    times = lambda n: lambda f, h: lx.fori_loop(0, n, lambda i, h: f(h), h, kind=kind)
    f = descend(lambda h: times(5)(lambda h: jnp.sin(W @ h), h), times(3))
    assert_close(derivatives(f)(H), expected_descent())


# ---- without a bound


TWO, SLOW = lx.Checkpointed(2), pytest.mark.slow
fori, while_ = UNBOUNDED["unbounded fori"](TWO), UNBOUNDED["unbounded while"](TWO)
expected = partial(derivatives_of, "while")
STARTS, COUNTS = np.stack([H, H + 0.1, H - 0.2, 2 * H]), np.array([4, 1, 6, 3])
UNBOUNDED_LANES = list(zip(STARTS, COUNTS.tolist(), strict=True))


def nested_without_a_bound(loop, h, n):
    """A loop without a bound in a loop without a bound."""
    body = lambda i, h: h * 0.5 + 0.1 * loop(W, h, XS, i)
    return lx.fori_loop(0, n, body, h, kind=TWO).sum()


def expected_nested(h, n):
    """Its derivative, step by step."""
    slopes = np.eye(3)
    for i in range(n):
        inner = expected(i, h=h)
        h, slopes = h * 0.5 + 0.1 * inner.value, (np.eye(3) * 0.5 + 0.1 * inner.of_start) @ slopes
    return slopes.sum(0)


# In lanes, with the derivative of both.
NESTED = [(fori, "vmap of grad"), (while_, "grad of vmap")]
NESTED += [pytest.param(while_, "vmap of grad", marks=SLOW), pytest.param(fori, "grad of vmap", marks=SLOW)]


@pytest.mark.parametrize(("loop", "order"), NESTED, ids=["binomial", "online", "more online", "more binomial"])
def test_nested_without_a_bound(loop, order):
    program = partial(nested_without_a_bound, loop)
    if order == "vmap of grad":
        gradient = jax.vmap(jax.grad(program))
    else:
        gradient = jax.grad(lambda starts, counts: jax.vmap(program)(starts, counts).sum())
    assert_close(jax.jit(gradient)(STARTS, COUNTS), np.stack([expected_nested(h, n) for h, n in UNBOUNDED_LANES]))
