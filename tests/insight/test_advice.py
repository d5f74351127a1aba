"""Each warning, where there is a reason for it and where there is none."""

import jax
import jax.numpy as jnp
import pytest
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


@pytest.mark.parametrize("step", [by_index, by_slices, under_a_constant_condition])
def test_a_trajectory_in_the_carry(step):
    ((name, line),) = warned(lambda x: of_rows(step, x), X)
    assert name == "trajectory-in-carry"
    assert line.endswith("# written")


def test_a_trajectory_in_a_loop_of_jax():
    step = lambda c: (c[0] + 1, *by_slices(*c))
    program = lambda x: lax.while_loop(lambda c: c[0] < 100, step, (0, x, jnp.zeros((100, 8))))[2].sum()
    line = "rows = lax.dynamic_update_index_in_dim(rows, x, i, 0)  # written"
    assert warned(program, X) == [("trajectory-in-carry", line)]


def test_a_trajectory_in_lanes_that_finish():
    mapped = jax.vmap(lambda x, n: of_rows(by_index, x, n))
    assert [name for name, _ in warned(mapped, jnp.ones((4, 8)), jnp.arange(4))] == ["trajectory-in-carry"]


def test_rows_that_are_read_as_well():
    line = "return x, rows.at[i].set(x)  # written"
    assert warned(lambda x: of_rows(with_rows_read, x), X) == [("rows-written-in-carry", line)]


def test_no_rows_in_the_carry():
    """A stream, a buffer, a small array, and one that changes as a whole."""

    def stream(x):
        return lx.scan(lambda x, _: (jnp.sin(x), x), x, length=100)[1].sum()

    def buffer(x):
        step = lambda i, c: (jnp.sin(c[0]), c[1].append(c[0]))
        return lx.fori_loop(0, 100, step, (x, lx.Buffer(100, like=x)))[0].sum()

    def small(x):
        step = lambda i, c: (jnp.sin(c[0]), c[1].at[i].set(c[0][0]))
        return lx.fori_loop(0, 10, step, (x, jnp.zeros(10)))[1].sum()

    def whole(x):
        step = lambda i, c: (jnp.sin(c[0]), (c[1] * 0.9).at[i].set(c[0]))
        return lx.fori_loop(0, 100, step, (x, jnp.zeros((100, 8))))[1].sum()

    for program in (stream, buffer, small, whole):
        assert warned(program, X) == [], program


def test_a_round_trip_through_another_dtype():
    def program(w, x):
        def step(i, c):
            w, x = c
            low = w.astype(jnp.bfloat16)
            x = jnp.tanh((x.astype(jnp.bfloat16) @ low).astype(x.dtype))
            return low.astype(w.dtype), x  # there and back

        return lx.fori_loop(0, 5, step, (w, x))[1].sum()

    assert warned(program, jnp.ones((8, 8)), X) == [
        ("dtype-round-trip", "return low.astype(w.dtype), x  # there and back")
    ]


def test_no_round_trip():
    """A copy is cast; a leaf that does change is cast."""

    def copy(w, x):
        step = lambda i, c: (c[0], jnp.tanh(c[1] @ c[0].astype(jnp.bfloat16).astype(c[0].dtype)))
        return lx.fori_loop(0, 5, step, (w, x))[1].sum()

    def changes(w, x):
        step = lambda i, c: ((c[0].astype(jnp.bfloat16) * 2).astype(c[0].dtype), jnp.tanh(c[1] @ c[0]))
        return lx.fori_loop(0, 5, step, (w, x))[1].sum()

    for program in (copy, changes):
        assert warned(program, jnp.ones((8, 8)), X) == []


@pytest.mark.parametrize("loop", [lx.while_loop, lax.while_loop], ids=["loopax", "lax"])
def test_a_batch_that_waits(loop):
    program = jax.vmap(lambda x: loop(lambda x: x < 10.0, lambda x: x * 1.5, x))
    assert [name for name, _ in warned(program, jnp.ones(100))] == ["slowest-lane"]
    assert warned(program, jnp.ones(8)) == []  # no more lanes than a device computes together


def test_a_batch_that_does_not_wait():
    compact = lambda x: lx.while_loop(lambda x: x < 10.0, lambda x: x * 1.5, x, lanes="compact")
    same = lambda x: lx.fori_loop(0, 10, lambda i, x: x * 1.5, x)
    for one in (compact, same):
        assert warned(jax.vmap(one), jnp.ones(100)) == []
    inner = lambda i, x: lx.fori_loop(0, i, lambda j, x: x * 1.5, x)
    free = lambda n: lx.fori_loop(0, n, inner, 1.0, lanes="free")
    assert warned(jax.vmap(free), jnp.arange(100)) == []


def deep(x, **options):
    def step(x, _):
        for _ in range(8):
            x = jnp.sin(jnp.exp(-(x**2)))
        return x, None

    scan = options.pop("scan", lx.scan)
    return scan(step, x, length=1000, **options)[0].sum()


def test_large_residuals():
    x = jnp.ones(64)
    for options in ({"kind": "residuals"}, {"kind": "lax"}, {"scan": lax.scan}):
        found = lx.explain(lambda x, options=options: deep(x, **options), x).warnings
        assert [warning.name for warning in found] == ["large-residuals"]
        assert "times the carry" in found[0].message


def test_no_large_residuals():
    """Another kind, the choice of `Auto`, hardly any in all, no gradient, and residuals like the carry."""
    x = jnp.ones(64)
    assert lx.explain(lambda x: deep(x, kind="bounded"), x).warnings == ()
    assert lx.explain(deep, x).warnings == ()
    assert lx.explain(lambda x: deep(x, kind="residuals"), jnp.ones(1)).warnings == ()
    assert lx.explain(lambda x: deep(lax.stop_gradient(x), kind="residuals"), x).warnings == ()
    light = lambda x: lx.fori_loop(0, 10_000, lambda i, x: jnp.sin(x), x, kind="residuals").sum()
    assert lx.explain(light, x).warnings == ()


def test_a_warning_in_a_line():
    program = jax.vmap(lambda x: lx.while_loop(lambda x: x < 10.0, lambda x: x * 1.5, x))
    (warning,) = lx.explain(program, jnp.ones(100)).warnings
    assert str(warning).startswith(warning.source)
    assert str(warning).endswith("[slowest-lane]")
    assert f"! {warning}" in " ".join(str(lx.explain(program, jnp.ones(100))).split())
