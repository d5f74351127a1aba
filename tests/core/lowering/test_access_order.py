"""A step that reads and writes rows of a large array in the carry copies it in no direction."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

import loopax as lx
from loopax._src.core.jaxpr.access_order import reading_first
from tests.support.compiled import whole_arrays_in_loops
from tests.support.reference import assert_close

ROWS, WIDTH, STEPS = 640, 4, 7
ARRAY = jnp.sin(jnp.arange(ROWS * WIDTH, dtype=float)).reshape(ROWS, WIDTH)
START = jnp.array([0.3, -0.2, 0.1, 0.5])


def f(x: Any) -> Any:
    return 1.1 * jnp.sin(x)


def swap(i: Any, x: Any, a: Any) -> Any:
    j = (i * 31) % ROWS
    return x, a.at[i].set(a[j] * x).at[j].set(f(a[i]))


def in_a_branch(i: Any, x: Any, a: Any) -> Any:
    return f(x), lax.cond(i % 2 == 0, lambda a: a.at[i + 1].set(x * a[i]).at[i].add(x), lambda a: a, a)


def inner(loop: Any) -> Any:
    return lambda i, x, a: (x, loop(0, 2, lambda j, a: a.at[i + j + 1].set(f(a[i + j]) * a[i]), a))


# (number of the step, carried vector, carried array) -> both
STEPS_OF = {
    "trajectory": lambda i, x, a: (f(x), a.at[i + 1].set(f(x))),
    "trajectory that is read": lambda i, x, a: (x, a.at[i + 1].set(f(a[i]) * x)),
    "slices": lambda i, x, a: (
        x,
        lax.dynamic_update_slice_in_dim(a, f(lax.dynamic_slice_in_dim(a, i, 2)), 2 * i + 1, 0),
    ),
    "sums": lambda i, x, a: (f(x) + a[i], a.at[(7 * i) % ROWS].add(x)),
    "neighbours": lambda i, x, a: (x + a[i], a.at[i + 1].set(f(a[i + 1]) + 0.5 * jnp.cos(a[i]) * a[i + 2])),
    "the last rows": lambda i, x, a: (x, a.at[i % 3].set(f(a[(i + 1) % 3]) * a[(i + 2) % 3] * x)),
    "an element": lambda i, x, a: (x, a.at[i + 1, 3].set(jnp.sin(a[i, 3]) + a[i, 2] * x[0])),
    "rows at once": lambda i, x, a: (
        x,
        a.at[jnp.stack([i, i + 2])].set(f(a[jnp.stack([i + 1, i + 2])]), unique_indices=True),
    ),
    "rows that may be outside": lambda i, x, a: (
        x + a.at[ROWS - 3 + i].get(mode="fill", fill_value=0.5),
        a.at[ROWS - 3 + i].add(x * a[i], mode="drop"),
    ),
    "a factor": lambda i, x, a: (x + a[i], a.at[i - 3].multiply(x)),
    "swap": swap,
    "a branch": in_a_branch,
    "a branch by what is read": lambda i, x, a: (
        f(x),
        lax.cond(a[i, 0] > 0, lambda a: a.at[i + 1].set(x * f(a[i])), lambda a: a, a),
    ),
    "a branch of loopax": lambda i, x, a: (
        x * a[i],
        lx.cond(a[i, 0] > 0, lambda a: a.at[i + 1].set(x * f(a[i])), lambda a: a, a),
    ),
    "an inner loop of lax": inner(lax.fori_loop),
    "an inner loop": inner(lx.fori_loop),
}
LOOPS = {
    "fori": lambda body, s, **options: lx.fori_loop(0, STEPS, body, s, **options),
    "while": lambda body, s, **options: lx.while_loop(
        lambda c: c[0] < STEPS, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), s), max_steps=STEPS + 2, **options
    )[1],
}
KINDS: dict[str, Any] = {
    "auto": {},
    "residuals": {"kind": "residuals"},
    "bounded": {"kind": "bounded"},
    "checkpointed": {"kind": lx.Checkpointed(3)},
    "unbounded": {"kind": lx.Checkpointed(3), "max_steps": None},
}
EACH_STEP = pytest.mark.parametrize("name", STEPS_OF)


def energy(name: str, run: Any, options: Any) -> Any:
    """A function of both leaves of the carry at first."""

    def of(start: Any, array: Any) -> Any:
        x, a = run(lambda i, s: STEPS_OF[name](i, *s), (start, array), **options)
        return jnp.vdot(x, START) + jnp.vdot(a, jnp.cos(ARRAY))

    return of


def unrolled(body: Any, s: Any) -> Any:
    for i in range(STEPS):
        s = body(jnp.int32(i), s)
    return s


FAST = {("auto", "fori"), ("checkpointed", "while")}
LOOPS_OF_KINDS = [
    pytest.param(kind, loop, marks=[] if (kind, loop) in FAST else pytest.mark.slow)
    for kind in KINDS
    for loop in LOOPS
    if (kind, loop) != ("unbounded", "fori")
]


def derivatives(of: Any) -> Any:
    first = jax.value_and_grad(of, (0, 1))
    second = lambda x, a: jax.jvp(jax.grad(of, (0, 1)), (x, a), (START, 0.5 * ARRAY))
    return jax.jit(lambda x, a: (first(x, a), second(x, a)))(START, ARRAY)


@ft.cache
def of_the_unrolled_loop(name: str) -> Any:
    return derivatives(energy(name, unrolled, {}))


@pytest.mark.parametrize(("kind", "loop"), LOOPS_OF_KINDS)
@EACH_STEP
def test_derivatives_are_those_of_the_unrolled_loop(name, kind, loop):
    options = KINDS[kind]
    if loop == "while" and "max_steps" in options:
        run = lambda body, s, kind, max_steps: lx.while_loop(
            lambda c: c[0] < STEPS, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), s), kind=kind
        )[1]
    else:
        run = LOOPS[loop]
    assert_close(derivatives(energy(name, run, options)), of_the_unrolled_loop(name), 1e-4)


@pytest.mark.parametrize("kind", ["auto", pytest.param("checkpointed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in STEPS_OF if name != "a factor"])  # JAX multiplies whole arrays there
def test_nothing_touches_the_whole_array_in_a_step(name, kind):
    of = energy(name, LOOPS["fori"], KINDS[kind])
    text = jax.jit(jax.grad(of, (0, 1))).lower(START, ARRAY).compile().as_text() or ""
    assert not whole_arrays_in_loops(text, ROWS, WIDTH)


def test_a_step_whose_reads_come_first_stays_as_it_is():
    body = lambda a, i: a.at[i + 1].set(f(a[i]) * a[i + 2])
    closed = jax.make_jaxpr(body)(ARRAY, jnp.int32(0))
    assert reading_first(closed, 0) is closed
    small = jax.make_jaxpr(lambda a, i: (a[i] * 2, a.at[i].set(0.0)))(ARRAY[:20], jnp.int32(0))
    assert reading_first(small, 0) is small


def test_a_read_behind_the_write_and_one_of_both_versions():
    def body(i: Any, s: Any) -> Any:
        x, a = s
        b = a.at[i].set(f(x))
        j = jnp.int32(b[i, 0] > 0) + i  # a place that depends on the write
        return x + a[j] + b[i + 1], b

    of = lambda x, a: lx.fori_loop(0, STEPS, body, (x, a))[0].sum()
    expected = lambda x, a: unrolled(body, (x, a))[0].sum()
    assert_close(jax.grad(of, (0, 1))(START, ARRAY), jax.grad(expected, (0, 1))(START, ARRAY), 1e-5)


def test_the_order_of_effects_stays():
    """A place to read, which must come before the write, is asked of a function behind another effect."""
    log = []

    def place(i: Any) -> Any:
        log.append(f"asked {i}")
        return i

    def body(i: Any, s: Any) -> Any:
        x, a = s
        b = a.at[i].set(f(x))
        io_callback(lambda i: log.append(f"told {i}"), None, i, ordered=True)
        j = io_callback(place, jax.ShapeDtypeStruct((), i.dtype), i, ordered=True)
        return x + a[j], b

    x, _ = jax.block_until_ready(lx.fori_loop(0, 2, body, (START, ARRAY)))
    jax.effects_barrier()
    assert log == ["told 0", "asked 0", "told 1", "asked 1"]
    assert_close(x, START + ARRAY[0] + ARRAY[1], 1e-12)
