"""What is traced of loops over NNX objects, and how often."""

import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import loopax as lx
from tests.nnx.cells import STEPS, Counter, X, apply, cell, count, fori_loop


def test_disable_jit() -> None:
    counter = Counter()

    def step(carry: Any) -> Any:
        counter, x = carry
        return count(counter), x * counter.count[...].astype(float)

    with jax.disable_jit():
        out, x = fori_loop(STEPS, step, (counter, jnp.float64(1)))
    assert out is counter
    assert (counter.count[...], x) == (STEPS, 24.0)


def test_a_function_that_closes_over_a_module_sees_its_present_values() -> None:
    model = nnx.Param(jnp.float64(1))
    step = lambda _, x: x + model[...]
    assert lx.fori_loop(0, 2, step, jnp.float64(0)) == 2.0
    model[...] = jnp.float64(5)
    assert lx.fori_loop(0, 2, step, jnp.float64(0)) == 10.0


def test_a_body_is_traced_once_for_objects_of_the_same_structure() -> None:
    traces = []

    def step(_: Any, counter: Any) -> Any:
        traces.append(counter)
        return count(counter)

    for _ in range(3):
        lx.fori_loop(0, 2, step, Counter())
    assert len(traces) == 1


def scaled(scale: Any) -> Any:
    counter: Any = Counter()
    counter.scale = scale
    return counter


def test_a_body_is_traced_for_each_value_of_an_attribute() -> None:
    found = []

    def step(_: Any, counter: Any) -> Any:
        found.append(repr(counter.scale))
        return count(counter)

    for scale in [0.0, -0.0, 1, True, 1.0, math.nan, math.nan]:
        lx.fori_loop(0, 2, step, scaled(scale))
    assert found == ["0.0", "-0.0", "1", "True", "1.0", "nan"]


@pytest.mark.parametrize("scale", [-0.0, False])
def test_an_attribute_that_another_one_equals_may_not_take_its_place(scale: Any) -> None:
    def step(_: Any, counter: Any) -> Any:
        counter.scale = scale
        return counter

    with pytest.raises(TypeError, match=rf"\.scale: got {scale}, expected 0.0"):
        lx.fori_loop(0, 2, step, scaled(0.0))
    with pytest.raises(TypeError, match="GraphDef"):
        lx.cond(True, lambda: scaled(0.0), lambda: scaled(scale))


def test_a_module_as_body_is_traced_as_it_is_now() -> None:
    class Scale(nnx.Module):
        by = 2.0

        def __call__(self, _: Any, x: Any) -> Any:
            return self.by * x

    scale = Scale()
    assert lx.fori_loop(0, 2, scale, 1.0) == 4.0
    scale.by = 3.0
    assert lx.fori_loop(0, 2, scale, 1.0) == 9.0


def test_what_the_body_leaves_alone_is_a_constant_of_the_loop() -> None:
    program = jax.make_jaxpr(lambda model, x: lx.fori_loop(0, STEPS, lambda _, c: apply(c), (model, x))[1])(cell(), X)
    (loop,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "loop"]
    assert loop.params["num_carry"] == 4  # the count, the mean, the count of dropout, and x; but no key, and no weights


def shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """Of all intermediate values of a program, those of inner programs included."""
    inner = [p for eqn in jaxpr.eqns for p in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns"))]
    found = {v.aval.shape for eqn in jaxpr.eqns for v in [*eqn.invars, *eqn.outvars] if hasattr(v.aval, "shape")}
    return found.union(*(shapes(getattr(p, "jaxpr", p)) for p in inner if hasattr(getattr(p, "jaxpr", p), "eqns")))


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_weights_are_not_batched(lanes: Any) -> None:
    """32 lanes with counts of their own, a weight of 256 x 256 and a counter that changes: forward and gradient."""

    class Big(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.zeros((256, 256), jnp.float32))
            self.count = nnx.Variable(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            self.count[...] += 1
            return jnp.tanh(x @ self.weight[...])

    def loss(model: Any, n: Any, x: Any) -> Any:
        def lane(model: Any, n: Any, x: Any) -> Any:
            _, x = lx.fori_loop(0, n, lambda _, c: apply(c), (lx.local(model), x), max_steps=STEPS, lanes=lanes)
            return (x**2).sum()

        return jax.vmap(lane, in_axes=(None, 0, 0))(model, n, x).sum()

    arguments = (Big(), jnp.arange(32, dtype=jnp.int32) % 5, jnp.ones((32, 256), jnp.float32))
    for program in (loss, jax.grad(loss, allow_int=True)):
        traced = jax.make_jaxpr(program)(*arguments)
        assert (256, 256) in shapes(traced.jaxpr)
        assert (32, 256) in shapes(traced.jaxpr)
        assert not [s for s in shapes(traced.jaxpr) if s[-2:] == (256, 256) and len(s) > 2]
        assert "f32[32,256,256]" not in str(traced)
        assert "32x256x256" not in jax.jit(program).lower(*arguments).as_text()


@pytest.mark.slow
def test_flax_is_never_imported_for_the_user() -> None:
    program = "import sys, loopax as lx; print(lx.fori_loop(0, 3, lambda i, x: x + i, 0), 'flax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["3", "False"]
