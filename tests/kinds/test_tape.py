"""`Reversible(inverse, record=...)`: a step that loses something, which the tape has."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from loopax import Reversible
from loopax.kinds import LastCarry
from tests.kinds.test_reversible import LENGTHS, STARTS, row_of, small, start, step
from tests.kinds.test_reversible import back as back_of_all
from tests.support.compiled import temporary
from tests.support.problem import BOUND, XS, H, Program, W, mixed
from tests.support.reference import assert_close

Make = Callable[[Callable[..., Any], Callable[..., Any]], lx.Kind]
OTHER: Make = lambda inverse, record: lx.Bounded()


def taped(**options: Any) -> Make:
    return lambda inverse, record: Reversible(inverse, record=record, **options)


def lossy(w: Array, c: Any, x: Any) -> Any:
    """The first element of q is lost."""
    p, q, count = step(w, c, x)
    return p, q.at[0].set(0.2 * jnp.cos(p[0])), count


def lost(before: Any) -> Any:
    return {"q": before[1][0], "count": before[2]}


def back(w: Array, c: Any, x: Any, row: Any) -> Any:
    """All but that element comes from the inverse of a whole step."""
    p, q, _ = c
    q = (q + jnp.tanh(p)) / 1.1
    q = q.at[0].set(row["q"])
    return p - jnp.sin(w @ q + x), q, row["count"]


def scan(make: Make, **options: Any) -> Program:
    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        f = lambda c, x: (new := lossy(w, c, x), row_of(x, new))
        kind = make(lambda c, x, row: back(w, c, x, row), lambda before, after, x: lost(before))
        (p, q, _), ys = lx.scan(f, start(h), xs, length=n, kind=kind, **options)
        return mixed((p, q, ys))

    return program


def while_loop(make: Make, lanes: Any = "lockstep") -> Program:
    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        kind = make(lambda c, row: back(w, c, xs[row["count"]], row), lambda before, after: lost(before))
        body = lambda c: lossy(w, c, xs[c[2]])
        cond_fun = lambda c: c[2] < n
        return mixed(lx.while_loop(cond_fun, body, start(h), max_steps=BOUND, kind=kind, lanes=lanes)[:2])

    return program


def fori_loop(make: Make, lanes: Any = "lockstep") -> Program:
    def program(w: Array, h: Array, xs: Array, n: Any) -> Array:
        kind = make(lambda i, c, row: back(w, c, xs[i - 1], row), lambda i, before, after: lost(before))
        body = lambda i, c: lossy(w, c, xs[i - 1])
        return mixed(lx.fori_loop(1, n + 1, body, start(h), max_steps=BOUND, kind=kind, lanes=lanes)[:2])

    return program


FORMS: dict[str, Callable[..., Program]] = {
    "scan": scan,
    "reverse": lambda make, **lanes: scan(make, reverse=True, **lanes),
    "reverse_stop": lambda make, **lanes: scan(make, reverse=True, stop=lambda c, y: ~small(c), **lanes),
    "while": while_loop,
    "fori": fori_loop,
}


@pytest.mark.parametrize("checkpoints", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str, checkpoints: int) -> None:
    make = taped(checkpoints=checkpoints, rtol=1e-9)
    found, expected = (jax.jit(jax.value_and_grad(FORMS[form](each), (0, 1, 2))) for each in (make, OTHER))
    for n in (0, 1, 7, BOUND):
        assert_close(found(W, H, XS, n), expected(W, H, XS, n))


@pytest.mark.parametrize("form", ["scan", pytest.param("while", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "outer", [jax.jacfwd, pytest.param(jax.jacrev, marks=pytest.mark.slow)], ids=["forward", "reverse"]
)
def test_second_derivatives(form: str, outer: Any) -> None:
    for inner in (jax.grad, jax.jacfwd):
        assert_close(*(outer(inner(FORMS[form](make), 1), 0)(W, H, XS, 6) for make in (taped(), OTHER)))


@pytest.mark.parametrize(
    "form", ["while", *(pytest.param(f, marks=pytest.mark.slow) for f in ("fori", "reverse_stop"))]
)
@pytest.mark.parametrize(
    "lanes", ["lockstep", pytest.param(lx.Compact(min_lanes=1, shrink=2), marks=pytest.mark.slow)], ids=str
)
def test_lanes(form: str, lanes: Any) -> None:
    def gradient(make: Make) -> Any:
        batch = jax.vmap(FORMS[form](make, lanes=lanes), (None, 0, None, 0))
        return jax.jit(jax.grad(lambda w, h: batch(w, h, XS, LENGTHS).sum(), (0, 1)))(W, STARTS)

    assert_close(gradient(taped()), gradient(OTHER))


@pytest.mark.parametrize("form", ["while", pytest.param("scan", marks=pytest.mark.slow)])
def test_lanes_of_gradients(form: str) -> None:
    def gradients(make: Make) -> Any:
        return jax.jit(jax.vmap(jax.grad(FORMS[form](make)), (None, 0, None, 0)))(W, STARTS, XS, LENGTHS)

    assert_close(gradients(taped(rtol=1e-9)), gradients(OTHER))


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
    assert "Last(" in jaxpr


def test_keys() -> None:
    def loop(x: Array, make: Make) -> Array:
        noise = lambda key: jax.random.normal(key, ())
        body = lambda i, x, *, key: (x[0] + jnp.sin(x[1] * noise(key)), x[0] * 0.9)
        undo = lambda i, x, row, *, key: (x[1] / 0.9, row[0] + noise(key) - row[1])
        record = lambda i, before, after, *, key: (before[1], noise(key))
        kind = make(undo, record)
        return jnp.add(*lx.fori_loop(0, 5, body, (x, x), kind=kind, key=jax.random.key(3)))

    assert_close(jax.grad(loop)(0.4, taped()), jax.grad(loop)(0.4, OTHER))


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


class TestBadInput:
    def test_record_is_no_function(self) -> None:
        with pytest.raises(TypeError, match=r"Reversible\(record=\.\.\.\): got int 3, expected a function"):
            Reversible(lambda x: x, record=3)  # pyright: ignore[reportArgumentType]

    def test_a_tape_needs_a_bound(self) -> None:
        kind = Reversible(lambda x, row: row, record=lambda before, after: before)
        with pytest.raises(ValueError, match="stores a row of each step, and the loop has no static bound"):
            lx.while_loop(lambda x: x < 3, lambda x: x + 1, 0.0, kind=kind)

    def test_mutable_arrays(self) -> None:
        ref = jax.new_ref(jnp.ones(3))
        kind = Reversible(lambda i, x, row: row, record=lambda i, before, after: ref)
        with pytest.raises(Exception, match="record of body_fun of fori_loop returned"):
            lx.fori_loop(0, 3, lambda i, x: x + 1, 0.0, kind=kind)


@pytest.mark.parametrize("truncated", [{"last": 4}, {"window": 3}], ids=str)
def test_truncated_steps(truncated: Any) -> None:
    def gradient(kind: lx.Kind) -> Any:
        return jax.jit(jax.grad(while_loop(lambda inverse, record: lx.Truncated(**truncated, kind=kind))))(W, H, XS, 6)

    found = jax.jit(jax.grad(while_loop(lambda *functions: lx.Truncated(**truncated, kind=taped()(*functions)))))
    assert_close(found(W, H, XS, 6), gradient(lx.Bounded()))


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


def test_an_inverse_of_a_whole_step_needs_no_tape() -> None:
    """A kind without `record` calls the inverse without a row."""
    f = lambda kind: lambda c, x: lx.scan(lambda c, x: (step(W, c, x), None), c, x, kind=kind)[0][0].sum()
    inverse = lambda c, x: back_of_all(W, c, x)
    found, expected = (jax.grad(lambda xs, k=k: f(k)(start(H), xs))(XS) for k in (Reversible(inverse), lx.Bounded()))
    assert_close(found, expected)


@pytest.mark.slow
def test_waves_that_leave_against_finite_differences() -> None:
    """The electromagnetic waves of the benchmark, 1000 steps, with and without checkpoints."""
    pytest.importorskip("optimistix", reason="the benchmark imports it")
    from benchmarks import storeless

    medium = storeless.permittivity(32).astype(float)
    x = jnp.arange(32.0)
    change = jnp.exp(-((x[:, None] - 19) ** 2 + (x[None] - 16) ** 2) / 9)

    def energy(amount: Any, make: Make) -> Array:
        return storeless.waves(medium + amount * change, make)

    plain = jax.jit(lambda amount: energy(amount, OTHER))
    expected = (plain(1e-4) - plain(-1e-4)) / 2e-4
    for checkpoints in (0, 19):
        found = jax.jit(jax.grad(lambda amount, c=checkpoints: energy(amount, taped(checkpoints=c, rtol=1e-6))))(0.0)
        assert abs(found / expected - 1) <= 1e-5
