"""A step adds to the cotangents of what it reads in place: to the elements that it reads, and to no others."""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.accumulate import summing_in_place
from loopax._src.jax_internals import equations_in
from tests.support.compiled import temporary_of, whole_arrays_in_loops
from tests.support.reference import assert_close

ROWS, WIDTH, STEPS = 160, 2, 6
TABLE = jnp.sin(jnp.arange(ROWS * WIDTH, dtype=float)).reshape(ROWS, WIDTH)
OTHER = 0.5 * TABLE[::-1]
START = jnp.array([0.3, -0.2])


@jax.jit
def doubled_row(x: Any, i: Any) -> Any:
    return 2.0 * x[i]


def later(i: Any, *others: Any) -> Any:
    return sum((j.astype(jnp.int32) for j in others), i)


def beyond(i: Any) -> Any:
    return jnp.stack([i, ROWS + i])


def row_of_branches(c: Any, i: Any, x: Any, y: Any) -> Any:
    """One branch reads two rows of an array, another one row of both."""
    return lax.switch(i % 3, [lambda: x[i] * x[i + 1], lambda: y[i] + x[2 * i], lambda: c])


# What a step reads of two arrays, given its carry and its number.
READS = {
    "row": lambda c, i, x, y: c * x[i],
    "two rows": lambda c, i, x, y: c * x[i] + x[i + 1] * y[i],
    "a row twice": lambda c, i, x, y: c * x[i] + x[i],
    "last rows, beyond the end": lambda c, i, x, y: c * lax.dynamic_slice_in_dim(x, ROWS - 2 + i, 3).sum(0),
    "rows": lambda c, i, x, y: c * x[jnp.array([i, i + 1, 3 * i])].sum(0),
    "rows beyond the end": lambda c, i, x, y: (
        c + x.at[jnp.array([i, ROWS + i])].get(mode="fill", fill_value=1.0).sum(0)
    ),
    "clipped rows": lambda c, i, x, y: c + x.at[jnp.array([i, ROWS + i])].get(mode="clip").prod(0),
    "element": lambda c, i, x, y: c * x[i, i % WIDTH] - y[2 * i, 1],
    "column": lambda c, i, x, y: c * x[:, 0][i] + x[3:-3, 1][i + 1],
    "known rows": lambda c, i, x, y: c * x[4:7].sum(0) + y[-1],
    "table": lambda c, i, x, y: c + jnp.interp(c, jnp.arange(1.0 * ROWS), x[:, 0]),
    "branch": lambda c, i, x, y: c * lax.cond(i % 2 == 0, lambda: x[i], lambda: y[i]),
    "branches": row_of_branches,
    "branch of a lane": lambda c, i, x, y: c * lax.cond(c[0] > 0.5, lambda: x[i], lambda: y[i] * y[i + 1]),
    "branch of loopax": lambda c, i, x, y: c * lx.cond(i % 2 == 0, lambda: x[i], lambda: y[i]),
    "inner scan": lambda c, i, x, y: lax.scan(lambda c, j: (c * x[later(i, j)] + y[j], None), c, jnp.arange(2))[0],
    "inner loop": lambda c, i, x, y: lx.fori_loop(0, 2, lambda j, c: c * x[later(i, j)], c) + x[i],
    "inner loop of a traced length": lambda c, i, x, y: lx.fori_loop(
        0, i % 3, lambda j, c: c * x[later(i, j)] + y[i], c, max_steps=3
    ),
    "loops in loops": lambda c, i, x, y: lx.fori_loop(
        0, 2, lambda j, c: lax.scan(lambda c, k: (c * x[later(i, j, k)], None), c, jnp.arange(2))[0], c
    ),
    "jit": lambda c, i, x, y: c * doubled_row(x, i) - doubled_row(x, i + 1),
    "checkpoint": lambda c, i, x, y: jax.checkpoint(lambda x, c: jnp.sin(c * x[i] * x[i + 1]))(x, c),
    "known places": lambda c, i, x, y: c * lax.dynamic_slice(x, (3, 1), (2, 1)).sum() + jnp.where(True, y[i], x[1]),
    "where": lambda c, i, x, y: c + jnp.where(i % 2 == 0, x[i], y[i] * c),
}
LOOPS = {
    "scan": lambda step, c, n, **options: lx.scan(lambda c, i: (step(c, i), None), c, jnp.arange(STEPS), **options)[0],
    "fori": lambda step, c, n, **options: lx.fori_loop(0, n, lambda i, c: step(c, i), c, max_steps=STEPS, **options),
    "while": lambda step, c, n, **options: lx.while_loop(
        lambda c: c[1] < n, lambda c: (step(*c), c[1] + 1), (c, jnp.int32(0)), **options
    )[0],
}
KINDS = {
    "auto": {},
    "residuals": {"kind": "residuals"},
    "bounded": {"kind": "bounded"},
    "checkpointed": {"kind": lx.Checkpointed(2)},
    "truncated": {"derivative": lx.Truncated(last=4)},
}


