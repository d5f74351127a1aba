"""The caller's NNX objects in loops: the meaning is the Python loop's, for what changes in place too."""

import subprocess
import sys
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
    Counter,
    Tied,
    X,
    apply,
    cell,
    count,
    fori_loop,
    python,
    same,
)


@EACH_LOOP
def test_objects_are_updated_in_place(loop: Any) -> None:
    expected = python(STEPS, cell(), X)
    for jit in (lambda f: f, nnx.jit):
        model = cell()
        y = jit(lambda model, x: loop(STEPS, apply, (model, x))[1])(model, X)
        same((model, y), expected)
        assert model.count[...] == STEPS


@EACH_LOOP
def test_the_result_carries_the_same_objects(loop: Any) -> None:
    counter, rngs, variable = Counter(), nnx.Rngs(0), nnx.Param(jnp.float64(1))
    number = counter.count

    def step(carry: Any) -> Any:
        carry["variable"][...] *= 2
        return {
            **carry,
            "x": [carry["x"][0] + count(carry["counter"]).count[...].astype(float) + carry["rngs"].normal(())],
        }

    start = {"counter": counter, "rngs": rngs, "variable": variable, "x": [1.0], "n": number}
    out = loop(STEPS, step, start)
    assert all(out[name] is start[name] for name in ("counter", "rngs", "variable", "n"))
    assert counter.count is number
    assert (number[...], rngs.default.count[...], variable[...]) == (STEPS, STEPS, 2.0**STEPS)
    assert loop(STEPS, count, counter) is counter  # alone in the carry
    assert number[...] == 2 * STEPS


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
        assert first is second is first.cycle[0]
        assert first.a is first.b is alone
        first.a[...] *= 2.0
        alone[...] += second.b[...]
        return carry

    out, (again, alone) = loop(STEPS, step, (tied, (tied, tied.a)))
    assert out is again is tied
    assert alone is tied.a is tied.b
    assert tied.a[...] == 4.0**STEPS


# ---- what is traced of loops over NNX objects, and how often


def test_a_function_that_closes_over_a_module_sees_its_present_values() -> None:
    model = nnx.Param(jnp.float64(1))
    step = lambda _, x: x + model[...]
    assert lx.fori_loop(0, 2, step, jnp.float64(0)) == 2.0
    model[...] = jnp.float64(5)
    assert lx.fori_loop(0, 2, step, jnp.float64(0)) == 10.0


def test_what_the_body_leaves_alone_is_a_constant_of_the_loop() -> None:
    program = jax.make_jaxpr(lambda model, x: lx.fori_loop(0, STEPS, lambda _, c: apply(c), (model, x))[1])(cell(), X)
    (loop,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "loop"]
    assert loop.params["num_carry"] == 4  # the count, the mean, the count of dropout, and x; but no key, and no weights


@pytest.mark.slow
def test_flax_is_never_imported_for_the_user() -> None:
    program = "import sys, loopax as lx; print(lx.fori_loop(0, 3, lambda i, x: x + i, 0), 'flax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["3", "False"]
