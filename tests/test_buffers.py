"""Buffers: rows that a loop appends when it likes are what a Python list of them is, in every transformation."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.limited_loops import eagerly, raises
from tests.support.reference import assert_close

CAPACITY, BOUND = 12, 20
REVERSE_KINDS = ["checkpointed", lx.Checkpointed(3), "bounded", "residuals", "auto"]
X = jnp.array([0.3, 0.7])
STEPS, XS = jnp.array([11, 4, 7, 17], jnp.int32), jnp.array([[0.3, 0.7], [0.1, 0.2], [0.5, 1.0], [2.0, 0.1]])


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
        h = jnp.sin(h) + 0.5 * rows[-1][0] + 0.1 * rows[0][0] * rows[-1][1]
        if i % 3 == 0:
            rows.append((h, i))
    return sum((r**2).sum() for r, _ in rows) + h.sum() + rows[2][0].sum() + 0.5 * len(rows)


def lanes_of_lists(function: Any) -> Any:
    """Lane by lane."""
    return jnp.stack([function(int(n), x) for n, x in zip(STEPS, XS, strict=True)])


@pytest.mark.parametrize("kind", REVERSE_KINDS)
def test_values_and_derivatives(kind: Any) -> None:
    of_buffer = lambda x: loss(11, x, kind=kind)
    of_lists = lambda x: loss_of_lists(11, x)
    assert_close(jax.jit(jax.value_and_grad(of_buffer))(X), jax.value_and_grad(of_lists)(X))
    hessian = jax.hessian(of_lists)(X)
    assert_close(jax.jacfwd(jax.jacrev(of_buffer))(X), hessian)
    assert_close(jax.jacrev(jax.jacfwd(of_buffer))(X), hessian)
    assert_close(jax.jacrev(jax.jacrev(of_buffer))(X), hessian)


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@pytest.mark.parametrize("kind", REVERSE_KINDS)
def test_lanes_have_counts_of_their_own(kind: Any, lanes: Any) -> None:
    wanted = lanes_of_lists(jax.grad(loss_of_lists, 1))
    of_lane = lambda n, x: loss(n, x, kind=kind, lanes=lanes)
    assert_close(jax.vmap(jax.grad(of_lane, 1))(STEPS, XS), wanted)
    assert_close(jax.grad(lambda xs: jax.vmap(of_lane)(STEPS, xs).sum())(XS), wanted)


def test_lanes_with_one_count() -> None:
    wanted = jnp.stack([jax.grad(loss_of_lists, 1)(7, x) for x in XS])
    assert_close(jax.vmap(jax.grad(loss, 1), in_axes=(None, 0))(jnp.int32(7), XS), wanted)


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_hessian_of_lanes(lanes: Any) -> None:
    wanted = lanes_of_lists(lambda n, x: jax.hessian(lambda x: loss_of_lists(n, x))(x))
    of_lane = lambda n, x: jax.hessian(lambda x: loss(n, x, lanes=lanes))(x)
    assert_close(jax.vmap(of_lane)(STEPS, XS), wanted)


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


def nested_of_lists(steps: int, x: Any) -> Any:
    rows, h = [x], x
    for i in range(steps):
        for j in range(i):
            h = jnp.cos(h) * rows[-1]
            if j % 2 == 0:
                rows.append(h)
        rows.append(h + i * rows[0])
    return sum((r**2).sum() for r in rows) + h.sum(), jnp.int32(len(rows))


@pytest.mark.parametrize("kind", ["checkpointed", lx.Checkpointed(2), "bounded", "residuals"])
def test_nested_loops_append_to_the_same_buffer(kind: Any) -> None:
    of_lists = jax.value_and_grad(nested_of_lists, 1, has_aux=True)
    assert_close(jax.value_and_grad(lambda n, x: nested(n, x, kind=kind), 1, has_aux=True)(5, X), of_lists(5, X))
    steps = [5, 1, 3, 2]
    lanes = jax.vmap(jax.value_and_grad(lambda n, x: nested(n, x, kind=kind), 1, has_aux=True))(jnp.array(steps), XS)
    alone = [of_lists(n, x) for n, x in zip(steps, XS, strict=True)]
    assert_close(lanes, jax.tree.map(lambda *values: jnp.stack([jnp.asarray(v) for v in values]), *alone))


NESTED_STEPS = jnp.array([5, 1, 3, 2], jnp.int32)


def nested_alone() -> Any:
    of_lists = jax.grad(lambda n, x: nested_of_lists(n, x)[0], 1)
    return jnp.stack([of_lists(int(n), x) for n, x in zip(NESTED_STEPS, XS, strict=True)])


def test_in_lanes_that_run_freely() -> None:
    def f(lanes: Any, steps: Any, x: Any) -> Any:
        inner = lambda j, b: b.append(jnp.cos(b[-1]) * b[0], when=j % 2 == 0)
        outer = lambda i, b: lx.fori_loop(0, i, inner, b, max_steps=6).append(b[-1] + i.astype(float))
        start = lx.Buffer(30, like=x).append(x)
        return (lx.fori_loop(0, steps, outer, start, max_steps=6, lanes=lanes).rows ** 2).sum()

    gradient = jax.grad(f, 2)
    free = jax.vmap(lambda n, x: gradient("free", n, x))(NESTED_STEPS, XS)
    alone = [gradient("lockstep", n, x) for n, x in zip(NESTED_STEPS, XS, strict=True)]
    assert_close(free, jnp.stack(alone))


def test_in_a_queue_of_lanes() -> None:
    total = lambda xs: lx.lanes_map(lambda item: nested(*item)[0], (NESTED_STEPS, xs), lanes=2).sum()
    assert_close(jax.grad(total)(XS), nested_alone())


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_lanes_of_lanes(lanes: Any) -> None:
    lane = jax.grad(lambda n, x: nested(n, x, lanes=lanes)[0], 1)
    steps, xs = NESTED_STEPS.reshape(2, 2), XS.reshape(2, 2, 2)
    assert_close(jax.vmap(jax.vmap(lane))(steps, xs).reshape(4, 2), nested_alone())


def test_in_a_checkpoint_inside_of_the_body() -> None:
    def f(x: Any) -> Any:
        @jax.checkpoint
        def body(i: Any, c: Any) -> Any:
            buffer, h = lx.fori_loop(0, i, lambda _, c: (c[0].append(c[1]), jnp.sin(c[1]) + c[0][0]), c, max_steps=4)
            return buffer.append(h * buffer[-1]), h

        return lx.fori_loop(0, 3, body, (lx.Buffer(8, like=x).append(x), x))[0].rows.sum()

    def of_lists(x: Any) -> Any:
        rows, h = [x], x
        for i in range(3):
            for _ in range(i):
                rows.append(h)
                h = jnp.sin(h) + rows[0]
            rows.append(h * rows[-1])
        return jnp.stack(rows).sum()

    assert_close(jax.value_and_grad(f)(X), jax.value_and_grad(of_lists)(X))


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

    steps, xs = jnp.array([2, 7, 0]), jnp.array([0.5, 2.0, 3.0])
    wanted = jnp.stack([jax.grad(alone, 1)(int(n), x) for n, x in zip(steps, xs, strict=True)])
    assert_close(jax.vmap(jax.grad(of_lane, 1))(steps, xs), wanted)


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

    steps, xs = jnp.array([2, 7, 0]), jnp.array([0.5, 2.0, 3.0])
    wanted = jnp.stack([jax.grad(alone, 1)(int(n), x) for n, x in zip(steps, xs, strict=True)])
    assert_close(jax.vmap(jax.grad(of_lane, 1))(steps, xs), wanted)
    assert_close(jax.grad(lambda xs: jax.vmap(of_lane)(steps, xs).sum())(xs), wanted)


def test_while_loop_and_scan() -> None:
    def appended(x: Any) -> Any:
        count = lambda b: b.count < 5
        buffer = lx.while_loop(count, lambda b: b.append(jnp.sin(b[-1]) * 2.0), lx.Buffer(5, like=x).append(x))
        buffer, last = lx.scan(lambda b, y: (b, b[-1] * y), buffer, jnp.arange(3.0))
        return buffer.rows.sum() + last.sum()

    def of_lists(x: Any) -> Any:
        rows = [x]
        while len(rows) < 5:
            rows.append(jnp.sin(rows[-1]) * 2.0)
        return sum(rows) + rows[-1] * 3.0

    assert_close(jax.value_and_grad(appended)(0.3), jax.value_and_grad(of_lists)(0.3))


def test_in_jit_inside_of_the_body_and_outside_of_loops() -> None:
    step = jax.jit(lambda b, x: b.append(x + b[0]))

    def f(x: Any) -> Any:
        buffer = step(lx.Buffer(6, like=x).append(x), x)
        return lx.fori_loop(0, 3, lambda i, b: step(b, b[-1] * 2.0), buffer, kind="bounded").rows.sum()

    def g(x: Any) -> Any:
        rows = [x, 2 * x]
        for _ in range(3):
            rows.append(rows[-1] * 2.0 + rows[0])
        return sum(rows)

    assert_close(jax.value_and_grad(f)(0.7), jax.value_and_grad(g)(0.7))
    with jax.disable_jit():
        assert_close(jax.value_and_grad(f)(0.7), jax.value_and_grad(g)(0.7))


def test_a_finished_buffer_is_read_in_another_loop() -> None:
    def f(x: Any) -> Any:
        filled = lx.fori_loop(0, 5, lambda i, b: b.append(x * i.astype(float)), lx.Buffer(5, like=x))
        return lx.fori_loop(0, 4, lambda i, s: s + filled[i] * filled[i + 1], jnp.zeros(()), kind="bounded")

    g = lambda x: sum((x * i) * (x * (i + 1)) for i in range(4))
    assert_close(jax.value_and_grad(f)(0.7), jax.value_and_grad(g)(0.7))
    xs = jnp.array([0.7, 2.0])
    assert_close(jax.vmap(jax.grad(f))(xs), jax.vmap(jax.grad(g))(xs))


def test_lanes_that_share_a_buffer() -> None:
    filled = lx.Buffer(4, like=1.0).append(0.5).append(2.0).append(3.0)

    def f(steps: Any, b: Any) -> Any:
        return lx.fori_loop(0, steps, lambda i, s: s + jnp.sin(b[i]) * i.astype(float), jnp.zeros(()), max_steps=3)

    def total(b: Any) -> Any:
        return jax.vmap(f, in_axes=(0, None))(jnp.array([3, 1, 2]), b).sum()

    wanted = jnp.array([0.0, 2 * jnp.cos(2.0), 2 * jnp.cos(3.0), 0.0])
    assert_close(jax.grad(total, allow_int=True)(filled)._rows, wanted)


def test_reset_in_the_body() -> None:
    """A body may return a new buffer."""

    def f(x: Any) -> Any:
        def body(i: Any, b: Any) -> Any:
            return lx.Buffer(3, like=x).append(b[-1] * x).append(x)

        return lx.fori_loop(0, 3, body, lx.Buffer(3, like=x).append(x)).rows.sum()

    assert_close(jax.value_and_grad(f)(0.5), (jnp.array(0.75), jnp.array(2.0)))


# ---- what is stored


def temporary_bytes(kind: Any, capacity: int, steps: int) -> int:
    def f(x: Any) -> Any:
        body = lambda i, c: (c[0].append(c[1], when=i % 3 == 0), jnp.sin(c[1]) + c[0][-1])
        start = lx.Buffer(capacity, like=x).append(x), x
        return lx.fori_loop(0, steps, body, start, kind=kind)[1].sum()

    analysis = jax.jit(jax.grad(f)).lower(jnp.ones(8)).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("kind", [lx.Checkpointed(8), lx.Bounded(), lx.Residuals()])
def test_versions_of_a_buffer_are_not_stored(kind: Any) -> None:
    """The buffer, its cotangent, and what is made of them outside of the loop: not one for each step or checkpoint."""
    row = 8 * 8
    growth = temporary_bytes(kind, 4096, 96) - temporary_bytes(kind, 1024, 96)
    assert growth <= 4 * row * (4096 - 1024)


def copies_of(shape: str, function: Any, *arguments: Any) -> list[str]:
    """Copies of an array of this shape in the compiled program, where no loop is within: in single steps.

    Where a block of steps begins, XLA of JAX 0.12 makes one, which weighs little beside the steps of the block.
    """
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    steps = [part for part in text.split("\n}\n") if " while(" not in part]
    return [line for part in steps for line in part.splitlines() if shape in line and " copy(" in line]


@pytest.mark.parametrize("lanes", [False, True])
def test_rows_are_written_in_place(lanes: bool) -> None:
    shape = "f64[4,12,2]" if lanes else "f64[12,2]"
    f = jax.grad(loss, 1)
    f, arguments = (jax.vmap(f), (STEPS, XS)) if lanes else (f, (11, X))
    assert copies_of(shape, f, *arguments) == []


# ---- errors


def test_beyond_the_capacity() -> None:
    full = lx.Buffer(2, like=1.0).append(1.0).append(2.0)
    with raises(eqx.EquinoxRuntimeError, "room for 2 rows", "capacity", "when="):
        full.append(3.0)
    with raises(eqx.EquinoxRuntimeError, "room for 2 rows"):
        lx.fori_loop(0, 3, lambda i, b: b.append(1.0), lx.Buffer(2, like=1.0))
    same = full.append(3.0, when=False)
    assert same.rows.tolist() == [1.0, 2.0]
    assert same.count == 2


def test_one_lane_beyond_the_capacity() -> None:
    f = lambda n: lx.fori_loop(0, n, lambda i, b: b.append(1.0), lx.Buffer(2, like=1.0), max_steps=4).count
    assert jax.vmap(f)(jnp.array([2, 0, 1])).tolist() == [2, 0, 1]
    with raises(eqx.EquinoxRuntimeError, "room for 2 rows"):
        jax.vmap(f)(jnp.array([2, 3, 1]))


@pytest.mark.parametrize("index", [1, -2])
def test_rows_that_are_not_there(index: int) -> None:
    buffer = lx.Buffer(3, like=1.0).append(1.0)
    with raises(eqx.EquinoxRuntimeError, "no such row yet", "buffer.count"):
        buffer[index]
    with raises(eqx.EquinoxRuntimeError, "no such row yet"):
        lx.fori_loop(0, 1, lambda i, c: (c[0], c[0][index]), (buffer, 0.0))


@pytest.mark.parametrize("index", [3, -4, np.int8(5), 2**40])
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_rows_that_there_cannot_be(index: Any, jit: Any) -> None:
    with raises(IndexError, f"buffer[{index}]", "3 rows at most, from -3 to 2"):
        jit(lambda buffer: buffer[index])(lx.Buffer(3, like=1.0))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64"])
def test_traced_indices_of_every_dtype(dtype: str) -> None:
    """None of them wraps to a row that is there."""
    limits = jnp.iinfo(dtype)
    buffer, window = lx.Buffer(2, like=1.0).append(3.0).append(4.0), lx.History(2, jnp.array([3.0, 4.0]))
    for rows in (buffer, window):
        read = eqx.filter_jit(lambda i, rows=rows: rows[i])
        assert [float(read(jnp.asarray(i, dtype))) for i in (0, 1)] == [3.0, 4.0]
        wrapping = [limits.min, limits.max, 2**31, 2**32, 2**32 + 1, -(2**32), 2**63]
        for index in {number for number in wrapping if limits.min <= number <= limits.max} - {0}:
            with raises(eqx.EquinoxRuntimeError, "[index] at", "there "):
                read(jnp.asarray(index, dtype))


def first_of(buffer: Any) -> Any:
    first, *_ = buffer
    return first


ITERATIONS: Any = {
    "for": lambda buffer: [row for row in buffer],  # noqa: C416, the statement
    "unpacking": lambda buffer: print(*buffer),
    "assignment": first_of,
    "list": list,
    "zip": lambda buffer: dict(zip(buffer, range(3), strict=False)),
    "iter": iter,
}


@pytest.mark.parametrize("how", ITERATIONS)
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_iteration_is_refused(how: str, jit: Any) -> None:
    ways = ["fori_loop(0, buffer.count", "scan(f, c, buffer.rows, length=buffer.count)", "buffer.rows"]
    with raises(TypeError, "a Buffer cannot be iterated over", *ways):
        jit(ITERATIONS[how])(lx.Buffer(3, like=1.0).append(1.0))


@pytest.mark.parametrize("ask", [len, reversed, lambda buffer: 1.0 in buffer])
def test_a_buffer_is_no_sequence_of_python(ask: Any) -> None:
    """The messages are Python's."""
    with pytest.raises(TypeError, match=r"no len|not reversible|not iterable|not a container"):
        jax.eval_shape(ask, lx.Buffer(3, like=1.0))


