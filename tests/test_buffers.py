"""Buffers: rows that a loop appends when it likes are what a Python list of them is, in every transformation."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.complex_steps import gradient, value_and_gradient
from tests.support.program_text import copies_of
from tests.support.reference import assert_close

CAPACITY, BOUND = 12, 20
REVERSE_KINDS = ["checkpointed", lx.Checkpointed(3), "bounded", "residuals", "auto"]
XS = np.array([[0.3, 0.7], [0.1, 0.2], [0.5, 1.0], [2.0, 0.1]])
STEPS, X = np.array([11, 4, 7, 17], np.int32), XS[0]


def loss(steps: Any, x: Any, **options: Any) -> Any:
    """Appends every third state, and reads the first and the last row."""

    def body(i: Any, c: Any) -> Any:
        buffer, h = c
        h = jnp.sin(h) + 0.5 * buffer[-1]["h"] + 0.1 * buffer[0]["h"] * buffer[-1]["i"].astype(float)
        return buffer.append({"h": h, "i": i}, when=i % 3 == 0), h

    options = {"max_steps": BOUND, **options}
    row = {"h": x, "i": jnp.int32(1)}
    buffer, h = lx.fori_loop(jnp.int32(0), steps, body, (lx.Buffer(CAPACITY, like=row).append(row), x), **options)
    return (buffer.rows["h"] ** 2).sum() + h.sum() + buffer[2]["h"].sum() + 0.5 * buffer.mask.sum().astype(float)


def loss_of_lists(steps: int, x: Any) -> Any:
    rows, h = [(x, 1)], x
    for i in range(steps):
        h = np.sin(h) + 0.5 * rows[-1][0] + 0.1 * rows[0][0] * rows[-1][1]
        if i % 3 == 0:
            rows.append((h, i))
    return sum((r**2).sum() for r, _ in rows) + h.sum() + rows[2][0].sum() + 0.5 * len(rows)


@pytest.mark.parametrize("kind", REVERSE_KINDS, ids=str)
def test_values_and_gradients(kind: Any) -> None:
    found = jax.jit(jax.value_and_grad(lambda x: loss(11, x, kind=kind)))(X)
    assert_close(found, value_and_gradient(ft.partial(loss_of_lists, 11), X))


# Second derivatives in a direction: a program for each is a third of that of a whole Hessian.


def gradient_in_each_lane(of_lane: Any) -> Any:
    return jax.vmap(jax.grad(of_lane, 1))


def gradient_of_all_lanes(of_lane: Any) -> Any:
    return lambda steps, xs: jax.grad(lambda xs: jax.vmap(of_lane)(steps, xs).sum())(xs)


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_finished_lanes_read_nothing_outside_of_the_domain(lanes: Any) -> None:
    """A lane that has finished must not divide by a row that it has not written."""

    def of_lane(steps: Any, x: Any) -> Any:
        body = lambda i, b: b.append(1.0 / b[i] + b[i])
        return lx.fori_loop(0, steps, body, lx.Buffer(8, like=x).append(x), max_steps=7, lanes=lanes).rows.sum()

    def alone(steps: int, x: Any) -> Any:
        rows = [x]
        for i in range(steps):
            rows.append(1.0 / rows[i] + rows[i])
        return sum(rows)

    assert_close(jax.jit(jax.vmap(jax.grad(of_lane, 1)))(*FINISHED), each_alone(alone))


FINISHED = np.array([2, 7, 0]), np.array([0.5, 2.0, 3.0])


def each_alone(alone: Any) -> np.ndarray:
    return np.stack([gradient(ft.partial(alone, n), x) for n, x in zip(*FINISHED, strict=True)])


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_finished_lanes_see_no_rows_that_they_have_not_written(lanes: Any) -> None:
    """All rows at once: those of a lane that has finished are fewer than the count of the lane that it follows."""

    def of_lane(steps: Any, x: Any) -> Any:
        def body(i: Any, b: Any) -> Any:
            inverse = 1.0 / jnp.where(b.mask, b.rows, 1.0)
            return b.append(jnp.where(b.mask, inverse, 0.0).sum() + x)

        return lx.fori_loop(0, steps, body, lx.Buffer(8, like=x).append(x), max_steps=7, lanes=lanes).rows.sum()

    def alone(steps: int, x: Any) -> Any:
        rows = [x]
        for _ in range(steps):
            rows.append(sum(1.0 / r for r in rows) + x)
        return sum(rows)

    wanted = each_alone(alone)
    both = lambda *given: (gradient_in_each_lane(of_lane)(*given), gradient_of_all_lanes(of_lane)(*given))
    assert_close(jax.jit(both)(*FINISHED), (wanted, wanted))


# ---- other loops, and outside of loops


def appended_in_jit(x: Any) -> Any:
    step = jax.jit(lambda b, x: b.append(x + b[0]))
    buffer = step(lx.Buffer(6, like=x).append(x), x)
    return lx.fori_loop(0, 3, lambda i, b: step(b, b[-1] * 2.0), buffer, kind="bounded").rows.sum()


def appended_to_a_list(x: Any) -> Any:
    rows = [x, 2 * x]
    for _ in range(3):
        rows.append(rows[-1] * 2.0 + rows[0])
    return sum(rows)


def test_in_jit_inside_of_the_body_and_outside_of_loops() -> None:
    assert_close(jax.value_and_grad(appended_in_jit)(0.7), value_and_gradient(appended_to_a_list, 0.7))


def test_with_jit_disabled() -> None:
    with jax.disable_jit():
        assert_close(jax.value_and_grad(appended_in_jit)(0.7), value_and_gradient(appended_to_a_list, 0.7))


# ---- what is stored


def temporary_bytes(kind: Any, capacity: int, steps: int) -> int:
    def f(x: Any) -> Any:
        body = lambda i, c: (c[0].append(c[1], when=i % 3 == 0), jnp.sin(c[1]) + c[0][-1])
        start = lx.Buffer(capacity, like=x).append(x), x
        return lx.fori_loop(0, steps, body, start, kind=kind)[1].sum()

    analysis = jax.jit(jax.grad(f)).lower(jax.ShapeDtypeStruct((8,), jnp.float64)).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("kind", [lx.Checkpointed(8), lx.Bounded(), lx.Residuals()], ids=str)
def test_versions_of_a_buffer_are_not_stored(kind: Any) -> None:
    """The buffer, its cotangent, and what is made of them outside of the loop: not one for each step or checkpoint."""
    row = 8 * 8
    growth = temporary_bytes(kind, 4096, 96) - temporary_bytes(kind, 1024, 96)
    assert growth <= 4 * row * (4096 - 1024)


@pytest.mark.parametrize("lanes", [False, True])
def test_rows_are_written_in_place(lanes: bool) -> None:
    shape = "f64[4,12,2]" if lanes else "f64[12,2]"
    f = jax.grad(loss, 1)
    f, arguments = (jax.vmap(f), (STEPS, XS)) if lanes else (f, (11, X))
    assert copies_of(shape, f, *arguments) == []


# ---- two loops, one in the other, append to one buffer


NESTED_STEPS, NESTED_X = np.array([5, 1, 3, 2], np.int32), XS[0]


def nested(steps: Any, x: Any, **options: Any) -> Any:
    """Both loops append to the same buffer, and read what the other one has appended."""

    def inner(j: Any, c: Any) -> Any:
        buffer, h = c
        h = jnp.cos(h) * buffer[-1]
        return buffer.append(h, when=j % 2 == 0), h

    def outer(i: Any, c: Any) -> Any:
        buffer, h = lx.fori_loop(0, i, inner, c, max_steps=6, **options)
        return buffer.append(h + i.astype(float) * buffer[0]), h

    start = lx.Buffer(30, like=x).append(x), x
    buffer, h = lx.fori_loop(0, steps, outer, start, max_steps=6, **options)
    return (buffer.rows**2).sum() + h.sum(), buffer.count


def lists(steps: int, x: Any) -> Any:
    rows, h = [x], x
    for i in range(steps):
        for j in range(i):
            h = np.cos(h) * rows[-1]
            if j % 2 == 0:
                rows.append(h)
        rows.append(h + i * rows[0])
    return rows, h


def nested_of_lists(steps: int, x: Any) -> Any:
    rows, h = lists(steps, x)
    return sum((r**2).sum() for r in rows) + h.sum()


@ft.cache
def of_lists(steps: int, lane: int) -> Any:
    """As `jax.value_and_grad(nested, 1, has_aux=True)` returns it."""
    value, slope = value_and_gradient(ft.partial(nested_of_lists, steps), XS[lane])
    return (value, np.int32(len(lists(steps, XS[lane])[0]))), slope


def gradients_alone() -> np.ndarray:
    return np.stack([of_lists(int(n), lane)[1] for lane, n in enumerate(NESTED_STEPS)])


SLOW = [pytest.param("checkpointed", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", [*SLOW, lx.Checkpointed(2), "bounded", "residuals"], ids=str)
def test_nested_loops_append_to_the_same_buffer(kind: Any) -> None:
    of_lane = jax.value_and_grad(lambda n, x: nested(n, x, kind=kind), 1, has_aux=True)
    assert_close(jax.jit(of_lane)(5, NESTED_X), of_lists(5, 0))
    alone = [of_lists(int(n), lane) for lane, n in enumerate(NESTED_STEPS)]
    assert_close(jax.jit(jax.vmap(of_lane))(NESTED_STEPS, XS), jax.tree.map(lambda *values: np.stack(values), *alone))


def test_in_lanes_that_run_freely() -> None:
    def f(steps: Any, x: Any) -> Any:
        inner = lambda j, b: b.append(jnp.cos(b[-1]) * b[0], when=j % 2 == 0)
        outer = lambda i, b: lx.fori_loop(0, i, inner, b, max_steps=6).append(b[-1] + i.astype(float))
        start = lx.Buffer(30, like=x).append(x)
        return (lx.fori_loop(0, steps, outer, start, max_steps=6, lanes="free").rows ** 2).sum()

    def alone(steps: int, x: Any) -> Any:
        rows = [x]
        for i in range(steps):
            last = rows[-1]
            for j in range(i):
                if j % 2 == 0:
                    rows.append(np.cos(rows[-1]) * rows[0])
            rows.append(last + i)
        return sum((row**2).sum() for row in rows)

    wanted = np.stack([gradient(ft.partial(alone, n), x) for n, x in zip(NESTED_STEPS, XS, strict=True)])
    assert_close(jax.jit(jax.vmap(jax.grad(f, 1)))(NESTED_STEPS, XS), wanted)


def test_in_a_queue_of_lanes() -> None:
    total = lambda xs: lx.lanes_map(lambda item: nested(*item)[0], (jnp.asarray(NESTED_STEPS), xs), num_lanes=2).sum()
    assert_close(jax.jit(jax.grad(total))(XS), gradients_alone())
