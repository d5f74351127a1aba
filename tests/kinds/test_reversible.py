"""Kinds with an inverse: what a gradient stores; checks, checkpoints and memory of `Reversible`, and its tape.

Derivatives under every transformation are those of `tests/core/test_compositions.py`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from loopax import Reversible
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax.kinds import LastCarry
from tests.kinds.reversible import Reversible as WithInverse
from tests.support.compiled import temporary
from tests.support.problem import BOUND, HALVES, LOOPS, UNBOUNDED, XS, H, W, halves_back, in_halves, mixed
from tests.support.reference import assert_close

STORED = lx.Checkpointed(4)
MAKERS = {name: make for name, (make, _) in LOOPS.items()} | UNBOUNDED
start = HALVES.start


def sweeps(program: Any, *args: Any) -> list[ReverseSweep]:
    """Those that stand in a program."""
    found = [eqn.params for eqn in jax.make_jaxpr(program)(*args).jaxpr.eqns if eqn.primitive is reverse_sweep_p]
    return [ReverseSweep(**params) for params in found]


@pytest.mark.parametrize("loop", MAKERS)
def test_a_gradient_stores_one_carry(loop: str) -> None:
    program = MAKERS[loop](lambda inverse, _: WithInverse(inverse), step=HALVES)
    (sweep,) = sweeps(jax.grad(program), W, H, XS, 5)
    assert sweep.inverse is not None
    assert sweep.saving.rows(BOUND) == 1


def test_a_wrong_inverse_gives_a_wrong_gradient() -> None:
    """It is the inverse that walks back, not a replay."""
    wrong = WithInverse(lambda i, c: halves_back(2.0 * W, c, XS[i]))
    loop = lambda h, kind: mixed(lx.fori_loop(0, 5, lambda i, c: in_halves(W, c, XS[i]), start(h), kind=kind)[:2])
    found, expected = (jax.grad(loop)(H, kind) for kind in (wrong, STORED))
    assert not jnp.allclose(found, expected)


def test_accumulators_are_not_walked_back() -> None:
    """Leaves that the derivative does not read are not stored."""

    def program(h: Array) -> Array:
        body = lambda i, c: (in_halves(W, c[0], XS[i]), c[1] + c[0][0])
        kind = WithInverse(lambda i, c: ((before := halves_back(W, c[0], XS[i])), c[1] - before[0]))
        return lx.fori_loop(0, 5, body, (start(h), h), kind=kind)[1].sum()

    (sweep,) = sweeps(jax.grad(program), H)
    assert sweep.num_state == 2


# ---- loopax's own


Make = Callable[[Callable[..., Any]], lx.Kind]
OTHER: Make = lambda inverse: lx.Bounded()


def with_checkpoints(number: int, rtol: float | None = 1e-9) -> Make:
    return lambda inverse: Reversible(inverse, checkpoints=number, rtol=rtol)


def leapfrog(dt: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A step of a Hamiltonian flow, of pendulums that pull on each other, and its inverse."""
    force = lambda q: jnp.sin(q) + 0.1 * (q - q.mean())

    def forward(i: Any, state: Any) -> Any:
        q, p = state
        q = q + 0.5 * dt * p
        p = p - dt * force(q)
        return q + 0.5 * dt * p, p

    def backward(i: Any, state: Any) -> Any:
        q, p = state
        q = q - 0.5 * dt * p
        p = p + dt * force(q)
        return q - 0.5 * dt * p, p

    return forward, backward


def flow(start: Array, num_steps: int, dt: float, make: Make) -> Array:
    forward, backward = leapfrog(dt)
    q, p = lx.fori_loop(0, num_steps, forward, (start, jnp.zeros_like(start)), kind=make(backward))
    return (q * p).sum()


def test_memory_does_not_grow_with_the_steps() -> None:
    """Six carries of 64 bodies, those that any loop works on included."""
    start, carry = jnp.linspace(0.1, 1.0, 3 * 64), 2 * 3 * 64 * 8

    def memory(num_steps: int, make: Make) -> int:
        return temporary(jax.jit(jax.grad(lambda q: flow(q, num_steps, 0.01, make))).lower(start).compile())

    assert memory(100_000, Reversible) <= 1.02 * memory(1000, Reversible)
    assert memory(100_000, Reversible) <= 6 * carry
    assert memory(100_000, with_checkpoints(9)) <= memory(100_000, Reversible) + 16 * carry


