"""Mutable arrays (`jax.new_ref`) in loops, against `jax.lax`: values and derivatives are equal, the rest is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx

XS = np.linspace(0.4, 1.3, 4)


def add_to_closed_over(m: Any, w: Any) -> Any:
    total = jax.new_ref(jnp.zeros(()))

    def step(c: Any, x: Any) -> Any:
        c = jnp.sin(w * c + x)
        total[...] += c * x
        return c, c

    c, ys = m.scan(step, 0.1, XS)
    return jax.freeze(total) + c + ys.sum()


def write_rows_of_closed_over(m: Any, w: Any) -> Any:
    rows = jax.new_ref(jnp.zeros(4))

    def step(i: Any, c: Any) -> Any:
        c = jnp.sin(w * c + i)
        rows[i] += c
        return c

    c = m.fori_loop(0, 4, step, jnp.float64(0.1))
    return (jax.freeze(rows) ** 2).sum() + c


def loop_in_a_loop(m: Any, w: Any) -> Any:
    state = jax.new_ref(w)

    def inner(c: Any, x: Any) -> Any:
        state[...] = jnp.sin(state[...] * x)
        return c, None

    m.scan(lambda c, x: (m.scan(inner, c, XS * x)[0], None), w, XS)
    return jax.freeze(state)


def made_in_the_body(m: Any, w: Any) -> Any:
    def step(c: Any, x: Any) -> Any:
        local = jax.new_ref(c)
        local[...] += x * w
        return jnp.sin(jax.freeze(local)), None

    return m.scan(step, w, XS)[0]


def rows_as_xs(m: Any, w: Any) -> Any:
    rows = jax.new_ref(w * XS)

    def step(c: Any, x: Any) -> Any:
        row, number = x
        row[...] = jnp.sin(row[...]) * c + number
        return c + row[...], c

    c, ys = m.scan(step, w, (rows, XS), reverse=True)
    return c + (jax.freeze(rows) ** 2).sum() + ys.sum()


PROGRAMS = [
    add_to_closed_over,
    write_rows_of_closed_over,
    loop_in_a_loop,
    made_in_the_body,
    rows_as_xs,
]


def all_of(function: Any) -> Any:
    """Its value and its derivatives, from one compiled program."""

    @jax.jit
    def run(w: Any) -> Any:
        value, slope = jax.value_and_grad(function)(w)
        forward = jax.jvp(function, (w,), (jnp.ones(()),))[1]
        second = jax.jvp(jax.grad(function), (w,), (jnp.ones(()),))[1]
        return value, slope, forward, second

    return run(0.7)


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_derivatives_are_those_of_jax(program: Any) -> None:
    np.testing.assert_allclose(all_of(partial(program, lx)), all_of(partial(program, lax)), rtol=1e-10)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_batch_is_what_jax_gives_for_each_lane(program: Any) -> None:
    """One after another: JAX 0.10.0 cannot map all of these."""
    lanes = np.array([0.7, -0.4])
    batch = jax.jit(jax.vmap(jax.value_and_grad(partial(program, lx))))(lanes)
    alone = jax.jit(jax.value_and_grad(partial(program, lax)))
    np.testing.assert_allclose(batch, np.transpose([alone(w) for w in lanes]), rtol=1e-10)


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential"])
def test_lanes_at_another_axis_than_those_of_the_array(lanes: Any, shape: Any) -> None:
    """JAX 0.10 writes one over the other: three times three lanes, which have a shape of their own in no order."""

    def last_of(start: Any, n: Any) -> Any:
        numbers, flags, rows = (jax.new_ref(x) for x in (start, start > 0.0, jnp.stack([start, -start])))

        def step(_: Any, c: Any) -> Any:
            numbers[...] = 0.8 * numbers[...] + jnp.sin(c)
            flags[...] = ~flags[...]
            return c + 1.0

        def row_step(c: Any, row: Any) -> Any:
            row[...] = jnp.sin(row[...]) + c
            return c + 0.1, None

        lx.fori_loop(0, n, step, start.sum(), lanes=lanes)
        lx.scan(row_step, start.sum(), rows, length=n, lanes=lanes)
        return [jax.freeze(x).astype(float) for x in (numbers, flags, rows)]

    starts, counts = np.linspace(-1.0, 1.0, 9 * int(np.prod(shape))).reshape(3, 3, *shape), np.arange(3)
    alone = jax.jit(last_of)
    for axis in (0, 1):
        got = jax.jit(jax.vmap(jax.vmap(last_of), (axis, None)))(starts, counts)
        expected = [[alone(*lane) for lane in zip(of, counts, strict=True)] for of in np.moveaxis(starts, axis, 0)]
        for i, x in enumerate(got):
            np.testing.assert_allclose(x, [[lane[i] for lane in of] for of in expected], rtol=1e-12)


def test_rows_that_no_step_has_walked_stay_as_they_are() -> None:
    @jax.jit
    def run(length: Any) -> Any:
        rows = jax.new_ref(jnp.arange(1.0, 6.0))

        def step(c: Any, row: Any) -> Any:
            row[...] *= 10.0
            return c + 1, row[...]

        lx.scan(step, 0, rows, length=length, stop=lambda _, y: y >= 30.0)
        return jax.freeze(rows)

    for length, expected in ((2, [10, 20, 3, 4, 5]), (5, [10, 20, 30, 4, 5]), (0, [1, 2, 3, 4, 5])):
        np.testing.assert_array_equal(run(length), expected)


def writes(*arguments: Any) -> Any:
    OUTSIDE[...] += 1.0
    return arguments[-1]


OUTSIDE = jax.new_ref(np.zeros(()))
ROWS = jax.new_ref(np.arange(3.0))
IN_ROWS = r"got a mutable array \(`jax.new_ref`\), expected an array. Give its value \(`ref\[\.\.\.\]`\)\."
MUTABLE = "got a mutable array"
REFUSED: Any = [
    (rf"fori_loop\(init_val=...\)\['a'\]: {MUTABLE}", lambda: lx.fori_loop(0, 3, writes, {"a": OUTSIDE})),
    (rf"scan\(init=...\)\[0\]: {MUTABLE}", lambda: lx.scan(writes, (OUTSIDE,), XS)),
    (rf"f of scan returned y: {MUTABLE}", lambda: lx.scan(lambda c, x: (c, x), 0.0, ROWS)),
    (rf"body_fun of fori_loop returned carry: {MUTABLE}", lambda: lx.fori_loop(0, 3, lambda *_: OUTSIDE, 0.0)),
    (
        r"scan\(xs=...\): got one mutable array .* at \['a'\] and at \['b'\]",
        lambda: lx.scan(lambda c, _: (c, None), 0.0, {"a": ROWS, "b": ROWS}),
    ),
    (rf"lanes_map\(xs=...\): {IN_ROWS}", lambda: lx.lanes_map(lambda x: x, ROWS)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message[:40] for message, _ in REFUSED])
def test_refused_by_name(message: Any, call: Any) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        call()


def test_refused_before_anything_runs() -> None:
    """A reference among the xs that is closed over as well: nothing has been written when the error is raised."""
    other, rows = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.arange(3.0))

    def step(c: Any, row: Any) -> Any:
        rows[0] += 1.0
        other[...] += 1.0
        return c + row[...], None

    with pytest.raises(ValueError, match=r"f of scan closes over a mutable array .* among the xs as well"):
        lx.scan(step, 0.0, rows)
    np.testing.assert_array_equal(rows[...], np.arange(3.0))
    np.testing.assert_array_equal(other[...], 0.0)


def test_a_second_call_does_not_trace_again() -> None:
    rows, traces = jax.new_ref(jnp.asarray(XS)), []

    def step(c: Any, row: Any) -> Any:
        traces.append(None)
        row[...] += 1.0
        return c, None

    for _ in range(3):
        lx.scan(step, 0.0, rows)
    assert len(traces) == 1
    np.testing.assert_allclose(rows[...], XS + 3.0)
