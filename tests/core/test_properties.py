"""Hypothesis: counts, shapes, dtypes and batches against the Python loop.

What an example has of its own is an argument of a compiled program, and Python loops are NumPy: they compile nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loopax as lx
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

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
