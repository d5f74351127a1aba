"""Carries of other types or structures, functions and predicates that return something else: errors with the path."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from tests.support.blocks import BLOCK
from tests.support.limited_loops import raises

# ---- the carry


def f32(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.float32)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["size"])
@dataclass
class Static:
    x: Any
    size: int


class Wide(eqx.Module):
    linear: eqx.nn.Linear
    width: int = eqx.field(static=True)


KEY = jax.random.key(0)
LINEAR, NARROW_LINEAR = BLOCK.linear, eqx.nn.Linear(3, 3, dtype=jnp.float32, key=KEY)
WITHOUT_BIAS: Any = Wide(eqx.nn.Linear(3, 3, use_bias=False, key=KEY), 2)
OTHER_FUNCTION = eqx.tree_at(lambda block: block.activation, BLOCK, lambda x: x)
ARRAY_OF_BLOCK: Any = Wide(BLOCK, 2)  # type: ignore[arg-type]
OTHER_TYPES = [
    ({"a": f32(2)}, {"a": f32(3)}, "['a']: got float32[3], expected float32[2]"),
    ((f32(2), f32()), (f32(2), jnp.zeros((), jnp.int32)), "[1]: got int32[], expected float32[]"),
    (f32(), jnp.zeros(()), "the carry itself: got float64[], expected float32[]"),
    ([[f32()]], [["x"]], "[0][0]: got str 'x', expected float32[]"),
    ({"name": "relu"}, {"name": "tanh"}, "['name']: got str 'tanh', expected str 'relu'"),
    ({"name": "relu"}, {"name": f32()}, "['name']: got float32[], expected str 'relu'"),
    ((1.0, True), (1.0, 1), "[1]: got int 1, expected bool True"),
    ((f32(), f32()), (f32(), KEY), "[1]: got key<fry>[], expected float32[]"),
    (KEY, jax.random.key(0, impl="rbg"), "the carry itself: got key<rbg>[], expected key<fry>[]"),
    (KEY, jax.random.PRNGKey(0), "the carry itself: got uint32[2], expected key<fry>[]"),
    (LINEAR, NARROW_LINEAR, ".weight: got float32[3,3], expected float64"),
    (BLOCK, OTHER_FUNCTION, ".activation: got function <function <lambda>"),
]
OTHER_STRUCTURE = [
    ({"a": f32(), "b": f32()}, {"a": f32()}, "['b']: float32[] is missing from the result"),
    ({"a": f32()}, {"a": f32(), "b": f32(2)}, "['b']: float32[2] is new in the result"),
    ((f32(),), (f32(), (f32(2),)), "[1]: tuple is new in the result"),
    ((f32(), None), (f32(), f32(4)), "[1]: got float32[4], expected None"),
    ((f32(), f32(4)), (f32(), None), "[1]: got None, expected float32[4]"),
    ((f32(),), [f32()], "the carry itself: got list, expected tuple"),
    ({"a": [f32()]}, {"a": f32()}, "['a']: got float32[], expected list"),
    (Static(f32(), 2), Static(f32(), 3), ".size: got 3, expected 2 (a static field)"),
    ({"cell": LINEAR}, {"cell": BLOCK}, "['cell']: got Block, expected Linear"),
    ([Wide(LINEAR, 2)], [Wide(LINEAR, 3)], "[0].width: got 3, expected 2 (a static field)"),
    (Wide(LINEAR, 2), ARRAY_OF_BLOCK, ".linear: got Block, expected Linear"),
    (Wide(LINEAR, 2), WITHOUT_BIAS, ".linear.use_bias: got False, expected True (a static field)"),
    (Wide(LINEAR, 2), WITHOUT_BIAS, ".linear.bias: got None, expected float64[3]"),
]


@pytest.mark.parametrize(
    ("same", "init", "out", "line"),
    [("types", *case) for case in OTHER_TYPES] + [("structure", *case) for case in OTHER_STRUCTURE],
)
def test_a_carry_that_does_not_fit_shows_path_got_and_expected(same: str, init: Any, out: Any, line: str) -> None:
    with raises(TypeError, "f of scan must return a carry of the same " + same, line):
        lx.scan(lambda _c, _x: (out, None), init, length=0)


def test_carry_error_lists_all_bad_leaves_and_no_good_one() -> None:
    init, out = {"a": f32(), "b": f32(), "c": f32()}, {"a": f32(1), "b": f32(), "c": "x"}
    with raises(TypeError, "body_fun of while_loop", "['a']: got", "['c']: got") as error:
        lx.while_loop(lambda _: False, lambda _: out, init)
    assert "['b']" not in str(error.value)


# ---- functions without a return


def forgets(*_: Any, **__: Any) -> Any:
    """Compute something, and return nothing."""


def identity(*operands: Any) -> Any:
    return operands[-1]


FORGOTTEN: Any = {
    "body_fun of while_loop must return the next carry, as it is given float32[2]": lambda: lx.while_loop(
        lambda c: c.sum() < 3, forgets, f32(2)
    ),
    "body_fun of fori_loop must return the next carry, as it is given a tuple of 1": lambda: lx.fori_loop(
        0, 3, forgets, (f32(2),)
    ),
    "cond_fun of while_loop must return one bool": lambda: lx.while_loop(forgets, identity, f32(2)),
    "f of scan must return a pair (carry, y)": lambda: lx.scan(forgets, f32(), length=3),
    "stop of scan must return one bool": lambda: lx.scan(lambda c, _: (c, c), f32(), length=3, stop=forgets),
    "true_fun of cond must return what false_fun does": lambda: lx.cond(True, forgets, identity, f32()),
    "branches[1] of switch must return what branches[0] does": lambda: lx.switch(0, [identity, forgets], f32()),
}


@pytest.mark.parametrize("where", FORGOTTEN)
def test_a_function_that_forgets_its_return_is_told_so(where: str) -> None:
    with raises(TypeError, where, "Got None. A function without a `return` returns None."):
        FORGOTTEN[where]()


# ---- functions of other arguments

OF_NONE: Any = lambda: True
OF_ONE: Any = lambda c: c
OTHER_ARGUMENTS: Any = {
    "body_fun(i, val, key=key)": lambda: lx.fori_loop(0, 3, lambda i, c: c, 1.0, key=KEY),
    "body_fun(val, key=key)": lambda: lx.while_loop(lambda c: c < 3, lambda c: c + 1, 1.0, key=KEY),
    "f(carry, x, key=key)": lambda: lx.scan(lambda c, x: (c, x), 1.0, length=3, key=KEY),
    "step(state, key=key)": lambda: lx.rollout(lambda s: (s, s), 1.0, 3, key=KEY),
    "f(carry, x)": lambda: lx.scan(lambda c, x, key: (c, x), 1.0, length=3),
    "body_fun(i, val)": lambda: lx.fori_loop(0, 3, lambda c: c, 1.0),
    "cond_fun(val)": lambda: lx.while_loop(OF_NONE, lambda c: c, 1.0),
    "stop(carry, y)": lambda: lx.scan(lambda c, x: (c, c), 1.0, length=3, stop=OF_ONE),
    "true_fun(operands[0])": lambda: lx.cond(True, lambda: 1.0, lambda x: x, 1.0),
    "inverse(i, after)": lambda: lx.fori_loop(0, 3, lambda i, c: c, 1.0, kind=lx.Reversible(lambda c: c)),
}
ADVICE = {
    "body_fun(val, key=key)": "give the function a parameter `key`, or leave key= out",
    "f(carry, x)": "Steps get keys",
}


@pytest.mark.parametrize("called", OTHER_ARGUMENTS)
def test_a_function_of_other_arguments_is_told_how_it_is_called(called: str) -> None:
    with raises(TypeError, f"is called as `{called}`, and does not take that: ", ADVICE.get(called, "")):
        OTHER_ARGUMENTS[called]()


def test_a_type_error_of_a_body_stays_its_own() -> None:
    def body(i: Any, c: Any, key: Any = None) -> Any:
        return "1" + c

    with pytest.raises(TypeError) as raised:
        lx.fori_loop(0, 3, body, 1.0)
    assert "is called as" not in str(raised.value)


NOT_CALLABLE: Any = {
    "cond_fun of while_loop": lambda: lx.while_loop("f", identity, 0),  # type: ignore[arg-type]
    "body_fun of while_loop": lambda: lx.while_loop(lambda x: x < 3, (abs,), 0),  # type: ignore[arg-type]
    "body_fun of fori_loop": lambda: lx.fori_loop(0, 3, 3, 0),  # type: ignore[arg-type]
    "f of scan": lambda: lx.scan("f", 0, length=3),  # type: ignore[arg-type]
    "stop of scan": lambda: lx.scan(lambda c, _: (c, None), 0, length=3, stop=3),  # type: ignore[arg-type]
}


def test_function_that_is_not_callable() -> None:
    for argument, call in NOT_CALLABLE.items():
        with raises(TypeError, argument, "callable"):
            call()
