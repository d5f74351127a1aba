"""Hypothesis: counts, shapes, dtypes and batches against the Python loop.

What an example has of its own is an argument of a compiled program, and Python loops are NumPy: they compile nothing.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loopax as lx
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

KIND = st.sampled_from(KINDS)
CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS


def step(carry, x):
    total, count = carry
    total = jnp.sin(total) * 0.9 + x
    return (total, count + 1), (total * 2, count)


def compiled(kind, reverse, unroll):
    def value(total, xs, n):
        (total, count), (doubled, counts) = lx.scan(
            step, (total, 0), xs, length=n, reverse=reverse, unroll=unroll, kind=kind
        )
        return (total**2).sum() + doubled.sum(), (total, count, doubled, counts)

    return jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))


def expected(total, xs, n, reverse):
    """Value and results as a Python loop, and the gradient by hand."""
    rows = range(n)[::-1] if reverse else range(n)
    doubled, counts, slopes = np.zeros_like(xs), np.zeros(len(xs), np.int64), {}
    for count, i in enumerate(rows):
        slopes[i] = np.cos(total) * 0.9
        total = np.sin(total) * 0.9 + xs[i]
        doubled[i], counts[i] = total * 2, count
    value = (total**2).sum() + doubled.sum()
    cotangent, of_rows = 2 * total, np.zeros_like(xs)
    for i in rows[::-1]:
        of_rows[i] = cotangent + 2
        cotangent = of_rows[i] * slopes[i]
    return (value, (total, np.int64(n), doubled, counts)), (cotangent, of_rows)


# Every shape, number of rows, kind, direction and unrolling.
PROGRAMS = [
    ((), 1, CHECKPOINTED, False, 1),
    ((1,), 12, CHECKPOINTED, True, 3),
    ((2, 3), 7, SLOTS, False, 3),
    ((0,), 3, SLOTS, True, 1),
    ((2, 3), 3, BOUNDED, True, 2),
    ((2, 0), 2, BOUNDED, False, 1),
    ((), 12, RESIDUALS, False, 2),
    ((2, 3), 7, RESIDUALS, True, 3),
]


@pytest.mark.parametrize(("shape", "rows", "kind", "reverse", "unroll"), PROGRAMS, ids=name_of)
def test_scan(shape, rows, kind, reverse, unroll):
    program = compiled(kind, reverse, unroll)

    @settings(max_examples=20)
    @given(n=st.integers(0, rows), seed=st.integers(0, 99))
    def check(n, seed):
        random = np.random.RandomState(seed)
        total, xs = np.asarray(random.randn(*shape)), random.randn(rows, *shape)
        assert_close(program(total, xs, np.int32(n)), expected(total, xs, n, reverse))

    check()


DTYPES = [jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.complex128]


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_dtypes_of_gradients(kind):
    """Powers of one half are exact in every dtype: x * 0.5**n and its derivative. Also for a static length."""

    def f(x, n):
        half = jnp.asarray(0.5, x.dtype)
        y = lx.fori_loop(0, n, lambda i, y: y * half, x, max_steps=9, kind=kind)
        return jnp.real(y).astype(jnp.float32)

    gradients = lambda xs, n: [jax.value_and_grad(f)(x, n) for x in xs]
    traced, static = jax.jit(gradients), jax.jit(lambda xs: gradients(xs, 5))
    starts = [np.asarray(2.0, dtype) for dtype in DTYPES]
    for n, found in [*((n, traced(starts, n)) for n in range(10)), (5, static(starts))]:
        for start, (value, gradient) in zip(starts, found, strict=True):
            assert gradient.dtype == start.dtype
            assert value == 2.0 * 0.5**n
            assert np.asarray(gradient) == np.asarray(0.5**n, start.dtype)


MOST = 5


@ft.lru_cache
def batch(kind):
    """A batch, compiled."""

    def value(x, n):
        body = lambda c: (jnp.sin(c[0]) * 1.2, c[1] + 1)
        return lx.while_loop(lambda c: c[1] < n, body, (x, 0), max_steps=9, kind=kind)[0]

    return jax.jit(jax.vmap(jax.value_and_grad(value)))


def alone(x, n):
    """One lane of it, with its derivative by hand."""
    slope = np.ones(())
    for _ in range(n):
        x, slope = np.sin(x) * 1.2, slope * np.cos(x) * 1.2
    return x, slope


@settings(max_examples=60)
@given(counts=st.lists(st.integers(0, 9), min_size=MOST, max_size=MOST), kind=KIND)
def test_lanes(counts, kind):
    starts = np.linspace(0.1, 0.9, MOST)
    wanted = zip(*(alone(x, n) for x, n in zip(starts, counts, strict=True)), strict=True)
    assert_close(batch(kind)(starts, np.array(counts)), tuple(map(np.stack, wanted)))


def total_of_indices(lower, upper):
    body = lambda i, c: (c[0] + jnp.asarray(i).astype(jnp.int64), c[1] + 1)
    return lx.fori_loop(lower, upper, body, (np.int64(0), 0))


def wanted_total(lower, upper):
    return sum(range(lower, upper)), len(range(lower, upper))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64], ids=name_of)
def test_limits_of_fori_loop(dtype):
    """Every integer dtype, traced: the indices are those of `range`."""
    offset = 20 if np.issubdtype(dtype, np.unsignedinteger) else 0
    program = jax.jit(total_of_indices)

    @settings(max_examples=40)
    @given(lower=st.integers(-20, 20), upper=st.integers(-20, 20))
    def check(lower, upper):
        limits = lower + offset, upper + offset
        assert tuple(map(int, program(*map(dtype, limits)))) == wanted_total(*limits)

    check()


def test_static_limits_of_fori_loop():
    limits = [(0, 0), (-3, 4), (5, 2), (-20, -7), (1, 2), (0, 20), (7, 7), (20, -20)]
    found = jax.jit(lambda: [total_of_indices(*both) for both in limits])()
    assert [tuple(map(int, total)) for total in found] == [wanted_total(*both) for both in limits]
    assert tuple(map(int, total_of_indices(-2, 5))) == wanted_total(-2, 5)
