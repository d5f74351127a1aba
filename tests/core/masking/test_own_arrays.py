"""Lanes that have finished keep what they write rows of: a step of a batch touches no more than the rows."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.core.batching.counting import alone
from tests.support.compiled import whole_arrays_in_loops
from tests.support.reference import assert_close

LANES, ROWS, WIDTH, MOST = 4, 40, 4, 6
ARRAYS = jnp.sin(jnp.arange(1.0 * LANES * ROWS * WIDTH)).reshape(LANES, ROWS, WIDTH)
LARGE = jnp.ones((LANES, 500, WIDTH))  # smaller arrays are copied within the time of an operation
STARTS, LENGTHS = jnp.array([0, 3, 1, 2], jnp.int32), jnp.array([6, 0, 4, 1], jnp.int32)


def other_row(x):
    return jnp.sin(x[2])


def sum_of_rows(x, first, start):
    """Of as many as their first elements say."""
    goes_on = lambda s: (s[0] < 5) & (x[s[0], 0] < 0.5)
    return lx.while_loop(goes_on, lambda s: (s[0] + 1, 0.5 * s[1] + x[s[0]]), (first, start), max_steps=5)[1]


# What a step makes of an array, given its number and that of its lane.
STEPS = {
    "row": lambda i, k, x: x.at[i + k + 1].set(jnp.sin(x[i + k])),
    "the same row in all lanes": lambda i, k, x: x.at[i + 1].set(jnp.sin(x[i] + x[k])),
    "two rows": lambda i, k, x: x.at[i].set(x[2 * i + k]).at[2 * i].set(jnp.cos(x[i]) * x[i + k]),
    "element": lambda i, k, x: x.at[i + k, 1].set(jnp.sin(x[i, 2]) + x[k, 0]),
    "rows": lambda i, k, x: x.at[jnp.array([i, i + 3])].set(jnp.sin(x[jnp.array([k, i + 2])])),
    "block": lambda i, k, x: lax.dynamic_update_slice(
        x, lax.dynamic_slice(x, (i, jnp.int32(2)), (2, 2)) * x[k, 0], (i + 37, jnp.int32(1))
    ),
    "clipped": lambda i, k, x: x.at[i + 37].set(jnp.sin(x[i + k]), mode="clip"),
    "dropped": lambda i, k, x: x.at[i + 37].add(jnp.sin(x[i + k]), mode="drop"),
    "added": lambda i, k, x: x.at[i + k].add(jnp.sin(x[i + 1])),
    "multiplied": lambda i, k, x: x.at[i + k].multiply(jnp.cos(x[i + 1])),
    "largest": lambda i, k, x: x.at[i + k].max(jnp.sin(2.0 * x[i + 1])),
    "chosen": lambda i, k, x: jnp.where(i % 2 == 0, x.at[i + 1].set(jnp.sin(x[k])), x.at[i].add(x[i + 1])),
    "branch": lambda i, k, x: lax.cond(i % 2 == 0, lambda x: x.at[i + k].set(jnp.sin(x[i])), lambda x: x, x),
    "branch of a lane": lambda i, k, x: lax.cond(
        (i + k) % 2 == 0, lambda x: (x.at[i + 1].set(jnp.sin(x[i])), x[k]), lambda x: (x.at[k].add(x[i + 2]), x[i]), x
    )[0],
    "branch that is given it twice": lambda i, k, x: lax.cond(
        (i + k) % 2 == 0, x, lambda x: x.at[i + 1].set(jnp.sin(x[k])), x, lambda x: x
    ),
    "branches": lambda i, k, x: lax.switch(
        i + k - 2,
        [lambda x: x.at[i].set(2.0 * x[i + 1]), lambda x: x, lambda x: x.at[k].set(x[i]).at[i].set(jnp.sin(x[k]))],
        x,
    ),
    "branch of a lane that makes two of one": lambda i, k, x: lax.select(
        i % 3 == 0,
        *lax.cond(
            (i + k) % 2 == 0, lambda x: (x.at[i].set(x[k]), x.at[k].set(x[i + 1])), lambda x: (x, x.at[i].add(x[k])), x
        ),
    ),
    "branch by what is in a row": lambda i, k, x: lx.cond(
        x[i, 0] > 0, lambda x: x.at[i + k].set(jnp.sin(x[i])), lambda x: x, x
    ),
    "call": lambda i, k, x: jax.jit(lambda x: x.at[i + k].set(jnp.sin(x[i])))(x),
    "checkpoint": lambda i, k, x: jax.checkpoint(lambda x: x.at[i + k].set(other_row(x) * x[i]))(x),
    "inner scan": lambda i, k, x: lax.scan(
        lambda x, j: (x.at[j + i].set(jnp.sin(x[k])), x[j]), x, jnp.arange(2, dtype=jnp.int32)
    )[0],
    "inner loop": lambda i, k, x: lx.fori_loop(0, i % 3, lambda j, x: x.at[j + k].add(jnp.sin(x[i])), x, max_steps=2),
    "inner loop with a predicate": lambda i, k, x: lx.while_loop(
        lambda s: s[0] < (i + k) % 3,
        lambda s: (s[0] + 1, s[1].at[s[0] + i].set(jnp.sin(s[1][k]))),
        (jnp.int32(0), x),
        max_steps=2,
    )[1],
    "branches of lanes, in an inner loop": lambda i, k, x: lx.fori_loop(
        0,
        (i + k) % 3,
        lambda j, x: lax.cond((i + j) % 2 == 0, lambda x: x.at[j + k].set(jnp.sin(x[i])), lambda x: x, x),
        x,
        max_steps=2,
    ),
    "inner loop that reads": lambda i, k, x: x.at[i + k].set(sum_of_rows(x, k, x[i])),
    "inner loop that reads, in an inner loop": lambda i, k, x: lx.fori_loop(
        0, (i + k) % 3, lambda j, x: x.at[i + j].set(sum_of_rows(x, k, x[j])), x, max_steps=2
    ),
    "inner loop that is reversible": lambda i, k, x: lx.fori_loop(
        0,
        2,
        lambda j, x: x.at[j + k].add(jnp.sin(x[i + 9])),
        x,
        kind=lx.Reversible(lambda j, x: x.at[j + k].add(-jnp.sin(x[i + 9]))),
    ),
    "a row and a sum of all": lambda i, k, x: x.at[i + k].set(jnp.sin(x.sum(0))),
    "sum": lambda i, k, x: x + jnp.zeros_like(x).at[i + k].set(jnp.sin(x[i])),
}
# All of an array is read, or stored for each step; or JAX's derivative of the operation is of all of it. The last is
# a conditional in which XLA leaves copies of the array from a place to the same place.
TOUCHES_ALL = {
    "branch of a lane that makes two of one",
    *("a row and a sum of all", "chosen", "checkpoint", "inner loop that is reversible", "branch by what is in a row"),
    *("multiplied", "largest", "rows"),
}


def by_number(step, options):
    """A loop of as many steps as a lane has."""
    return lambda x, k, n: lx.fori_loop(0, n, lambda i, x: step(i, k, x), x, max_steps=MOST, **options)


def from_a_start(step, options):
    """Lanes that start and end where they want, so that there are steps in which none is active."""
    return lambda x, k, n: lx.fori_loop(
        jnp.where(n == 6, 4, 0), jnp.where(n == 6, 6, n - 2), lambda i, x: step(i, k, x), x, max_steps=MOST, **options
    )


def by_predicate(step, options):
    """A loop that stops by what it carries."""

    def loop(x, k, n):
        body = lambda s: (s[0] + 1, step(s[0], k, s[1]))
        return lx.while_loop(lambda s: s[0] < n, body, (jnp.int32(0), x), max_steps=MOST, **options)[1]

    return loop


LOOPS = {"by number": by_number, "from a start": from_a_start, "by predicate": by_predicate}


def energy(f):
    return lambda x, *args: jnp.sum(jnp.exp(0.5 * f(x, *args)))


# Each loop, kind and way of lanes beside each other one, once.
FAST = {
    ("by number", "auto", "lockstep"),
    ("by predicate", "checkpointed", "lockstep"),
    ("by number", "auto", "compact"),
}
WAYS = [
    *sorted(FAST),
    *(
        pytest.param(*way, marks=pytest.mark.slow)
        for way in (
            ("by number", "residuals", "lockstep"),
            ("from a start", "auto", "lockstep"),
            ("from a start", "checkpointed", "compact"),
            ("by predicate", "residuals", "compact"),
            ("by predicate", "auto", "lockstep"),
        )
    ),
]


@ft.cache
def of_each_lane(name, loop, kind):
    """The value and the gradient of each lane, as if it were alone: no batch asks how its lanes run."""
    f = LOOPS[loop](STEPS[name], {"kind": kind})
    return alone(lambda *args: (f(*args), jax.grad(energy(f))(*args)), ARRAYS, STARTS, LENGTHS)


@ft.cache
def second_of_each_lane(name, loop, kind):
    f = LOOPS[loop](STEPS[name], {"kind": kind})
    along_cosine = lambda x, *rest: jax.jvp(lambda x: jax.grad(energy(f))(x, *rest), (x,), (jnp.cos(x),))[1]
    return alone(along_cosine, ARRAYS, STARTS, LENGTHS)


@pytest.mark.parametrize(("loop", "kind", "lanes"), WAYS)
@pytest.mark.parametrize("name", STEPS)
def test_each_lane_is_as_if_it_were_alone(name, loop, kind, lanes):
    f = LOOPS[loop](STEPS[name], {"kind": kind, "lanes": lanes})
    of_all = lambda x: energy(jax.vmap(f))(x, STARTS, LENGTHS)
    of_each = lambda x: jax.vmap(jax.grad(energy(f)))(x, STARTS, LENGTHS)
    found = jax.jit(lambda x: (jax.vmap(f)(x, STARTS, LENGTHS), jax.grad(of_all)(x), of_each(x)))(ARRAYS)
    values, gradients = of_each_lane(name, loop, kind)
    assert_close(found, (values, gradients, gradients))
    if (loop, kind, lanes) in FAST and kind == "auto":
        second = jax.jit(lambda x: jax.jvp(jax.grad(of_all), (x,), (jnp.cos(x),))[1])(ARRAYS)
        assert_close(second, second_of_each_lane(name, loop, kind))


@pytest.mark.parametrize("outside", [True, False], ids=["gradient of the batch", "batch of gradients"])
@pytest.mark.parametrize("name", [name for name in STEPS if name not in TOUCHES_ALL])
def test_a_step_touches_rows_alone(name, outside):
    f = by_number(STEPS[name], {"lanes": "lockstep"})
    of_all = jax.grad(lambda x: energy(jax.vmap(f))(x, STARTS, LENGTHS))
    of_each = lambda x: jax.vmap(jax.grad(energy(f)))(x, STARTS, LENGTHS)
    text = jax.jit(of_all if outside else of_each).lower(LARGE).compile().as_text() or ""
    assert not whole_arrays_in_loops(text, *LARGE.shape)


@pytest.mark.parametrize("name", ["branch of a lane", "branches"])
def test_a_branch_of_a_lane_touches_rows_alone(name):
    """All lanes take the same number of steps, and branches of their own."""
    f = lambda x, k: lx.fori_loop(0, 4, lambda i, x: STEPS[name](i, k, x), x)
    of_all = jax.jit(jax.grad(lambda x: energy(jax.vmap(f))(x, STARTS)))
    assert not whole_arrays_in_loops(of_all.lower(LARGE).compile().as_text() or "", *LARGE.shape)
    each = jax.jit(jax.vmap(jax.grad(energy(f))))
    assert not whole_arrays_in_loops(each.lower(LARGE, STARTS).compile().as_text() or "", *LARGE.shape)
    expected = alone(jax.grad(energy(f)), LARGE, STARTS)
    assert_close((of_all(LARGE), each(LARGE, STARTS)), (expected, expected))


def test_constants_of_which_lanes_read_rows_are_not_filled():
    def f(table, k, n):
        body = lambda i, c: jnp.sin(c) + lax.fori_loop(0, 2, lambda j, c: c * table[i + j + k], c)
        return lx.fori_loop(0, n, body, jnp.ones(WIDTH), max_steps=MOST, lanes="lockstep")

    of_all = jax.jit(jax.grad(lambda x: energy(jax.vmap(f))(x, STARTS, LENGTHS)))
    assert not whole_arrays_in_loops(of_all.lower(LARGE).compile().as_text() or "", *LARGE.shape)
    assert_close(of_all(ARRAYS), alone(jax.grad(energy(f)), ARRAYS, STARTS, LENGTHS))


def test_rows_behind_the_last_that_a_lane_reads_have_no_root():
    def f(x, n):
        return lx.fori_loop(0, n, lambda i, x: x.at[i].set(jnp.sqrt(x[i])), x, max_steps=MOST, lanes="lockstep")

    is_read = jnp.arange(ROWS, dtype=jnp.int32)[None, :, None] < LENGTHS[:, None, None]
    arrays = jnp.where(is_read, 1.0 + ARRAYS**2, -1.0)
    with jax.debug_nans(True):
        summed = jax.jit(jax.grad(lambda x: jax.vmap(f)(x, LENGTHS).sum()))(arrays)
        each = jax.jit(jax.vmap(jax.grad(lambda *args: f(*args).sum())))(arrays, LENGTHS)
    assert_close(summed, jnp.where(is_read, 0.5 / jnp.sqrt(jnp.abs(arrays)), 1.0))
    assert_close(each, summed)


@pytest.mark.parametrize("lanes", [0, 1])
def test_few_lanes(lanes):
    f = by_number(STEPS["branch of a lane"], {"lanes": "lockstep"})
    gradient = jax.jit(jax.grad(lambda x: energy(jax.vmap(f))(x, STARTS[:lanes], LENGTHS[:lanes])))(ARRAYS[:lanes])
    each = [jax.grad(energy(f))(*args) for args in zip(ARRAYS[:lanes], STARTS, LENGTHS, strict=False)]
    assert_close(gradient, np.reshape(each, (lanes, ROWS, WIDTH)))
