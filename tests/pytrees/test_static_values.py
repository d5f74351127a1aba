"""Values that are not arrays are told apart where a step could do so (0.0 and -0.0, 1 and True), and NaN is NaN."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.pytrees.leaves import same_value


class Leaf(eqx.Module):
    """A value that stands among the leaves."""

    x: Any
    value: Any


class Field(eqx.Module):
    """A value that is a part of the structure."""

    x: Any
    value: Any = eqx.field(static=True)


@dataclass(frozen=True)
class Settings:
    """Compared by value, as dataclasses are."""

    rate: Any
    note: str = ""


MODULES = pytest.mark.parametrize("module", [Leaf, Field])
NUMBERS = [0.0, -0.0, 0, False, 0j, complex(0.0, -0.0), np.float32(0), np.int8(0), np.float64(-0.0), math.nan]
MORE = [(1, 0.0), (1, -0.0), (True, 0.0), [0.0], Settings(0.0), Settings(-0.0), Settings(0), {"a": 0.0}, {"a": -0.0}]
MORE += ["0", b"0", None, Decimal("0.0"), Decimal("-0.0"), Fraction(0), Settings, np.dtype(float)]
MORE += [np.array([0.0]), np.array([-0.0]), np.array([[0.0]]), np.array(["0"]), np.array([0, "0"], dtype=object)]


def again(value: Any) -> Any:
    """An equal value that is another object, where Python makes one."""
    if isinstance(value, float) and type(value) is float:
        return float(str(value))
    if isinstance(value, tuple | list):
        return type(value)(map(again, value))
    if isinstance(value, dict):
        return {key: again(x) for key, x in value.items()}
    if isinstance(value, Settings):
        return Settings(again(value.rate))
    return value.copy() if isinstance(value, np.ndarray) else value


def test_a_value_is_the_same_as_itself_alone() -> None:
    values = [*NUMBERS, *MORE, float("nan")]
    for i, a in enumerate(values):
        assert [j for j, b in enumerate(values) if same_value(again(a), b)] == (
            [i] if not (isinstance(a, float) and math.isnan(a)) else [NUMBERS.index(math.nan), len(values) - 1]
        )


def signature(value: Any) -> float:
    """A number that tells the values of a test apart."""
    if isinstance(value, Settings):
        return signature(value.rate)
    if isinstance(value, tuple):
        return sum(10.0**i * signature(x) for i, x in enumerate(value))
    part = value.imag if isinstance(value, complex) else value
    return math.copysign(len(type(value).__name__), part)


def step(c: Any) -> Any:
    return eqx.tree_at(lambda c: c.x, c, c.x * signature(c.value))


def of_index(_: Any, c: Any) -> Any:
    return step(c)


def with_output(c: Any, _: Any = None) -> Any:
    return step(c), c.x


def counts_two(state: Any) -> Any:
    return state[1] < 2


def counted(state: Any) -> Any:
    return step(state[0]), state[1] + 1


# Their functions are the same at each call, so that what has been traced is looked up.
SEEN: dict[str, Callable[[Any], Any]] = {
    "fori_loop": lambda c: lx.fori_loop(0, 2, of_index, c).x,
    "while_loop": lambda c: lx.while_loop(counts_two, counted, (c, 0))[0].x,
    "scan": lambda c: lx.scan(with_output, c, length=2)[0].x,
    "rollout": lambda c: lx.rollout(with_output, c, 2)[0].x,
    "cond": lambda c: lx.cond(True, step, step, step(c)).x,
}
TWINS = [0.0, -0.0, 1, True, complex(1, -0.0), (1, 0.0), (1, -0.0)]


@MODULES
@pytest.mark.parametrize("loop", SEEN)
def test_a_step_is_traced_for_each_value(loop: str, module: Any) -> None:
    for value in TWINS:
        assert SEEN[loop](module(jnp.asarray(3.0), value)) == 3.0 * signature(value) ** 2


@MODULES
def test_a_step_is_traced_once_for_all_nan(module: Any) -> None:
    values = []

    def body(_: Any, c: Any) -> Any:
        values.append(c.value)
        return module(c.x + 1.0, float("nan"))

    for _ in range(3):
        last = lx.fori_loop(0, 2, body, module(jnp.zeros(()), float("nan")))
        assert (last.x, math.isnan(last.value)) == (2.0, True)
    assert len(values) == 1


@MODULES
def test_branches_that_return_other_values_are_refused(module: Any) -> None:
    choose = lambda a, b: lx.cond(True, lambda x: module(x, a), lambda x: module(x, b), 1.0)
    for a, b in [(0.0, -0.0), (1, True), (Settings(0.0), Settings(-0.0))]:
        with pytest.raises(TypeError, match="value: "):
            choose(a, b)
    assert math.isnan(choose(float("nan"), float("nan")).value)
