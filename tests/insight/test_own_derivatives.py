"""`explain` and `compare` say what kinds store that run loops in a way of their own, and whose derivative it is."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx

W = 0.3 * jnp.eye(3)
X = jnp.ones(3)


def fori(x: Array, w: Array, kind: Any = "auto") -> Array:
    return lx.fori_loop(0, 20, lambda i, x: jnp.tanh(w @ x) + 0.1, x, kind=kind).sum()


def while_loop(x: Array, w: Array, n: Array, kind: Any = "auto") -> Array:
    body = lambda c: (c[0] + 1, jnp.tanh(w @ c[1]))  # its fixed point is zero
    return lx.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=20, kind=kind)[1].sum()


REVERSIBLE = lx.Reversible(lambda i, x: x, checkpoints=3)
TAPE = lx.Reversible(lambda i, x, row: row, record=lambda i, before, after: before)
SAID = {
    lx.Implicit(): ("to a tolerance", "the last carry; its derivative solves a linear system there"),
    lx.Truncated(last=3): ("another", "what Residuals() stores of the last 3 steps; where the length is known only"),
    lx.Truncated(window=4, kind="bounded"): (
        "another",
        "the carry before each window of 4 steps, and what Bounded() stores of one window",
    ),
    REVERSIBLE: ("exact", "3 carries and the last; the body is evaluated 3n times, the inverse n times"),
    TAPE: ("exact", "the last carry and a row of the tape for each step"),
}


@pytest.mark.parametrize("kind", SAID, ids=str)
def test_explain(kind: lx.Kind) -> None:
    derivative, words = SAID[kind]
    explanation = lx.explain(lambda x, w: fori(x, w, kind), X, W)
    loop = next(loop for loop in explanation.loops if loop.kind is not None)
    assert loop.function == "loopax.fori_loop"
    assert "test_own_derivatives.py" in loop.source
    assert (loop.most_steps, loop.derivative, loop.stored) == (20, derivative, None)
    text = " ".join(str(explanation).split())
    assert f"gradient stores {words}" in text
    assert ("derivative: " in text) == (derivative != "exact")


@pytest.mark.parametrize("kind", [lx.Implicit(), lx.Truncated(last=3)], ids=str)
def test_lines_of_loops_in_custom_derivatives(kind: lx.Kind) -> None:
    (loop,) = lx.explain(lambda x, w, n: while_loop(x, w, n, kind), X, W, jnp.int32(5)).loops
    assert "test_own_derivatives.py" in loop.source
    assert all(leaf.is_differentiated for leaf in loop.leaves if leaf.name == "carry[1]")


def test_compare() -> None:
    kinds = ["bounded", lx.Implicit(), lx.Truncated(last=2), lx.Truncated(window=5), REVERSIBLE]
    converges = lambda x, w, n: while_loop(0 * x, w, n)
    for function, arguments in ((fori, (X, W)), (converges, (X, W, jnp.int32(15)))):
        rows = {row.name: row for row in lx.compare(function, *arguments, kinds=kinds, rounds=1).rows}
        own = {name for name, row in rows.items() if "(derivative: " in name and not row.problem}
        assert own == {
            "Implicit() (derivative: to a tolerance)",
            "Truncated(last=2) (derivative: another)",
            "Truncated(window=5) (derivative: another)",
        }
        assert "brings the inverse of the steps of one loop" in rows[repr(REVERSIBLE)].problem


def test_compare_differentiates_as_the_kind_does() -> None:
    """The gradient of two steps out of twenty takes less memory than that of all."""
    kinds = ["bounded", lx.Truncated(last=2)]
    _, bounded, truncated = lx.compare(fori, jnp.ones(300), jnp.eye(300), kinds=kinds, rounds=1).rows
    assert truncated.temporary_bytes < 0.5 * bounded.temporary_bytes
