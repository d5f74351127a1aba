"""Loops without a bound, in each other and in a scan of JAX; `test_compositions.py` has them under transformations."""

from functools import partial

import jax
import numpy as np
import pytest

import loopax as lx
from tests.support.derivatives import H, W, derivatives
from tests.support.problem import UNBOUNDED, XS
from tests.support.reference import assert_close

TWO, SLOW = lx.Checkpointed(2), pytest.mark.slow
fori, while_ = UNBOUNDED["unbounded fori"](TWO), UNBOUNDED["unbounded while"](TWO)
expected = partial(derivatives, "while")
STARTS, COUNTS = np.stack([H, H + 0.1, H - 0.2, 2 * H]), np.array([4, 1, 6, 3])
LANES = list(zip(STARTS, COUNTS.tolist(), strict=True))


def nested(loop, h, n):
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
    program = partial(nested, loop)
    if order == "vmap of grad":
        gradient = jax.vmap(jax.grad(program))
    else:
        gradient = jax.grad(lambda starts, counts: jax.vmap(program)(starts, counts).sum())
    assert_close(jax.jit(gradient)(STARTS, COUNTS), np.stack([expected_nested(h, n) for h, n in LANES]))