def test_what_the_message_says_to_do_instead() -> None:
    @jax.jit
    def sums(buffer: Any) -> Any:
        by_rows = lx.fori_loop(0, buffer.count, lambda i, c: c + buffer[i], 0.0)
        return by_rows, lx.scan(lambda c, x: (c + x, None), 0.0, buffer.rows, length=buffer.count)[0]

    assert sums(lx.Buffer(3, like=1.0).append(1.0).append(2.0)) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (jnp.ones(2, jnp.float32), ["the row itself", "float32[2]", "expected float64[2]", "astype"]),
        (jnp.ones(3), ["got float64[3]", "expected float64[2]"]),
        ((jnp.ones(2),), ["another structure"]),
        ("abc", ["'abc'"]),
    ],
)
def test_rows_that_do_not_match(row: Any, says: list[str]) -> None:
    with raises(TypeError, "Buffer.append", *says):
        lx.Buffer(3, like=jnp.ones(2)).append(row)


@pytest.mark.parametrize("add", [lx.Buffer(3, like=jnp.ones(2)).append, lx.History(3, like=jnp.ones(2)).push])
def test_advice_is_on_what_does_not_match(add: Any) -> None:
    advice = {"shape": jnp.ones((3, 2)), "dtype": jnp.ones(2, int)}
    for what, row in advice.items():
        with pytest.raises(TypeError) as raised:
            add(row)
        (other,) = advice.keys() - {what}
        *_, said = str(raised.value).splitlines()
        assert what in said
        assert other not in said


