"""Hypothesis: counts, shapes, dtypes and batches against the Python loop."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import loopax as lx
from tests.support.problem import KINDS
from tests.support.reference import assert_close, scan_reference

KIND = st.sampled_from(KINDS)
SHAPE = st.sampled_from([(), (1,), (2, 3), (0,), (2, 0)])


def step(carry, x):
    total, count = carry
    total = jnp.sin(total) * 0.9 + x
    return (total, count + 1), (total * 2, count)


@ft.lru_cache
def program(kind, reverse, unroll):
    def value(total, xs, n):
        (total, count), (doubled, counts) = lx.scan(
            step, (total, 0), xs, length=n, reverse=reverse, unroll=unroll, kind=kind
        )
        return (total**2).sum() + doubled.sum(), (total, count, doubled, counts)

    return jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))


def expected(total, xs, n, reverse):
    def value(total, xs):
        (total, count), (doubled, counts), _ = scan_reference(step, (total, jnp.asarray(0)), xs, n, reverse)
        return (total**2).sum() + doubled.sum(), (total, count, doubled, counts)

    return jax.value_and_grad(value, (0, 1), has_aux=True)(total, xs)


@settings(max_examples=40)
@given(
    data=st.data(),
    rows=st.sampled_from([1, 2, 3, 7, 12]),
    shape=SHAPE,
    kind=KIND,
    reverse=st.booleans(),
    unroll=st.integers(1, 3),
)
def test_scan(data, rows, shape, kind, reverse, unroll):
    n = data.draw(st.integers(0, rows))
    random = np.random.RandomState(rows)
    total, xs = jnp.asarray(random.randn(*shape)), jnp.asarray(random.randn(rows, *shape))
    assert_close(program(kind, reverse, unroll)(total, xs, jnp.int32(n)), expected(total, xs, n, reverse))


DTYPES = [jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.complex128]


@settings(max_examples=25)
@given(dtype=st.sampled_from(DTYPES), kind=KIND, n=st.integers(0, 9))
def test_dtypes_of_gradients(dtype, kind, n):
    """Powers of one half are exact in every dtype: x * 0.5**n and its derivative."""
    start = jnp.asarray(2.0, dtype)
    half = jnp.asarray(0.5, dtype)

    def f(x):
        y = lx.fori_loop(0, n, lambda i, y: y * half, x, max_steps=9, kind=kind)
        return jnp.real(y).astype(jnp.float32)

    value, gradient = jax.value_and_grad(f, holomorphic=False)(start)
    assert gradient.dtype == dtype
    assert value == 2.0 * 0.5**n
    assert gradient == jnp.asarray(0.5**n, dtype)


@ft.lru_cache
def lane(kind):
    """One lane, and a batch, compiled."""

    def value(x, n):
        body = lambda c: (jnp.sin(c[0]) * 1.2, c[1] + 1)
        return lx.while_loop(lambda c: c[1] < n, body, (x, 0), max_steps=9, kind=kind)[0]

    return jax.jit(jax.value_and_grad(value)), jax.jit(jax.vmap(jax.value_and_grad(value)))


@settings(max_examples=40)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), kind=KIND)
def test_lanes(counts, kind):
    starts = jnp.linspace(0.1, 0.9, len(counts))
    one, batch = lane(kind)
    alone = [one(x, n) for x, n in zip(starts, counts, strict=True)]
    wanted = jax.tree.map(lambda *values: jnp.stack(values), *alone)
    assert_close(batch(starts, jnp.array(counts)), wanted)


INTEGERS = [jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32, jnp.int64]


@given(dtype=st.sampled_from(INTEGERS), lower=st.integers(-20, 20), upper=st.integers(-20, 20))
@settings(max_examples=40)
def test_limits_of_fori_loop(dtype, lower, upper):
    """Every integer dtype, static and traced: the indices are those of `range`."""
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        lower, upper = lower + 20, upper + 20
    body = lambda i, c: (c[0] + i.astype(jnp.int64), c[1] + 1)
    wanted = (sum(range(lower, upper)), len(range(lower, upper)))
    start = (jnp.int64(0), 0)
    limits = (jnp.asarray(lower, dtype), jnp.asarray(upper, dtype))
    assert tuple(map(int, jax.jit(lambda a, b: lx.fori_loop(a, b, body, start))(*limits))) == wanted
    body = lambda i, c: (c[0] + i, c[1] + 1)
    assert tuple(map(int, lx.fori_loop(lower, upper, body, (0, 0)))) == wanted
