"""A buffer to which two loops append, one in the other, is a Python list to which both append."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.complex_steps import gradient, value_and_gradient
from tests.support.reference import assert_close

XS = np.array([[0.3, 0.7], [0.1, 0.2], [0.5, 1.0], [2.0, 0.1]])
STEPS, X = np.array([5, 1, 3, 2], np.int32), XS[0]


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
    return np.stack([of_lists(int(n), lane)[1] for lane, n in enumerate(STEPS)])


SLOW = [pytest.param("checkpointed", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", [*SLOW, lx.Checkpointed(2), "bounded", "residuals"], ids=str)
def test_nested_loops_append_to_the_same_buffer(kind: Any) -> None:
    of_lane = jax.value_and_grad(lambda n, x: nested(n, x, kind=kind), 1, has_aux=True)
    assert_close(jax.jit(of_lane)(5, X), of_lists(5, 0))
    alone = [of_lists(int(n), lane) for lane, n in enumerate(STEPS)]
    assert_close(jax.jit(jax.vmap(of_lane))(STEPS, XS), jax.tree.map(lambda *values: np.stack(values), *alone))


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

    wanted = np.stack([gradient(ft.partial(alone, n), x) for n, x in zip(STEPS, XS, strict=True)])
    assert_close(jax.jit(jax.vmap(jax.grad(f, 1)))(STEPS, XS), wanted)


def test_in_a_queue_of_lanes() -> None:
    total = lambda xs: lx.lanes_map(lambda item: nested(*item)[0], (jnp.asarray(STEPS), xs), num_lanes=2).sum()
    assert_close(jax.jit(jax.grad(total))(XS), gradients_alone())
