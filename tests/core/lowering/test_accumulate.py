"""A step adds to the cotangents of what it reads in place: to the elements that it reads, and to no others."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.jaxpr.accumulate import summing_in_place
from loopax._src.core.jaxpr.util import equations_in
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


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@pytest.mark.parametrize("kind", ["residuals", "checkpointed"])
@pytest.mark.parametrize("name", slow_but("branch of a lane", "inner loop", of=NESTED))
def test_lanes(name: str, kind: str, lanes: str) -> None:
    """That stop at different steps, with arrays that they share, and with arrays of their own."""
    counts, starts = jnp.array([6, 0, 3, 1]), jnp.arange(8.0).reshape(4, 2) / 8
    lane = energy(READS[name], "fori", KINDS[kind] | {"lanes": lanes})
    shared = jax.jit(jax.grad(lambda *xs: jax.vmap(lane, (None, None, 0, 0))(*xs, counts).sum(), (0, 1, 2)))
    own = jax.jit(jax.vmap(jax.grad(lane, (0, 1, 2)), (None, None, 0, 0)))
    one = jax.jit(jax.grad(unrolled(READS[name]), (0, 1, 2)), static_argnums=3)
    expected = [one(TABLE, OTHER, start, n) for start, n in zip(starts, counts.tolist(), strict=True)]
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *expected)
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
