"""Models in loops: what is not an array stays as it is, in the carry, in `xs` and in `ys`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import loopax as lx
from tests.pytrees.comparison import EACH_LOOP, KINDS, eagerly, lax_loop, same
from tests.support.blocks import apply, while_loop


class Cell(eqx.Module):
    """Three arrays, and leaves that are none."""

    weight: Any
    layers: list[Any]
    activation: Callable[[Any], Any]
    train: bool
    name: str
    nothing: None = None
    width: int = eqx.field(static=True, default=2)

    def __call__(self, x: Any) -> Any:
        assert type(self.train) is bool
        scale = {"double": 2.0, "half": 0.5}[self.name]
        return self.activation(scale * (x @ self.weight)) if self.train else x


class Equal:
    """Neither an array nor hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


W = np.array([[0.0, 1.0], [1.0, 0.0]])
X = np.array([1.0, 2.0])
CELL = Cell(jnp.asarray(W), [jnp.arange(3), jax.random.key(0)], jnp.abs, True, "double")


# Of the sum of `8 * X @ W @ W @ W`.
SLOPE = np.sum(
    [np.outer(8 * X @ np.linalg.matrix_power(W, k), np.linalg.matrix_power(W, 2 - k) @ np.ones(2)) for k in range(3)],
    axis=0,
)


@EACH_LOOP
def test_module_in_the_carry_comes_out_unchanged(loop: Any) -> None:
    for jit in (eqx.filter_jit, eagerly):
        model, x = jit(partial(loop, apply))((CELL, X))
        same(model, CELL)
        assert x.tolist() == [16.0, 8.0]


@EACH_LOOP
def test_gradient_of_a_module_in_the_carry(loop: Any) -> None:
    """Of every kind that the loop has, in one program."""

    def loss(model: Any, kind: str) -> Any:
        out, x = loop(apply, (model, X), kind=kind)
        return x.sum() + 0.0 * out.weight.sum()

    kinds = [kind for kind in KINDS if not (kind == "lax" and loop is while_loop)]
    gradients = eqx.filter_jit(lambda model: [eqx.filter_grad(loss)(model, kind) for kind in kinds])(CELL)
    for gradient in gradients:
        assert jax.tree.leaves(gradient) == [gradient.weight]
        assert gradient.weight.tolist() == SLOPE.tolist()


def test_cond_fun_and_stop_see_what_is_not_an_array() -> None:
    def goes_on(state: Any) -> Any:
        model, x = state
        return (x[0] < 10.0) & (model.train is True)

    assert lx.while_loop(goes_on, apply, (CELL, X))[1].tolist() == [16.0, 8.0]
    step = lambda state, _: (apply(state), state[0].name)
    (model, x), name = lx.scan(step, (CELL, X), length=5, stop=lambda s, y: (s[1][0] > 10.0) & (y == "double"))
    same((model, name), (CELL, "double"))
    assert x.tolist() == [16.0, 8.0]


NOT_ARRAYS = [True, False, "name", np.str_("name"), None, jnp.tanh, abs, object(), Equal(), int, ...]


@EACH_LOOP
def test_leaves_that_are_no_arrays(loop: Any) -> None:
    def step(state: Any) -> Any:
        assert all(leaf is other for leaf, other in zip(state["leaves"], NOT_ARRAYS, strict=True))
        return {**state, "x": state["x"] + 1.0}

    same(loop(step, {"leaves": NOT_ARRAYS, "x": np.float32(0)}), {"leaves": NOT_ARRAYS, "x": jnp.float32(3)})


def test_leaves_of_xs_and_ys_that_are_no_arrays() -> None:
    def f(c: Any, x: Any) -> Any:
        assert (x["name"], x["flag"], x["nothing"]) == ("row", True, None)
        return x["f"](c + x["row"]), {**x, "row": c}

    xs = {"row": jnp.arange(3.0), "name": "row", "flag": True, "nothing": None, "f": jnp.negative}
    last, ys = lx.scan(f, 0.0, xs)
    assert (last, ys["row"].tolist(), ys["flag"].tolist()) == (-1.0, [0.0, 0.0, -1.0], [True] * 3)
    assert (ys["name"], ys["nothing"], ys["f"]) == ("row", None, jnp.negative)


# ---- Python bools that become arrays


@EACH_LOOP
def test_python_bool_that_the_body_turns_into_an_array_is_promoted(loop: Any) -> None:
    step = lambda c: {"go": c["go"] & (c["x"] < 1), "flag": c["flag"], "x": c["x"] + 1}
    out = jax.jit(lambda: {**loop(step, {"go": True, "flag": True, "x": 0}), "flag": 0})()
    same(out, jax.jit(lambda: {**lax_loop(step, {"go": True, "flag": True, "x": 0}), "flag": 0})())
    assert out["go"].tolist() is False
    assert loop(step, {"go": True, "flag": True, "x": 0})["flag"] is True
