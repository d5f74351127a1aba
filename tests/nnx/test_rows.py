"""Rows of NNX objects in `xs` and `ys`: layers, what they sow, and their metadata."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import loopax as lx
from tests.nnx.cells import KEYS, SIZE, STEPS, Cell, Counter, X, count, python, stack

of_key = nnx.jit(Cell)


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_in_xs(reverse: bool) -> None:
    """Rows are modules; what the body changes in them is in the stacked module afterwards."""
    layers = stack()
    kernel, dropout = layers.linear.kernel, layers.dropout
    y, _ = lx.scan(lambda x, layer: (layer(x), None), X, layers, reverse=reverse)
    x, order = X, range(3, -1, -1) if reverse else range(4)
    for i in order:
        one, x = python(1, of_key(KEYS[i]), x)
        np.testing.assert_allclose(layers.mean[i], one.mean[...])
    np.testing.assert_allclose(y, x)
    assert layers.count[...].tolist() == layers.dropout.rngs.count[...].tolist() == [1] * 4
    assert layers.linear.kernel is kernel
    assert layers.dropout is dropout


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_that_are_not_reached_stay_as_they_are(reverse: bool) -> None:
    layers = nnx.vmap(Counter)(jnp.arange(5, dtype=jnp.int32) * 10)
    f = lambda x, layer: (x + 1, count(layer).count[...])
    _, ys = lx.scan(f, 0, layers, jnp.int32(4), reverse, stop=lambda x, _: x >= 2)
    assert layers.count[...].tolist() == ([0, 10, 21, 31, 40] if reverse else [1, 11, 20, 30, 40])
    assert ys.tolist() == ([0, 0, 21, 31, 0] if reverse else [1, 11, 0, 0, 0])


class Sowing(Cell):
    """A cell that says what it saw."""

    def __call__(self, x: Any) -> Any:
        self.sow(nnx.Intermediate, "seen", x)
        return super().__call__(x)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_layers_sow_is_stacked(reverse: bool) -> None:
    """A Variable in a row may come to hold what it did not hold before."""
    run = lambda layers: lx.scan(lambda x, layer: (layer(x), x), X, layers, jnp.int32(3), reverse)
    (_, xs), sown = nnx.capture(run, nnx.Intermediate)(nnx.vmap(Sowing)(KEYS))
    np.testing.assert_array_equal(sown["seen"][0], xs)
    assert not np.asarray(xs)[3].any()


def test_values_of_rows_that_change_their_containers() -> None:
    """Rows that are not reached keep what they had; what is new is zero in them."""

    def f(carry: Any, row: Any) -> tuple[Any, Any]:
        row.set_value({"a": row["a"] + 1, "new": (carry,)})
        return carry + 2, None

    variable = nnx.Variable({"a": jnp.arange(3.0), "old": jnp.ones(3)})
    lx.scan(f, 1.0, variable, 2)
    value = variable.get_value()
    assert value.keys() == {"a", "new"}
    assert value["a"].tolist() == [1, 2, 2]
    assert value["new"][0].tolist() == [1, 3, 0]
    with pytest.raises(TypeError, match=r"got bool.*, expected float64"):
        lx.scan(lambda c, row: (row.set_value(row[...] > 0), None), None, nnx.Variable(jnp.ones(3)))


def test_modules_in_ys() -> None:
    """Each row is a copy of what the object was at that step."""
    counter = Counter()
    _, ys = lx.scan(lambda c, _: (count(c), {"module": c, "variable": c.count}), counter, length=3)
    assert type(ys["module"]) is Counter
    assert ys["module"] is not counter
    assert ys["module"].count is ys["variable"]
    assert ys["variable"][...].tolist() == [1, 2, 3]
    assert counter.count[...] == 3


# ---- metadata of rows


def stacked_weight(**metadata: Any) -> Any:
    return nnx.Param(jnp.ones((STEPS, SIZE)), eager_sharding=False, **metadata)


def test_a_row_may_lose_the_name_of_its_first_axis() -> None:
    def step(x: Any, weight: Any) -> Any:
        nnx.spmd.remove_axis(weight, 0, {nnx.PARTITION_NAME: "layers", "nickname": "nick"})
        assert (weight.out_sharding, weight.nickname) == (("in",), ("i",))
        weight[...] *= 2.0
        return x * weight[...], None

    names = {"out_sharding": ("layers", "in"), "nickname": ("nick", "i")}
    weight = stacked_weight(**names)
    x, _ = lx.scan(step, X, weight, length=2)
    assert jnp.array_equal(x, 4 * X)
    assert jnp.array_equal(weight[:, 0], jnp.array([2.0, 2.0, 1.0, 1.0]))
    assert {name: getattr(weight, name) for name in names} == names
