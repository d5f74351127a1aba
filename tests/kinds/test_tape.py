"""`Reversible(inverse, record=...)`: a step that loses something, which the tape has."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from loopax import Reversible
from loopax.kinds import LastCarry
from tests.support.compiled import temporary
from tests.support.problem import H
from tests.support.reference import assert_close


def test_the_tape_alone_grows() -> None:
    """One row of four bytes a step; neither the cotangent of the tape is stored, nor the tape for values alone."""
    steps, width = 20_000, 64

    def loop(scale: Array, kind: lx.Kind) -> Array:
        body = lambda i, c: (c[1] + 0.1 * jnp.sin(scale * c[0]), c[0].at[0].set(0.5))
        return lx.fori_loop(0, steps, body, (scale, scale), kind=kind)[0].sum()

    def undo(i: Any, c: Any, row: Array) -> Any:
        before = c[1].at[0].set(row)
        return before, c[0] - 0.1 * jnp.sin(scale * before)

    scale = jnp.linspace(0.1, 0.9, width, dtype=jnp.float32)
    record = lambda i, before, after: before[0][0]
    whole, parts = (Reversible(undo, record=record, checkpoints=number) for number in (0, 99))
    tape, carry = 4 * steps, 2 * 4 * width
    compiled = lambda f, kind: temporary(jax.jit(f(lambda s: loop(s, kind))).lower(scale).compile())
    assert tape <= compiled(jax.grad, whole) <= 1.05 * tape + 12 * carry
    assert compiled(jax.grad, parts) <= tape / 100 + 112 * carry
    assert compiled(lambda f: f, whole) <= 6 * carry


def test_a_buffer_is_read_as_it_is() -> None:
    """The inverse leaves its rows alone: the last version holds all that a step has read."""

    def body(i: Any, c: Any) -> Any:
        x, rows = c
        return x + 0.1 * jnp.sin(rows[-1] + i), rows.append(jnp.cos(x))

    def undo(i: Any, c: Any) -> Any:
        x, rows = c
        rows = eqx.tree_at(lambda rows: rows.count, rows, rows.count - 1)
        return x - 0.1 * jnp.sin(rows[-1] + i), rows

    def loop(x: Array, kind: lx.Kind) -> Array:
        x, rows = lx.fori_loop(0, 50, body, (x, lx.Buffer(51, like=x).append(x)), kind=kind)
        return (x + rows[7]).sum()

    assert_close(*(jax.grad(loop)(H, kind) for kind in (Reversible(undo, rtol=1e-9), lx.Bounded())))
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: loop(x, Reversible(undo))))(H))
    assert "LastCarry(" in jaxpr


class TestChecks:
    def test_a_row_that_is_not_what_the_step_has_lost(self) -> None:
        def loop(x: Array) -> Array:
            kind = Reversible(lambda i, c, row: (row, c[0]), record=lambda i, before, after: 1.1 * before[0])
            return lx.fori_loop(0, 4, lambda i, c: (c[1], jnp.sin(c[0])), (x, 2 * x), kind=kind)[0]

        with pytest.raises(eqx.EquinoxRuntimeError, match=r"does not undo the first step \(0\.\d+\)"):
            jax.grad(loop)(0.5)

    def test_a_leaf_of_zeros(self) -> None:
        """It has the rounding errors of the other leaves."""
        body = lambda i, c: (c[0] / 3 + 1, (c[0] / 3 + 1) * 3 - 3 - c[0])
        kind = Reversible(lambda i, c: ((c[0] - 1) * 3, c[1] + (c[0] - 1) * 3 - (c[0] * 3 - 3) + 1e-17), rtol=1e-3)
        assert_close(jax.grad(lambda x: lx.fori_loop(0, 1, body, (x, 0 * x), kind=kind)[0])(jnp.ones(3).sum()), 1 / 3)


def test_a_kind_of_ones_own_without_a_bound_stores_checkpoints() -> None:
    class Taped(lx.Kind):
        inverse = staticmethod(lambda c, row: (row, c[1] - 1))
        record = staticmethod(lambda before, after: before[0])

        def plan(self, loop: Any) -> Any:
            return LastCarry()

        def without_functions(self) -> lx.Kind:
            return without

    class Without(Taped):
        inverse = record = None

    without = Without()

    def loop(x: Array, kind: lx.Kind) -> Array:
        return lx.while_loop(lambda c: c[1] < 5, lambda c: (jnp.sin(3 * c[0]), c[1] + 1), (x, 0), kind=kind)[0]

    assert_close(jax.grad(loop)(0.3, Taped()), jax.grad(loop)(0.3, lx.Checkpointed()))