def energy(read: Any, loop: str, options: Any) -> Any:
    """A function of both arrays, of the start and of the number of steps."""

    def of(x: Any, y: Any, start: Any, n: Any) -> Any:
        step = lambda c, i: jnp.sin(c) + 0.3 * read(c, i.astype(jnp.int32), x, y)
        end = LOOPS[loop](step, start, n, **options)
        return jnp.sum(end * jnp.array([1.0, -2.0]))

    return of


def unrolled(read: Any) -> Any:
    """A Python loop of these steps."""

    def of(x: Any, y: Any, start: Any, n: int) -> Any:
        c = start
        for i in range(n):
            c = jnp.sin(c) + 0.3 * read(c, jnp.int32(i), x, y)
        return jnp.sum(c * jnp.array([1.0, -2.0]))

    return of


def loops_in(program: Any) -> Any:
    """The bodies of loops and sweeps that go back, as they are compiled, with the first input of their carry."""
    for eqn in equations_in(program):
        if eqn.primitive is loop_p:
            loop = Loop(**eqn.params)
            yield loop.body, loop.carry_range.start
        elif eqn.primitive is reverse_sweep_p:
            sweep = ReverseSweep(**eqn.params)
            yield sweep.backward, sweep.carry_range.start


IN_PLACE = ("scatter-add", "scatter_add", "loop", "reverse_sweep", "scan", "cond")


def whole_arrays(gradient: Any, *arguments: Any) -> list[str]:
    """What in the bodies of a gradient's loops makes arrays as large as the table that are not changed in place."""
    program = jax.make_jaxpr(gradient)(*arguments)
    bodies = [summing_in_place(body, first) for body, first in loops_in(program)]
    made = [eqn for body in bodies for eqn in body.eqns if any(v.aval.size >= TABLE.size for v in eqn.outvars)]
    return [eqn.primitive.name for eqn in made if eqn.primitive.name not in IN_PLACE]


