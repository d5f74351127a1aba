"""The caller's NNX objects in loops: the meaning is the Python loop's, for what changes in place too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import loopax as lx
from tests.nnx.cells import (
    EACH_LOOP,
    SIZE,
    STEPS,
    Cell,
    Counter,
    Tied,
    X,
    apply,
    cell,
    count,
    fori_loop,
    python,
    same,
    unchanged,
)


@EACH_LOOP
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit])
def test_objects_are_updated_in_place(loop: Any, jit: Any) -> None:
    model = cell()
    y = jit(lambda model, x: loop(STEPS, apply, (model, x))[1])(model, X)
    same((model, y), python(STEPS, cell(), X))
    assert model.count[...] == STEPS


@EACH_LOOP
def test_the_result_carries_the_same_objects(loop: Any) -> None:
    model, counter, rngs = cell(), Counter(), nnx.Rngs(0)
    kernel, number = model.linear.kernel, counter.count

    def step(carry: Any) -> Any:
        count(carry["counter"])
        return {**carry, "x": [carry["model"](carry["x"][0]) + carry["rngs"].normal(())]}

    out = loop(STEPS, step, {"model": model, "counter": counter, "rngs": rngs, "x": [X], "n": counter.count})
    assert out["model"] is model
    assert out["counter"] is counter
    assert out["rngs"] is rngs
    assert out["n"] is number
    assert model.linear.kernel is kernel
    assert counter.count is number
    assert (counter.count[...], rngs.default.count[...]) == (STEPS, STEPS)


def test_a_module_a_variable_and_rngs_alone_in_the_carry() -> None:
    counter, variable, rngs = Counter(), nnx.Param(jnp.float64(1)), nnx.Rngs(7)

    def double(_: Any, x: Any) -> Any:
        x[...] *= 2
        return x

    def draw(rngs: Any, _: Any) -> Any:
        return rngs, rngs.uniform()

    assert lx.fori_loop(0, 3, lambda _, c: count(c), counter) is counter
    assert lx.fori_loop(0, 3, double, variable) is variable
    assert (counter.count[...], variable[...]) == (3, 8.0)
    assert len(set(lx.scan(draw, rngs, length=STEPS)[1].tolist())) == STEPS
    assert rngs.default.count[...] == STEPS


def test_no_steps_change_nothing() -> None:
    model = cell()
    result, y = jax.jit(lambda n, x: fori_loop(n, apply, (lx.local(Cell()), x)))(0, X)
    same((result, y), (model, X))
    assert fori_loop(0, apply, (model, X))[0] is model
    unchanged(model, cell)


def test_conditions_see_objects_and_may_change_them() -> None:
    def goes_on(counter: Any) -> Any:
        return count(counter).count[...] < 10

    counter = Counter()
    assert lx.while_loop(goes_on, count, counter) is counter
    assert counter.count[...] == 11  # 0, then 1 2, 3 4, ...: as the Python loop has it
    counter = Counter()
    stop = lambda counter, _: count(counter).count[...] >= 5
    (_, ys), info = lx.scan(lambda c, _: (count(c), c.count[...]), counter, length=9, stop=stop, info=True)
    assert (counter.count[...], info.num_steps, ys.tolist()) == (6, 3, [1, 3, 5, 0, 0, 0, 0, 0, 0])


def test_what_the_body_leaves_alone_is_not_written() -> None:
    """So it may belong to an outer trace."""
    model = nnx.Linear(SIZE, SIZE, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    kernel = model.kernel.get_raw_value()

    @jax.jit
    def last(x: Any) -> Any:
        out, x = fori_loop(STEPS, apply, (model, x))
        assert out is model
        return x

    y = last(X)
    assert model.kernel.get_raw_value() is kernel
    np.testing.assert_allclose(y, python(STEPS, model, X)[1])


def test_info_and_run_time_checks() -> None:
    counter = Counter()
    goes_on = lambda c: c.count[...] < 7
    out, info = lx.while_loop(goes_on, count, counter, max_steps=3, throw=False, info=True)
    assert out is counter
    assert (counter.count[...], info.num_steps, info.limit_reached) == (3, 3, True)
    out, _ = lx.while_loop(goes_on, count, counter, max_steps=9, info=True)
    assert (out is counter, counter.count[...]) == (True, 7)
    with pytest.raises(Exception, match="max_steps=2 stopped"):
        lx.while_loop(goes_on, count, Counter(), max_steps=2)


class Holder(nnx.Module):
    """Leaves that are not Variables, Variables that hold no array, and metadata."""

    def __init__(self) -> None:
        self.array = jnp.zeros(2)
        self.number = nnx.data(1.0)
        self.layers = nnx.List([Counter(1), Counter(2)])
        self.table = nnx.Variable({"a": jnp.float64(1), "b": None})
        self.nothing = nnx.Variable(None)
        self.flag = nnx.Variable(True)
        self.weak = nnx.Variable(jnp.asarray(1.0))
        self.tagged = nnx.Param(jnp.float64(1), note="kept")
        self.pair = nnx.data((jnp.float64(0), {"b": jnp.float64(1)}))
        self.name = "holder"


def test_everything_that_a_module_may_hold() -> None:
    def step(_: Any, holder: Any) -> Any:
        assert (holder.name, holder.flag.get_value(), holder.nothing.get_value()) == ("holder", True, None)
        holder.array = holder.array + 1.0
        holder.pair = (holder.pair[1]["b"], {"b": holder.pair[0] + 1.0})
        holder.layers[1].count[...] += holder.layers[0].count[...]
        holder.table["a"] = holder.table["a"] * 2.0
        holder.tagged[...] += 1.0
        holder.weak[...] = holder.weak[...] * holder.number
        return holder

    holder = Holder()
    layers, table = holder.layers, holder.table
    assert lx.fori_loop(0, 3, step, holder) is holder
    assert holder.layers is layers
    assert holder.table is table
    assert (holder.array.tolist(), layers[1].count[...], table["a"], holder.tagged[...]) == ([3.0, 3.0], 5, 8.0, 4.0)
    assert holder.pair == (2.0, {"b": 2.0})
    assert (type(holder.number), holder.flag.get_value(), holder.nothing.get_value()) == (float, True, None)
    assert (holder.weak[...].weak_type, holder.tagged.get_metadata("note")) == (True, "kept")


# ---- shared references


@EACH_LOOP
def test_shared_references(loop: Any) -> None:
    tied = Tied()

    def step(carry: Any) -> Any:
        first, (second, alone) = carry
        assert first is second
        assert first.a is first.b
        assert first.a is alone
        assert first.cycle[0] is first
        first.a[...] *= 2.0
        alone[...] += second.b[...]
        return carry

    out, (again, alone) = loop(STEPS, step, (tied, (tied, tied.a)))
    assert out is again
    assert out is tied
    assert alone is tied.a
    assert tied.a is tied.b
    assert tied.a[...] == 4.0**STEPS
