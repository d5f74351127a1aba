"""What a history refuses, and what it says then."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src import history as module
from tests.support.limited_loops import raises
from tests.support.reference import assert_close
from tests.support.wrong_rows import WRONG_ROWS

START = np.array([[0.3, 0.7], [0.1, 0.2], [-0.5, 0.4]])


@pytest.fixture(params=["shifted", "ring"])
def storage(request: Any, monkeypatch: Any) -> str:
    """Small windows are shifted; with no limit on what is small, they are rings."""
    if request.param == "ring":
        monkeypatch.setattr(module, "RING_BYTES", 0)
    return request.param


@pytest.mark.parametrize(
    ("k", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (jnp.int32(3), TypeError)]
)
def test_k_is_a_positive_int(k: Any, error: Any) -> None:
    with raises(error, "History(k=...)"):
        lx.History(k, like=1.0)


def test_either_rows_or_like() -> None:
    for given in ({}, {"rows": START, "like": START[0]}):
        with raises(TypeError, "either `rows`", "or `like`"):
            lx.History(2, **given)
    with raises(TypeError, "`fill`", "Leave one of them out"):
        lx.History(2, START, fill=1.0)


@pytest.mark.parametrize(("fill", "got"), [(0.5, "0.5"), (jnp.ones(2, int), "int64[2]"), ("abc", "'abc'")])
def test_fill_is_a_number_of_their_type(fill: Any, got: str) -> None:
    with raises(TypeError, "History(fill=...)", "['i']", got, "expected int64[]"):
        lx.History(2, like={"i": 3, "x": jnp.ones(2)}, fill=fill)
    filled = lx.History(2, like={"i": 3, "x": jnp.ones(2)}, fill=1).rows
    assert_close(filled, {"i": jnp.ones(2, int), "x": jnp.ones((2, 2))})


def test_a_window_longer_than_the_data() -> None:
    with raises(ValueError, "History(4, rows)", "rows has 3 rows"):
        lx.History(4, START)


class Pair(eqx.Module):
    array: Any
    size: int


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ({"a": jnp.ones(3), "b": jnp.ones(2)}, ValueError, ["as many rows", "['a']: 3 rows", "['b']: 2 rows"]),
        ({"a": jnp.ones(3), "b": jnp.float64(1.0)}, ValueError, ["leading axis", "['b']: float64[]"]),
        (Pair(jnp.ones(3), 3), ValueError, ["leading axis", ".size"]),
        ({"a": "abc"}, TypeError, ["arrays of numbers", "['a']", "'abc'"]),
        (jax.random.split(jax.random.key(0), 3), TypeError, ["arrays of numbers", "key_data"]),
        ((), TypeError, ["expected arrays with at least 2 rows"]),
    ],
)
def test_rows_are_arrays_of_as_many_rows(rows: Any, error: Any, says: list[str]) -> None:
    with raises(error, "History", *says):
        lx.History(2, rows)


@pytest.mark.parametrize("like", ["abc", {"a": jax.random.key(0)}, print])
def test_a_row_is_made_of_arrays(like: Any) -> None:
    with raises(TypeError, "History(like=...)", "arrays of numbers"):
        lx.History(2, like=like)


@pytest.mark.parametrize(("row", "says"), WRONG_ROWS)
def test_rows_that_do_not_match(storage: str, row: Any, says: list[str]) -> None:
    with raises(TypeError, "History.push", *says):
        lx.History(2, START).push(row)


def test_a_float_is_no_integer() -> None:
    with raises(TypeError, "History.push", "got float 0.5, expected int64[]"):
        lx.History(2, like=3).push(0.5)


@pytest.mark.parametrize("index", [3, -4])
def test_rows_that_are_not_there(storage: str, index: int) -> None:
    window = lx.History(3, START).push(START[0])
    with raises(IndexError, f"history[{index}]", "3 rows at most, from -3 to 2"):
        window[index]
    with raises(eqx.EquinoxRuntimeError, "3 rows, from -3 to 2"):
        eqx.filter_jit(lambda i: window[i])(jnp.int32(index))
    with raises(eqx.EquinoxRuntimeError, "3 rows, from -3 to 2"):
        lx.fori_loop(index, index + 1, lambda i, c: (c[0], c[0][i]), (window, START[0]))


@pytest.mark.parametrize("index", [1.0, slice(0, 1), None, True, jnp.ones(2, int)])
def test_one_row_at_a_time(index: Any) -> None:
    with raises(TypeError, "one at a time", "`.rows`"):
        lx.History(3, START)[index]
