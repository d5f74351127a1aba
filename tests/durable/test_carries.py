"""What the carry of a durable loop may hold: any dtype, keys, models, objects that change in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import loopax as lx
from loopax import durable
from tests.durable.cases import bits, read_rows, same_bits
from tests.support.reference import assert_close

X = jnp.array([1.0, -0.5, 2.0])
XS = jnp.asarray(np.random.RandomState(0).randn(11, 3))
KEY = jax.random.key(3)


@pytest.fixture
def here(tmp_path: Any) -> Any:
    """Options of a durable run in several chunks."""
    return {"directory": tmp_path / "run", "chunk_steps": 3, "checkpoint_every": 1000}


NAMES = "bool int2 int4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bfloat16 float16 float32 float64"
DTYPES = [*NAMES.split(), "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"]


def test_every_dtype(here: Any) -> None:
    """In the carry and in outputs, with arrays that have no elements, and scalars."""
    init: dict[str, Any] = {"none": jnp.zeros((0, 3)), "scalar": jnp.float32(1.5)}
    for name in DTYPES:
        init[name] = jnp.asarray((np.arange(-3, 4) % 7 - 3.0).astype(jnp.dtype(name)))
    step = lambda x: ~x if x.dtype == jnp.bool_ else (x + x.astype(x.dtype)).astype(x.dtype)
    f = lambda c, _: (jax.tree.map(step, c), c)
    expected = jax.jit(lambda: lx.scan(f, init, length=5))()
    types = lambda ys: jax.tree.map(lambda y: (y.shape, y.dtype), ys, is_leaf=lambda y: hasattr(y, "dtype"))
    for _ in range(2):  # the second time from disk
        carry, ys = durable.scan(f, init, length=5, **here)
        same_bits((carry, read_rows(ys)), expected)
        assert types(ys) == types(expected[1])


def test_weak_types_and_numbers_that_are_promoted(here: Any) -> None:
    init = {"n": 0, "x": 1.0, "flag": True, "z": 1j, "weak": jnp.asarray(2.0), "int": 1, "same": False}

    def body(_: Any, c: Any) -> Any:
        numbers = {"n": c["n"] + 1, "x": c["x"] * jnp.float32(0.5), "weak": c["weak"] * 0.5, "int": c["int"] * 1.5}
        return {**c, **numbers, "flag": c["n"] > 2}

    same_bits(durable.fori_loop(0, 5, body, init, **here), lx.fori_loop(0, 5, body, init))


@pytest.mark.parametrize(
    "init", [(), None, {"a": "text", "f": jnp.sin}, [jnp.zeros((0, 3))]], ids=["empty", "None", "dict", "list"]
)
def test_carries_without_numbers(init: Any, here: Any) -> None:
    for _ in range(2):
        same_bits(durable.fori_loop(0, 7, lambda _, c: c, init, **here), init)


def test_keys_in_the_carry(here: Any) -> None:
    def f(carry: Any, _: Any) -> Any:
        key, raw, x = carry
        key, use = jax.random.split(key)
        raw, other = jax.random.split(raw)
        return (key, raw, x + jax.random.normal(use) + jax.random.normal(other)), (use, x)

    init = (KEY, jax.random.PRNGKey(1), 0.0)
    carry, ys = durable.scan(f, init, length=8, **here)
    expected, expected_ys = lx.scan(f, init, length=8)
    same_bits(carry[:2], expected[:2])
    assert_close(carry[2], expected[2])
    same_bits(ys[0][:], expected_ys[0])


class Cell(nnx.Module):
    """Weights, a counter and dropout."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 3, param_dtype=jnp.float64, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        return x + 0.1 * self.dropout(jnp.tanh(self.linear(x)))


def test_nnx_objects_are_updated_in_place(here: Any) -> None:
    @nnx.jit
    def start() -> Any:
        model = Cell()
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def f(carry: Any, x: Any) -> Any:
        model, optimizer = carry
        loss, gradient = nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)
        optimizer.update(model, gradient)
        return carry, loss

    objects, expected = start(), start()
    kernel = objects[0].linear.kernel
    carry, losses = durable.scan(f, objects, XS, **here)
    assert [a is b for a, b in zip(carry, objects, strict=True)] == [True, True]
    assert carry[0].linear.kernel is kernel
    (_, expected_losses) = nnx.jit(lambda objects, xs: lx.scan(f, objects, xs))(expected, XS)
    assert_close(read_rows(losses), expected_losses)
    assert_close(kernel[...], expected[0].linear.kernel[...])
    assert (carry[0].count[...], carry[1].step[...]) == (11, 11)
    again = start()  # the finished run gives its state to new objects
    assert durable.scan(f, again, XS, **here)[0][0] is again[0]
    state_of = lambda objects: [bits(x) for x in jax.tree.leaves([nnx.split(x)[1] for x in objects])]
    np.testing.assert_equal(state_of(again), state_of(objects))


def test_objects_of_a_run_that_failed_are_as_they_were(here: Any) -> None:
    def body(_: Any, model: Any) -> Any:
        model.count[...] += 1
        lx.while_loop(lambda n: n < model.count[...], lambda n: n + 1, jnp.int32(0), max_steps=5)
        return model

    model = Cell()
    with pytest.raises(Exception, match="max_steps=5 stopped"):
        durable.fori_loop(0, 9, body, model, **here)
    assert model.count[...] == 0
