"""Loops in loops, to any depth, and in JAX's own control flow."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.problem import KINDS, LOOPS, WITH_LAX, XS, H, W, name_of
from tests.support.reference import assert_close

ROWS = jnp.arange(5.0)
INNER_COUNTS = jnp.array([2, 5, 0, 3])


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


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradient_and_hessians(kind):
    program, m = nested(kind), jnp.int32(3)
    expected = lambda h: nested_expected(h, INNER_COUNTS, 3)
    f = lambda h: program(h, INNER_COUNTS, m)
    assert_close(jax.jit(jax.value_and_grad(f))(H), jax.value_and_grad(expected)(H))
    assert_close(jax.jit(jax.hessian(f))(H), jax.hessian(expected)(H))
    assert_close(jax.jit(jax.jacrev(jax.jacrev(f)))(H), jax.hessian(expected)(H))


@pytest.mark.parametrize(("kind", "inner"), [(a, b) for a in KINDS for b in KINDS if a != b], ids=name_of)
def test_mixed_kinds(kind, inner):
    f = lambda h: nested(kind, inner)(h, INNER_COUNTS, jnp.int32(3))
    assert_close(jax.jit(jax.grad(f))(H), jax.grad(lambda h: nested_expected(h, INNER_COUNTS, 3))(H))


MIXED = [(lx.Residuals(), lx.Checkpointed()), (lx.Residuals(), lx.Checkpointed(2)), (lx.Checkpointed(2), lx.Bounded())]


@pytest.mark.parametrize(("kind", "inner"), MIXED, ids=name_of)
def test_second_derivatives_of_mixed_kinds(kind, inner):
    """What an inner loop saves may become rows of the outer one, with cotangents that are written out."""
    f = lambda h: nested(kind, inner)(h, INNER_COUNTS, jnp.int32(3))
    wanted = jax.hessian(lambda h: nested_expected(h, INNER_COUNTS, 3))(H)
    for hessian in (jax.jacrev(jax.jacrev(f)), jax.jacfwd(jax.jacrev(f))):
        assert_close(jax.jit(hessian)(H), wanted)
    assert_close(jax.jit(jax.grad(lambda h: jax.grad(f)(h) @ h))(H), wanted @ H + jax.grad(f)(H))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_lanes_with_counts_of_their_own(kind):
    starts = jnp.stack([H, -H, 2 * H])
    counts = jnp.array([[2, 5, 0, 3], [0, 1, 1, 5], [4, 0, 0, 0]])
    ms = jnp.array([3, 4, 0])
    lanes = zip(starts, counts, ms, strict=True)
    wanted = jnp.stack([jax.grad(lambda h, c=c, m=m: nested_expected(h, c, m))(h) for h, c, m in lanes])
    assert_close(jax.jit(jax.vmap(jax.grad(nested(kind))))(starts, counts, ms), wanted)
    summed = lambda starts: jax.vmap(nested(kind))(starts, counts, ms).sum()
    assert_close(jax.jit(jax.grad(summed))(starts), wanted)


@pytest.mark.parametrize("depth", [3, 4])
def test_depth(depth):
    def program(h, level):
        if level == 0:
            return jnp.tanh(h) * 1.1
        return lx.fori_loop(0, 2, lambda i, h: program(h, level - 1), h)

    expected = lambda h: jax.lax.fori_loop(0, 2**depth, lambda i, h: jnp.tanh(h) * 1.1, h).sum()
    assert_close(jax.jit(jax.grad(lambda h: program(h, depth).sum()))(H), jax.grad(expected)(H))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_gradient_as_the_step_of_a_loop(kind):
    """Gradient descent on an inner loop, differentiated: primal sweeps inside another loop's body."""

    def descend(inner, outer):
        return lambda h: outer(lambda h: h - 0.1 * jax.grad(lambda h: (inner(h) ** 2).sum())(h), h).sum()

    times = lambda n, kind: lambda f, h: lx.fori_loop(0, n, lambda i, h: f(h), h, kind=kind)
    plain = lambda n: lambda f, h: jax.lax.scan(lambda h, _: (f(h), None), h, None, length=n)[0]
    step = lambda h: jnp.sin(W @ h)
    f = descend(lambda h: times(5, kind)(step, h), times(3, kind))
    expected = descend(lambda h: plain(5)(step, h), plain(3))
    assert_close(jax.jit(jax.value_and_grad(f))(H), jax.value_and_grad(expected)(H))
    assert_close(jax.jit(jax.hessian(f))(H), jax.hessian(expected)(H))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_inside_lax_scan(kind):
    program, expected = LOOPS["while"]
    counts = jnp.array([3, 5, 2])
    chained = lambda f: lambda h: jax.lax.scan(lambda s, n: (s + f(W, h * s, XS, n), None), jnp.ones(()), counts)[0]

    def by_hand(h):
        s = jnp.ones(())
        for n in counts:
            s = s + expected(W, h * s, XS, int(n))
        return s

    assert_close(jax.jit(jax.value_and_grad(chained(program(kind))))(H), jax.value_and_grad(by_hand)(H))
    assert_close(jax.jit(jax.hessian(chained(program(kind))))(H), jax.hessian(by_hand)(H))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_inside_lax_cond(kind):
    program, expected = LOOPS["scan"]
    branch = lambda f: lambda h: jax.lax.cond(h[0] > 0, lambda h: f(W, h, XS, jnp.int32(3)), lambda h: h.sum(), h)
    f = branch(program(kind))
    starts = jnp.stack([H, -H])
    wanted = jnp.stack([jax.grad(lambda h: expected(W, h, XS, 3))(H), jnp.ones(3)])
    assert_close(jnp.stack([jax.grad(f)(h) for h in starts]), wanted)
    assert_close(jax.jit(jax.vmap(jax.grad(f)))(starts), wanted)


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_lax_loops_in_the_body(kind):
    body = lambda i, h: jax.lax.scan(lambda h, _: (jnp.sin(W @ h), None), h, None, length=2)[0]
    f = lambda h: lx.fori_loop(0, 3, body, h, kind=kind).sum()
    expected = lambda h: jax.lax.fori_loop(0, 6, lambda i, h: jnp.sin(W @ h), h).sum()
    assert_close(jax.jit(jax.value_and_grad(f))(H), jax.value_and_grad(expected)(H))


