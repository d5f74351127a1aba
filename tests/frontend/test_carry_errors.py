"""Carries of other types or structures, functions and predicates that return something else: errors with the path."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import (
    raises,
)

# ---- the carry


def carry_through(loop: str, init: Any, out: Any) -> None:
    if loop == "body_fun of while_loop":
        lx.while_loop(lambda _: False, lambda _: out, init)
    elif loop == "body_fun of fori_loop":
        lx.fori_loop(0, 0, lambda _i, _c: out, init)
    else:
        lx.scan(lambda _c, _x: (out, None), init, length=0)


EACH_BODY = pytest.mark.parametrize("where", ["body_fun of while_loop", "body_fun of fori_loop", "f of scan"])


def f32(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.float32)


@EACH_BODY
@pytest.mark.parametrize(
    ("init", "out", "line"),
    [
        ({"a": f32(2)}, {"a": f32(3)}, "['a']: got float32[3], expected float32[2]"),
        ({"a": f32()}, {"a": f32(1)}, "['a']: got float32[1], expected float32[]"),
        ((f32(2), f32()), (f32(2), jnp.zeros((), jnp.int32)), "[1]: got int32[], expected float32[]"),
        (f32(), jnp.zeros(()), "the carry itself: got float64[], expected float32[]"),
        ([[f32()]], [["x"]], "[0][0]: got str 'x', expected float32[]"),
        ({"name": "relu"}, {"name": "tanh"}, "['name']: got str 'tanh', expected str 'relu'"),
        ({"name": "relu"}, {"name": f32()}, "['name']: got float32[], expected str 'relu'"),
        ((1.0, True), (1.0, 1), "[1]: got int 1, expected bool True"),
        ((f32(), f32()), (f32(), jax.random.key(0)), "[1]: got key<fry>[], expected float32[]"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "the carry itself: got key<rbg>[], expected key<fry>[]"),
        (jax.random.key(0), jax.random.PRNGKey(0), "the carry itself: got uint32[2], expected key<fry>[]"),
    ],
)
def test_carry_of_other_types_shows_path_got_and_expected(where: str, init: Any, out: Any, line: str) -> None:
    with raises(TypeError, where, "same types", line):
        carry_through(where, init, out)


@jax.tree_util.register_pytree_node_class
class Sized:
    """A size among the static data of a class, of which nothing tells its name."""

    def __init__(self, x: Any, size: int) -> None:
        self.x, self.size = x, size

    def tree_flatten(self) -> Any:
        return (self.x,), self.size

    @classmethod
    def tree_unflatten(cls, size: int, children: Any) -> "Sized":
        (x,) = children
        return cls(x, size)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["size"])
@dataclass
class Static:
    x: Any
    size: int


@EACH_BODY
@pytest.mark.parametrize(
    ("init", "out", "line"),
    [
        ({"a": f32(), "b": f32()}, {"a": f32()}, "['b']: float32[] is missing from the result"),
        ({"a": f32()}, {"a": f32(), "b": f32(2)}, "['b']: float32[2] is new in the result"),
        ((f32(),), (f32(), (f32(2),)), "[1]: tuple is new in the result"),
        ((f32(), None), (f32(), f32(4)), "[1]: got float32[4], expected None"),
        ((f32(), f32(4)), (f32(), None), "[1]: got None, expected float32[4]"),
        ((f32(),), [f32()], "the carry itself: got list, expected tuple"),
        ({"a": [f32()]}, {"a": f32()}, "['a']: got float32[], expected list"),
        (f32(), None, "the carry itself: got None, expected float32[]"),
        (Sized(f32(), 2), Sized(f32(), 3), "the carry itself: got Sized with the static data 3, expected 2"),
        (Static(f32(), 2), Static(f32(), 3), ".size: got 3, expected 2 (a static field)"),
    ],
)
def test_carry_of_another_structure_shows_the_difference(where: str, init: Any, out: Any, line: str) -> None:
    with raises(TypeError, where, "same structure", line):
        carry_through(where, init, out)


@EACH_BODY
def test_carry_error_lists_all_bad_leaves_and_no_good_one(where: str) -> None:
    init, out = {"a": f32(), "b": f32(), "c": f32()}, {"a": f32(1), "b": f32(), "c": "x"}
    with raises(TypeError, "['a']: got", "['c']: got") as error:
        carry_through(where, init, out)
    assert "['b']" not in str(error.value)


@pytest.mark.parametrize("got", [None, (), (1.0,), (1.0, 2.0, 3.0), 1.0, jnp.zeros(3), {"c": 1.0, "y": 2.0}])
def test_scan_f_that_returns_no_pair(got: Any) -> None:
    with raises(TypeError, "f of scan must return a pair (carry, y)", "Got"):
        lx.scan(lambda *_: got, 1.0, length=3)


@pytest.mark.parametrize("bad", [3, "f", (abs,)])
@pytest.mark.parametrize("argument", ["cond_fun", "body_fun", "body_fun of fori_loop", "f", "stop"])
def test_function_that_is_not_callable(argument: str, bad: Any) -> None:
    calls: Any = {
        "cond_fun": lambda: lx.while_loop(bad, lambda x: x, 0),
        "body_fun": lambda: lx.while_loop(lambda x: x < 3, bad, 0),
        "body_fun of fori_loop": lambda: lx.fori_loop(0, 3, bad, 0),
        "f": lambda: lx.scan(bad, 0, length=3),
        "stop": lambda: lx.scan(lambda c, _: (c, None), 0, length=3, stop=bad),
    }
    with raises(TypeError, argument, "callable"):
        calls[argument]()


# ---- predicates

NOT_ONE_BOOL = [1, 1.0, None, "x", (), (True,), np.ones(1, bool), jnp.ones((2,), bool), jnp.ones((), jnp.int32)]


@pytest.mark.parametrize("got", NOT_ONE_BOOL)
def test_cond_fun_that_returns_no_single_bool(got: Any) -> None:
    with raises(TypeError, "cond_fun of while_loop must return one bool", "Got"):
        lx.while_loop(lambda _: got, lambda c: c, 1.0)


@pytest.mark.parametrize("got", NOT_ONE_BOOL)
def test_stop_that_returns_no_single_bool(got: Any) -> None:
    with raises(TypeError, "stop of scan must return one bool", "Got"):
        lx.scan(lambda c, _: (c, None), 1.0, length=3, stop=lambda *_: got)
