"""What a buffer refuses, and what it says then."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.limited_loops import eagerly, raises
from tests.support.wrong_rows import WRONG_ROWS


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
    with raises(eqx.EquinoxRuntimeError, "no such row (", "buffer.count"):
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


@pytest.mark.parametrize(("row", "says"), WRONG_ROWS)
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