def slow_but(*fast: str, of: Any) -> list[Any]:
    """These names, all but some of them marked as slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in of]


@pytest.mark.parametrize("kind", slow_but("auto", "checkpointed", of=KINDS))
@pytest.mark.parametrize("name", READS)
def test_no_whole_array_is_made(name: str, kind: str) -> None:
    loop = "fori" if kind == "truncated" else "scan"
    gradient = jax.grad(energy(READS[name], loop, KINDS[kind]), (0, 1))
    assert whole_arrays(gradient, TABLE, OTHER, START, jnp.int32(STEPS)) == []


@pytest.mark.parametrize("name", slow_but("two rows", "column", "known places", "branches", of=READS))
def test_gradients(name: str) -> None:
    """Of all loops and kinds, with numbers of steps that are known and that are not."""
    read = READS[name]
    expected = jax.jit(jax.grad(unrolled(read), (0, 1, 2)), static_argnums=3)
    cases = [("scan", {}, STEPS), *(("fori", KINDS[kind], 5) for kind in ("auto", "residuals", "checkpointed"))]
    for loop, options, n in [*cases, ("while", KINDS["checkpointed"], 4)]:
        found = jax.jit(jax.grad(energy(read, loop, options), (0, 1, 2)))(TABLE, OTHER, START, jnp.int32(n))
        assert_close(found, expected(TABLE, OTHER, START, n))


NESTED = ["two rows", "rows beyond the end", "column", "branches", "branch of a lane", "branch of loopax", "inner loop"]
NESTED += ["loops in loops"]


@pytest.mark.parametrize("mode", ["forward over reverse", "reverse over reverse"])
@pytest.mark.parametrize("name", slow_but("branches", of=NESTED))
def test_second_derivatives(name: str, mode: str) -> None:
    ways = jax.tree.map(jnp.cos, (TABLE, OTHER, START))

    def product(f: Any) -> Any:
        gradient = lambda *operands: jax.grad(f, (0, 1, 2))(*operands, STEPS)
        if mode == "forward over reverse":
            return jax.jit(lambda *operands: jax.jvp(gradient, operands, ways)[1])
        along = lambda *operands: sum(jnp.vdot(a, b) for a, b in zip(gradient(*operands), ways, strict=True))
        return jax.jit(jax.grad(along, (0, 1, 2)))

    f = energy(READS[name], "scan", {"kind": lx.Checkpointed(2)})
    assert_close(product(f)(TABLE, OTHER, START), product(unrolled(READS[name]))(TABLE, OTHER, START))


COUNTS, STARTS = (6, 0, 3, 1), np.arange(8.0).reshape(4, 2) / 8


@cache
def of_lanes_alone(name: str) -> Any:
    """Gradients with respect to the arrays and the start, of lanes that are unrolled."""
    one = jax.jit(jax.grad(unrolled(READS[name]), (0, 1, 2)), static_argnums=3)
    lanes = [one(TABLE, OTHER, start, n) for start, n in zip(STARTS, COUNTS, strict=True)]
    return jax.tree.map(lambda *xs: np.stack(xs), *lanes)


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@pytest.mark.parametrize("kind", ["residuals", "checkpointed"])
@pytest.mark.parametrize("name", slow_but("branch of a lane", "inner loop", of=NESTED))
def test_lanes(name: str, kind: str, lanes: str) -> None:
    """That stop at different steps, with arrays that they share, and with arrays of their own."""
    counts, starts, expected = jnp.array(COUNTS), jnp.array(STARTS), of_lanes_alone(name)
    lane = energy(READS[name], "fori", KINDS[kind] | {"lanes": lanes})
    shared = jax.jit(jax.grad(lambda *xs: jax.vmap(lane, (None, None, 0, 0))(*xs, counts).sum(), (0, 1, 2)))
    own = jax.jit(jax.vmap(jax.grad(lane, (0, 1, 2)), (None, None, 0, 0)))
    assert_close(own(TABLE, OTHER, starts, counts), expected)
    of_lanes = lambda i, x: x if i == 2 else x.sum(0)
    assert_close(shared(TABLE, OTHER, starts), tuple(of_lanes(i, x) for i, x in enumerate(expected)))


@pytest.mark.parametrize("loop", [lax.fori_loop, lx.fori_loop])
def test_an_inner_loop_adds_to_the_sum_of_two_leaves(loop: Any) -> None:
    """It begins with one of them, to which the other is added before or after it."""
    zeros = lambda: jnp.zeros(ROWS * WIDTH)

    def body(i: Any, c: Any) -> Any:
        a, b, d, x = c
        adds = lambda: loop(0, 2, lambda j, z: z + zeros().at[i + j].set(x), zeros())
        return (a + b) + adds(), jnp.sin(b), adds() + (d + b), jnp.cos(x)

    expected = start = (zeros() + 1, zeros() + 2, zeros() + 3, jnp.array(0.3))
    for i in range(STEPS):
        expected = body(i, expected)
    assert_close(lx.fori_loop(0, STEPS, body, start), expected, 1e-12)


# Loops that read the same array, one after another: each adds to the cotangent that the others have begun.


def several(read: Any, loop: Any) -> Any:
    """Three loops; the last one begins with the table itself, too."""

    def of(x: Any, y: Any, start: Any) -> Any:
        step = lambda first: lambda i, c: jnp.sin(c) + 0.3 * read(c, jnp.int32(i + first), x, y)
        c = loop(0, 2, step(1), loop(0, 3, step(0), start))
        last, c = loop(0, 2, lambda i, both: (both[0].at[i].add(c), step(2)(i, both[1])), (x, c))
        return jnp.sum(c * jnp.array([1.0, -2.0])) + (last**2).sum()

    return of


def in_python(low: int, high: int, body: Any, c: Any) -> Any:
    """`fori_loop` of numbers that are known."""
    for i in range(low, high):
        c = body(jnp.int32(i), c)
    return c


@pytest.mark.parametrize("name", slow_but("two rows", of=NESTED))
def test_loops_that_read_the_same_arrays(name: str) -> None:
    f, reference = several(READS[name], lx.fori_loop), several(READS[name], in_python)
    starts, operands = jnp.arange(6.0).reshape(3, 2) / 6, (TABLE, OTHER, START)
    of_all, rows = (0, 1, 2), lambda f: lambda *xs: sum((x[:9] ** 2).sum() for x in jax.grad(f, of_all)(*xs))
    for way in (
        lambda f: jax.grad(f, of_all)(*operands),
        lambda f: jax.grad(jax.checkpoint(f), of_all)(*operands),
        lambda f: jax.vmap(jax.grad(f, of_all), (None, None, 0))(TABLE, OTHER, starts),
        lambda f: jax.grad(lambda *xs: jax.vmap(f, (None, None, 0))(*xs, starts).sum(), (0, 1))(TABLE, OTHER),
        lambda f: jax.jvp(jax.grad(f, of_all), operands, jax.tree.map(jnp.cos, operands)),
        lambda f: jax.grad(rows(f), of_all)(*operands),
    ):
        assert_close(jax.jit(partial(way, f))(), jax.jit(partial(way, reference))())


def test_loops_make_one_cotangent_of_a_table_together() -> None:
    def f(x: Any, c: Any) -> Any:
        for first in range(8):
            c = lx.fori_loop(0, 3, lambda i, c, first=first: jnp.sin(c * x[first + i]), c)
        return c.sum()

    table = jnp.ones((40_000, WIDTH))
    assert temporary_of(jax.grad(f), table, START) < table.nbytes / 10


def test_branches_that_read_rows_of_a_stack() -> None:
    """Experts, one for each lane: all add to one cotangent of the weights."""
    stack, routes, xs = jnp.sin(jnp.arange(4.0 * 256)).reshape(4, 16, 16), jnp.arange(12) % 3, jnp.ones((12, 16))
    branches = [lambda x, w, k=k: jnp.tanh(w[k] @ x) for k in range(4)]

    def loss(w: Any, lanes: Any) -> Any:
        return (jax.vmap(lambda k, x: lx.switch(k, branches, x, w, lanes=lanes))(routes, xs) ** 2).sum()

    expected = jax.grad(lambda w: (jnp.tanh(jnp.einsum("nij,nj->ni", w[routes], xs)) ** 2).sum())(stack)
    for lanes in ("lockstep", "compact"):
        gradient = jax.jit(jax.grad(partial(loss, lanes=lanes)))
        assert_close(gradient(stack), expected)
    program = gradient.lower(jnp.ones((64, 16, 16))).compile().as_text() or ""
    assert len(re.findall(r"= f\w+\[64,16,16\]\S* (?:broadcast|add|copy)\(", program)) <= 1


def test_a_loop_of_jax_adds_in_place_what_a_loop_in_it_reads() -> None:
    def f(x: Any, c: Any, outer: Any, inner: Any) -> Any:
        step = lambda c, i: (inner(0, 3, lambda j, c: jnp.sin(c * x[i + j] + x[2 * i]), c), None)
        return outer(step, c, jnp.arange(STEPS, dtype=jnp.int32))[0].sum()

    gradient = jax.grad(partial(f, outer=lax.scan, inner=lx.fori_loop), (0, 1))
    assert_close(gradient(TABLE, START), jax.grad(partial(f, outer=lax.scan, inner=in_python), (0, 1))(TABLE, START))
    program = jax.jit(gradient).lower(jnp.ones((40_000, WIDTH)), START).compile().as_text() or ""
    assert whole_arrays_in_loops(program, 40_000, WIDTH) == []