def test_a_float_is_no_integer() -> None:
    with raises(TypeError, "Buffer.append", "got float 0.5, expected int64[]"):
        lx.Buffer(2, like=3).append(0.5)


@pytest.mark.parametrize(
    ("capacity", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (jnp.int32(3), TypeError)]
)
def test_capacity_is_a_positive_int(capacity: Any, error: Any) -> None:
    with raises(error, "Buffer(capacity=...)"):
        lx.Buffer(capacity, like=1.0)


@pytest.mark.parametrize("like", ["abc", {"a": jax.random.key(0)}, print])
def test_rows_hold_arrays(like: Any) -> None:
    with raises(TypeError, "Buffer(like=...)", "arrays of numbers"):
        lx.Buffer(3, like=like)


@pytest.mark.parametrize("index", [1.0, slice(0, 1), None, True, jnp.ones(2, int)])
def test_one_row_at_a_time(index: Any) -> None:
    with raises(TypeError, "one at a time", "`.rows`"):
        lx.Buffer(3, like=1.0).append(1.0)[index]


def test_when_is_one_bool() -> None:
    with raises(TypeError, "Buffer.append(when=...)", "one bool"):
        lx.Buffer(3, like=1.0).append(1.0, when=jnp.ones(2, bool))


def by_cond(i: Any, b: Any) -> Any:
    return lax.cond(i > 1, lambda b: b.append(1.0), lambda b: b, b)


def by_where(i: Any, b: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(i > 1, new, old), b.append(1.0), b)


def by_scan(i: Any, b: Any) -> Any:
    return lax.scan(lambda b, x: (b.append(x), None), b, jnp.arange(2.0))[0]


@pytest.mark.parametrize(("body", "name"), [(by_cond, "cond"), (by_where, "select_n"), (by_scan, "scan")])
def test_ways_that_cannot_be_followed(body: Any, name: str) -> None:
    start = {"b": lx.Buffer(9, like=1.0)}
    with raises(TypeError, "body_fun of fori_loop", "['b']", name, "when="):
        lx.fori_loop(0, 3, lambda i, c: {"b": body(i, c["b"])}, start)