def sine_steps(kind):
    """The whole carry of the loop is the carry of what stands around it."""
    return lambda h: lx.fori_loop(0, 3, lambda i, h: jnp.sin(W @ h), h, kind=kind)


def counting_steps(kind):
    """The same with a part of the carry that depends on nothing around."""

    def steps(h):
        body = lambda c: (jnp.sin(W @ c[0]) * (1.0 + 0.1 * c[1]), c[1] + 1.0)
        return lx.while_loop(lambda c: c[1] < 3, body, (h, 0.0), max_steps=5, kind=kind)[0]

    return steps


def expected_steps(counting):
    def steps(h):
        for i in range(3):
            h = jnp.sin(W @ h) * (1.0 + 0.1 * i if counting else 1.0)
        return h

    return steps


AROUND = {
    "lax.scan": lambda f: lambda h: jax.lax.scan(lambda h, _: (f(h), h), h, None, length=2)[0],
    "lax.scan of lanes": lambda f: (
        lambda h: jax.lax.scan(lambda h, _: (jax.vmap(f)(h), None), jnp.stack([h, -h]), None, length=2)[0]
    ),
    "lax.cond": lambda f: lambda h: jax.lax.cond(h[0] > 0, lambda h: f(f(h)), lambda h: h, h),
    "jit": lambda f: lambda h: jax.jit(f)(jax.jit(f)(h)),
    "checkpoint": lambda f: lambda h: jax.checkpoint(f)(jax.checkpoint(f)(h)),
    "lax.map": lambda f: lambda h: jax.lax.map(f, jnp.stack([h, f(h)])),
}


@ft.cache
def expected_around(around, counting):
    """Gradient and Hessian, the same for all kinds."""
    f = lambda h: (AROUND[around](expected_steps(counting))(h) ** 2).sum()
    return jax.grad(f)(H), jax.hessian(f)(H)


# These take long. The second kind of steps has all that the first has, and slots with both schedules.
STEPS = [(sine_steps, lx.Checkpointed()), *((counting_steps, kind) for kind in KINDS)]


@pytest.mark.parametrize(("steps", "kind"), STEPS, ids=name_of)
@pytest.mark.parametrize("around", AROUND)
def test_every_derivative_inside_other_control_flow(kind, around, steps):
    """JAX also evaluates loops partially to find what does not change around them: primals are unknown then."""
    f = lambda h: (AROUND[around](steps(kind))(h) ** 2).sum()
    gradient, hessian = expected_around(around, steps is counting_steps)
    assert_close(jax.jit(jax.grad(f))(H), gradient)
    for first in (jax.jacfwd, jax.jacrev):
        for second in (jax.jacfwd, jax.jacrev):
            assert_close(jax.jit(second(first(f)))(H), hessian)