class TestChecks:
    def test_a_function_that_is_no_inverse(self) -> None:
        wrong = lambda inverse: Reversible(lambda *args: jax.tree.map(lambda x: 1.01 * x, inverse(*args)))
        gradient = jax.grad(lambda q: flow(q, 10, 0.01, wrong))
        pattern = r"loopax.fori_loop at .*: the inverse of kind=Reversible\(\) does not undo the first step \(0\.01\)"
        for run in (gradient, eqx.filter_jit(gradient), jax.jacfwd(lambda q: flow(q, 10, 0.01, wrong))):
            with pytest.raises(eqx.EquinoxRuntimeError, match=pattern):
                run(jnp.ones(3))
        assert jnp.isfinite(flow(jnp.ones(3), 10, 0.01, wrong))

    def test_an_inverse_that_gives_nan(self) -> None:
        loop = lambda x: lx.fori_loop(0, 3, lambda i, x: 2 * x, x, kind=Reversible(lambda i, x: x * jnp.nan))
        with pytest.raises(eqx.EquinoxRuntimeError, match=r"does not undo the first step \(nan\)"):
            jax.grad(loop)(0.3)

    def test_the_first_step_of_a_reversed_loop_is_that_of_the_last_row(self) -> None:
        def loop(x: Array, wrong_row: int) -> Array:
            kind = Reversible(lambda x, row: jnp.where(row == wrong_row, x, x / 2))
            return lx.scan(lambda x, row: (2 * x, None), x, jnp.arange(4), length=3, reverse=True, kind=kind)[0]

        assert jnp.isfinite(jax.grad(loop)(0.3, 0))
        with pytest.raises(eqx.EquinoxRuntimeError, match=r"does not undo the first step \(0.5\)"):
            jax.grad(loop)(0.3, 2)

    def test_an_integer_that_is_not_undone(self) -> None:
        kind = Reversible(lambda i, c: (c[0] / 2, c[1] - 2))
        loop = lambda x: lx.fori_loop(0, 3, lambda i, c: (2 * c[0], c[1] + 1), (x, 0), kind=kind)[0]
        with pytest.raises(eqx.EquinoxRuntimeError, match=r"does not undo the first step \(inf\)"):
            jax.grad(loop)(0.3)

    def test_a_leaf_as_it_came_that_the_inverse_reads(self) -> None:
        """It is read for another leaf, which the derivative reads."""
        body = lambda i, c: (c[0] + 0.1 * c[1], 0.9 * c[1], c[2] + jnp.sin(c[0]))
        kind = Reversible(lambda i, c: (before := c[0] - c[1] / 9, c[1], c[2] - jnp.sin(before)))
        with pytest.raises(ValueError, match=r"returns carry\[1\] as it came, but the derivative of a step reads it"):
            jax.grad(lambda x: lx.fori_loop(0, 3, body, (x, x, x), kind=kind)[2])(0.5)

    def test_a_lane_that_takes_no_step_is_not_checked(self) -> None:
        def loop(x: Array, n: Any) -> Array:
            kind = Reversible(lambda c: (jnp.log(c[0]), c[1] - 1))
            return lx.while_loop(lambda c: c[1] < n, lambda c: (jnp.exp(c[0]), c[1] + 1), (x, 0), kind=kind)[0]

        found = jax.vmap(jax.grad(loop))(jnp.array([0.1, jnp.inf, 0.2]), jnp.array([2, 0, 1]))
        assert_close(found, jnp.array([jnp.exp(0.1) * jnp.exp(jnp.exp(0.1)), 1.0, jnp.exp(0.2)]))

    def test_accumulators_may_stay_as_they_are(self) -> None:
        forward, backward = leapfrog(0.1)

        def total(q: Array, kind: lx.Kind) -> Array:
            body = lambda i, c: (forward(i, c[0]), c[1] + c[0][0], c[2] + 1)
            return lx.fori_loop(0, 20, body, ((q, q), jnp.zeros_like(q), 0), kind=kind)[1].sum()

        kind = Reversible(lambda i, c: (backward(i, c[0]), c[1], c[2]), rtol=1e-9)
        assert_close(jax.grad(total)(H, kind), jax.grad(total)(H, lx.Bounded()))

    def test_a_drift(self) -> None:
        """Of a contraction: its inverse lets rounding errors grow, unless checkpoints stop them."""

        def loop(x: Array, make: Make, num_steps: int = 30) -> Array:
            body = lambda i, x: jnp.sin(x) / 4 + 0.3
            return lx.fori_loop(0, num_steps, body, x, kind=make(lambda i, x: jnp.arcsin(4 * (x - 0.3))))

        gradient = eqx.filter_jit(jax.grad(loop))
        with pytest.raises(eqx.EquinoxRuntimeError, match=r"rounding errors have grown beyond rtol=1e-06 \(0\.\d+\)"):
            gradient(1.0, with_checkpoints(0, 1e-6))
        assert_close(gradient(1.0, with_checkpoints(9, 1e-6)), gradient(1.0, OTHER))
        assert_close(gradient(1.0, with_checkpoints(0, 1e-6), 8), gradient(1.0, OTHER, 8))

    def test_a_drift_of_another_leaf_than_the_first(self) -> None:
        """Each of the two contracts where the other one does not."""

        def loop(x: Array, contracted: int) -> Array:
            body = lambda i, c: tuple(
                jnp.sin(x) / 4 + 0.3 if at == contracted else jnp.sinh(x) for at, x in enumerate(c)
            )
            back = lambda x, at: jnp.arcsin(4 * (x - 0.3)) if at == contracted else jnp.arcsinh(x)
            kind = Reversible(lambda i, c: tuple(back(x, at) for at, x in enumerate(c)), rtol=1e-6)
            return jnp.add(*lx.fori_loop(0, 30, body, (x, 1e-3 * x), kind=kind))

        for contracted in (0, 1):
            with pytest.raises(eqx.EquinoxRuntimeError, match="rounding errors have grown beyond"):
                eqx.filter_jit(jax.grad(lambda x, at=contracted: loop(x, at)))(0.3)

    @pytest.mark.parametrize("lanes", ["lockstep", pytest.param("compact", marks=pytest.mark.slow)])
    def test_each_lane_has_a_drift_of_its_own(self, lanes: Any) -> None:
        """Too large in the lane of 30 steps. What the derivative by y reads is the same in all lanes."""

        def loop(y: Array, x: Array, n: Any) -> Array:
            body = lambda i, c: (c[0] / 2, jnp.sin(c[1]) / 4 + 0.3)
            kind = Reversible(lambda i, c: (2 * c[0], jnp.arcsin(4 * (c[1] - 0.3))), rtol=1e-6)
            return jnp.add(*lx.fori_loop(0, n, body, (y, x), max_steps=30, kind=kind, throw=False, lanes=lanes))

        gradient = jax.jit(jax.grad(loop, (0, 1)))
        starts, lengths = jnp.array([1.0, 0.3, 1.0, 1.0]), jnp.array([30, 8, 3, 0])
        alone = [gradient(0.0, *each) for each in zip(starts, lengths, strict=True)]
        assert [bool(jnp.isnan(of_x)) for _, of_x in alone] == [True, False, False, False]
        expected = jax.tree.map(lambda *lanes: jnp.stack(lanes), *alone)
        assert_close(jax.jit(jax.vmap(gradient, (None, 0, 0)))(0.0, starts, lengths), expected)
        starts = jnp.array([1.0, 0.39656246770761694])  # the second one is a fixed point, also on the way back
        of_x = jnp.stack([gradient(0.0, start, 20)[1] for start in starts])
        assert list(jnp.isnan(of_x)) == [True, False]
        of_y, found = jax.vmap(gradient, (None, 0, None))(0.0, starts, 20)
        assert_close(found, of_x)
        assert_close(of_y, jnp.full(2, 0.5**20))  # it reads nothing that has drifted

    @pytest.mark.parametrize("options", [{"last": 2}, {"window": 3}, {"last": 50}], ids=str)
    @pytest.mark.parametrize("is_static", [True, False])
    def test_truncated_steps_are_checked(self, options: dict[str, int], is_static: bool) -> None:
        """The inverse on the first step of the loop, and the drift in each part; here they are wrong elsewhere."""

        def loop(a: Array, wrong: Callable[[Any], Any], num_steps: int = 20) -> Array:
            body = lambda i, x: jnp.sin(a * x) / 4 + 0.3
            kind = Reversible(lambda i, x: jnp.arcsin(4 * (x - 0.3)) / a * jnp.where(wrong(i), 1.01, 1), rtol=1e-3)
            steps = num_steps if is_static else jnp.int32(num_steps)
            derivative = lx.Truncated(**options)
            return lx.fori_loop(0, steps, body, 1.0, max_steps=num_steps, kind=kind, derivative=derivative)

        for wrong, problem in (
            (lambda i: i == 0, "does not undo the first step"),
            (lambda i: i > 0, "have grown beyond"),
        ):
            with pytest.raises(eqx.EquinoxRuntimeError, match=problem):
                eqx.filter_jit(jax.grad(lambda a, wrong=wrong: loop(a, wrong)))(0.9)


# ---- the tape, which has what a step loses


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
    assert "WalkBack(" in jaxpr


class TestChecksOfTapes:
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
