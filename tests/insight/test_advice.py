"""Each warning, where there is a reason for it and where there is none."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

import loopax as lx


def warned(function, *args, **options):
    """Names of the warnings and the lines that they name."""
    found = []
    with open(__file__) as file:
        lines = file.read().splitlines()
    for warning in lx.explain(function, *args, **options).warnings:
        assert "test_advice.py:" in warning.source
        found.append((warning.name, lines[int(warning.source.split(":")[1].split()[0]) - 1].strip()))
    return found


X = jnp.ones(8)


def by_index(i, x, rows):
    return jnp.sin(x), rows.at[i].set(x)  # written


def by_slices(i, x, rows):
    rows = lax.dynamic_update_index_in_dim(rows, x, i, 0)  # written
    return jnp.sin(x), rows


def under_a_constant_condition(i, x, rows):
    new = rows.at[i].set(x)  # written
    return jnp.sin(x), jnp.where(True, new, rows)


def with_rows_read(i, x, rows):
    x = jnp.sin(x + rows[i // 2])
    return x, rows.at[i].set(x)  # written


def of_rows(step, x, n=100):
    return lx.fori_loop(0, n, lambda i, c: step(i, *c), (x, jnp.zeros((100, 8))), max_steps=100)[1].sum()


def of_rows_in_jax(x):
    step = lambda c: (c[0] + 1, *by_slices(*c))
    return lax.while_loop(lambda c: c[0] < 100, step, (0, x, jnp.zeros((100, 8))))[2].sum()


def test_a_trajectory_in_the_carry():
    programs = [*(partial(of_rows, step) for step in (by_index, by_slices, under_a_constant_condition)), of_rows_in_jax]
    for program in programs:
        ((name, line),) = warned(program, X)
        assert (name, line.endswith("# written")) == ("trajectory-in-carry", True)
    mapped = jax.vmap(lambda x, n: of_rows(by_index, x, n))
    assert [name for name, _ in warned(mapped, jnp.ones((4, 8)), jnp.arange(4))] == ["trajectory-in-carry"]
    line = "return x, rows.at[i].set(x)  # written"
    assert warned(partial(of_rows, with_rows_read), X) == [("rows-written-in-carry", line)]


def test_no_rows_in_the_carry():
    """A stream, a buffer, a small array, and one that changes as a whole."""

    def carried(rows, step, n=100):
        return lambda x: lx.fori_loop(0, n, lambda i, c: (jnp.sin(c[0]), step(i, *c)), (x, rows))[0].sum()

    stream = lambda x: lx.scan(lambda x, _: (jnp.sin(x), x), x, length=100)[1].sum()
    buffer = carried(lx.Buffer(100, like=X), lambda i, x, rows: rows.append(x))
    small = carried(jnp.zeros(10), lambda i, x, rows: rows.at[i].set(x[0]), 10)
    whole = carried(jnp.zeros((100, 8)), lambda i, x, rows: (rows * 0.9).at[i].set(x))
    for program in (stream, buffer, small, whole):
        assert warned(program, X) == [], program


def test_a_round_trip_through_another_dtype():
    """A copy may be cast, and a leaf that does change."""

    def lossy(w, x):
        low = w.astype(jnp.bfloat16)
        x = jnp.tanh((x.astype(jnp.bfloat16) @ low).astype(x.dtype))
        return low.astype(w.dtype), x  # there and back

    copy = lambda w, x: (w, jnp.tanh(x @ w.astype(jnp.bfloat16).astype(w.dtype)))
    changes = lambda w, x: ((w.astype(jnp.bfloat16) * 2).astype(w.dtype), jnp.tanh(x @ w))
    found = [("dtype-round-trip", "return low.astype(w.dtype), x  # there and back")]
    for step, expected in ((lossy, found), (copy, []), (changes, [])):
        program = lambda w, x, step=step: lx.fori_loop(0, 5, lambda i, c: step(*c), (w, x))[1].sum()
        assert warned(program, jnp.ones((8, 8)), X) == expected


def test_a_batch_that_waits():
    lane = lambda loop, **options: jax.vmap(lambda x: loop(lambda x: x < 10.0, lambda x: x * 1.5, x, **options))
    for loop in (lx.while_loop, lax.while_loop):
        assert [name for name, _ in warned(lane(loop), jnp.ones(100))] == ["slowest-lane"]
    assert warned(lane(lx.while_loop), jnp.ones(8)) == []  # no more lanes than a device computes together
    assert warned(lane(lx.while_loop, lanes="compact"), jnp.ones(100)) == []
    assert warned(jax.vmap(lambda x: lx.fori_loop(0, 10, lambda i, x: x * 1.5, x)), jnp.ones(100)) == []
    inner = lambda i, x: lx.fori_loop(0, i, lambda j, x: x * 1.5, x)
    assert warned(jax.vmap(lambda n: lx.fori_loop(0, n, inner, 1.0, lanes="free")), jnp.arange(100)) == []


def deep(x, **options):
    def step(x, _):
        for _ in range(8):
            x = jnp.sin(jnp.exp(-(x**2)))
        return x, None

    scan = options.pop("scan", lx.scan)
    return scan(step, x, length=1000, **options)[0].sum()


def test_large_residuals():
    """None of another kind, of the choice of `Auto`, hardly any in all, no gradient, residuals like the carry."""
    x = jnp.ones(64)
    for options in ({"kind": "residuals"}, {"kind": "lax"}, {"scan": lax.scan}):
        (warning,) = lx.explain(lambda x, options=options: deep(x, **options), x).warnings
        assert warning.name == "large-residuals"
        assert "times the carry" in warning.message
        assert str(warning).startswith(warning.source)
        assert str(warning).endswith("[large-residuals]")
    light = lambda x: lx.fori_loop(0, 10_000, lambda i, x: jnp.sin(x), x, kind="residuals").sum()
    for program in (partial(deep, kind="bounded"), deep, lambda x: deep(lax.stop_gradient(x), kind="residuals"), light):
        assert lx.explain(program, x).warnings == ()
    assert lx.explain(partial(deep, kind="residuals"), jnp.ones(1)).warnings == ()
