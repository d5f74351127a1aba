"""Rows, lengths and the room for outputs of a scan, where they do not fit together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import (
    RUN_TIME,
    SUM,
    raises,
    rows_up_to,
)
from tests.support.reference import assert_close


@pytest.mark.parametrize("length", [None, 2])
def test_xs_of_unequal_rows_lists_them(length: Any) -> None:
    with raises(ValueError, "xs", "['a']: 3 rows", "['b'][0]: 2 rows"):
        lx.scan(lambda c, _: (c, None), 0.0, {"a": jnp.zeros(3), "b": [jnp.zeros((2, 3))]}, length)


@pytest.mark.parametrize("scalar", [2.0, np.float32(1), jnp.zeros(())])
def test_xs_without_rows(scalar: Any) -> None:
    with raises(ValueError, "xs", "leading axis", "[1]: ") as error:
        lx.scan(lambda c, _: (c, None), 0.0, (jnp.zeros(3), scalar))
    assert "[0]" not in str(error.value)


@pytest.mark.parametrize("make", [int, np.int64, jnp.int32, jnp.int64, jnp.uint8])
def test_known_length_outside_of_xs_is_an_error_at_once(make: Any) -> None:
    for throw in (True, False):
        with raises(ValueError, "length", "got 4", "xs has 3 rows"):
            lx.scan(SUM, 0.0, jnp.arange(3.0), make(4), throw=throw)
    for xs in (None, jnp.arange(3.0)) if make is not jnp.uint8 else ():
        with raises(ValueError, "length", "got -1"):
            lx.scan(lambda c, _: (c, None), 0.0, xs, make(-1))


@pytest.mark.parametrize("length", [-1, np.int8(-1), np.uint8(4), np.uint64(2**63), np.int64(2**32)])
def test_traced_length_outside_of_xs_is_an_error_at_run_time(length: Any) -> None:
    with raises(RUN_TIME, f"`length` ({length}) is negative, or more than there is (xs has 3 rows)"):
        jax.block_until_ready(jax.jit(rows_up_to)(jnp.asarray(length)))
    if length == -1:
        with raises(RUN_TIME, "`length` (-1) is negative"):
            jax.block_until_ready(jax.jit(lambda n: lx.scan(lambda c, _: (c + 1, None), 0, length=n))(length))


def test_without_throw_a_length_beyond_xs_scans_what_there_is_and_says_so() -> None:
    program = jax.jit(lambda n: rows_up_to(n, throw=False, info=True))
    for length, steps, reached in ((4, 3, True), (3, 3, False), (0, 0, False)):
        (carry, _), info = program(length)
        assert (carry, info.num_steps, info.limit_reached) == (sum(range(steps)), steps, reached)


@pytest.mark.parametrize("length", [1.0, True, "3", jnp.float32(3), jnp.ones(1, int)])
def test_length_that_is_not_an_integer(length: Any) -> None:
    with raises(TypeError, "scan(length=...)", "expected"):
        lx.scan(lambda c, _: (c, None), 0.0, length=length)


def test_ys_without_capacity_where_only_stop_ends_a_scan() -> None:
    with raises(ValueError, "capacity", "max_steps"):
        lx.scan(lambda c, _: (c + 1, c), 0, stop=lambda c, _: c > 3)


def test_reverse_without_a_last_row() -> None:
    with raises(ValueError, "reverse=True", "`xs` or `length`"):
        lx.scan(lambda c, _: (c + 1, None), 0, reverse=True, stop=lambda c, _: c > 3)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_length_without_rows_ends_a_scan_that_could_stop(reverse: bool) -> None:
    """Without rows of xs there is no static bound, and the length is known only when the scan runs."""

    def count(n: Any, most: Any, **options: Any) -> Any:
        f = lambda c, x, **key: (c + 1, None)
        return lx.scan(f, 0, length=n, stop=lambda c, y: c >= most, reverse=reverse, info=True, **options)

    counted, with_keys = jax.jit(count), jax.jit(lambda n, m: count(n, m, key=jax.random.key(0)))
    for n, most, expected in [(0, 5, 0), (7, 5, 5), (7, 9, 7)]:
        (found, _), info = counted(n, most)
        assert (found, info.num_steps, with_keys(n, most)[0][0]) == (expected, expected, expected)
    assert_close(jax.vmap(count, (0, None))(jnp.array([0, 3, 7]), 5)[1].num_steps, jnp.array([0, 3, 5], jnp.int32))


def test_gradients_of_a_scan_that_a_length_without_rows_ends() -> None:
    power = lambda x, n: lx.scan(lambda c, _: (c * x, None), 1.0, length=n, stop=lambda c, y: c > 100)[0]
    gradient = jax.jit(jax.grad(power))
    assert gradient(2.0, 3) == 12.0
    assert gradient(2.0, 9) == 7 * 2.0**6
