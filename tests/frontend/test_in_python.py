"""`jax.disable_jit`: loops run in Python, step by step, with the results that they have otherwise."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import loopax as lx
from tests.nnx.cells import Counter, count
from tests.support.progress_recorder import recorder
from tests.support.reference import assert_close

__all__ = ["recorder"]  # a fixture

XS = jnp.arange(1.0, 5.0)
KEY = jax.random.key(3)


class Cell(eqx.Module):
    w: Any
    rate: float = 2.0
    is_on: bool = True


def same(found: Any, expected: Any) -> None:
    """Values, structures and types, weak ones too."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(b):
            assert jax.typeof(a) == jax.typeof(b)
            assert_close(*map(_numbers, (a, b)))
        else:
            assert a is b or a == b


def _numbers(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def in_nnx(steps: int) -> Any:
    counter, model = Counter(), nnx.Param(XS)
    out, x = lx.fori_loop(0, steps, lambda i, c: (count(c[0]), c[1] + i), (counter, 1.0))
    total, _ = lx.scan(lambda c, p: (c + p[...], p.set_value(2 * p[...])), 0.0, model)
    return out is counter, counter.count[...], x, total, model[...]


def with_reference(x: Any, stop: Any = None) -> Any:
    total, rows = jax.new_ref(0.0 * x), jax.new_ref(x * XS)

    def f(c: Any, row: Any) -> Any:
        row[...] = row[...] * c
        total[...] += row[...]
        return c + row[...], None

    return lx.scan(f, x, rows, stop=stop)[0] + total[...] + rows[...].sum()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "while_loop": lambda x: lx.while_loop(lambda c: c[0] < 30, lambda c: (c[0] * 3, c[1] + 1), (x, 0)),
    "while_loop, a bound": lambda x: lx.while_loop(
        lambda c: c < 30, lambda c: c * 3, x, max_steps=2, throw=False, info=True
    ),
    "fori_loop": lambda x: lx.fori_loop(1, 5, lambda i, c: c * x + i, x, unroll=2),
    "scan": lambda x: lx.scan(lambda c, row: (c * row, {"a": c, "b": (row, None, True)}), x, XS, unroll=True),
    "scan in reverse": lambda x: lx.scan(lambda c, row: (c * row, c), x, XS, reverse=True, length=jnp.int32(3)),
    "stop": lambda x: lx.scan(lambda c, row: (c * row, c), x, XS, stop=lambda c, y: c > 5, info=True),
    "no row": lambda x: lx.scan(lambda c, row: (c * row, (c, row)), x, XS[:0]),
    "keys": lambda x: lx.scan(lambda c, row, key: (c + jax.random.normal(key), key), x, XS, key=KEY, reverse=True),
    "promoted": lambda x: lx.fori_loop(0, 3, lambda i, c: c + 0.5, 1),
    "module": lambda x: lx.fori_loop(
        0, 3, lambda i, c: (c[0], c[1] * c[0].w * c[0].rate if c[0].is_on else c[1]), (Cell(XS[1]), x)
    ),
    "NNX": lambda x: in_nnx(3),
    "Rngs": lambda x: lx.fori_loop(0, 3, lambda i, c: (c[0], jax.random.normal(c[0]())), (nnx.Rngs(0).default, x))[1],
    "reference": with_reference,
    "History": lambda x: lx.fori_loop(0, 5, lambda i, h: h.push(h[-1] + h[0]), lx.History(3, x * XS)).rows,
    "Buffer": lambda x: lx.fori_loop(0, 5, lambda i, b: b.append(x * i, when=i % 2 == 0), lx.Buffer(4, like=1.0)).rows,
    "rollout of a history": lambda x: lx.rollout(
        lambda s, row, history: (s, history[-1] + row * history[-2]),
        None,
        inputs=XS,
        history=lx.History(2, x * XS),
        stop=lambda s, y: y > 8,
        save_every=3,
        info=True,
    ),
    "cond": lambda x: lx.cond(x > 0, lambda x: 2 * x, lambda x: x, x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str) -> None:
    x = jnp.float64(1.5)
    expected = PROGRAMS[name](x)
    with jax.disable_jit():
        same(PROGRAMS[name](x), expected)


DIFFERENTIABLE = ["while_loop", "fori_loop", "scan in reverse", "stop", "module", "reference", "History", "Buffer"]


def total(name: str) -> Callable[[Any], Any]:
    return lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(PROGRAMS[name](x)) if eqx.is_inexact_array(y))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives(name: str) -> None:
    f = total(name)
    expected = jax.jit(lambda x: (jax.value_and_grad(f)(x), jax.jvp(jax.grad(f), (x,), (1.0,))))(1.5)
    with jax.disable_jit():
        assert_close((jax.value_and_grad(f)(1.5), jax.jvp(jax.grad(f), (1.5,), (1.0,))), expected)


# ---- what only works in Python


def noted(seen: list[float]) -> Callable[[Any], Any]:
    """Doubles a number, and keeps it as a number of Python; under `grad`, JAX asks for `stop_gradient`."""

    def step(c: Any) -> Any:
        seen.append(float(lax.stop_gradient(c)))
        return 2 * c

    return step


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "while_loop": lambda step, x: lx.while_loop(lambda c: c < 7, step, x),
    "fori_loop": lambda step, x: lx.fori_loop(jnp.int32(2), jnp.int32(5), lambda i, c: step(c), x),
    "scan": lambda step, x: lx.scan(lambda c, _: (step(c), float(c > 0)), x, length=3)[0],
    "stop": lambda step, x: lx.scan(lambda c, _: (step(c), None), x, stop=lambda c, _: bool(c > 7))[0],
    "rollout": lambda step, x: lx.rollout(lambda c: (step(c), c), x, 3, save_every=2).state,
    "free": lambda step, x: lx.fori_loop(
        0, 3, lambda i, c: lx.fori_loop(0, 1, lambda j, c: step(c), c), x, lanes="free"
    ),
    "cond": lambda step, x: lx.fori_loop(0, 3, lambda i, c: lx.cond(c > 0, step, lambda c: c * float(c), c), x),
    "switch": lambda step, x: lx.fori_loop(0, 3, lambda i, c: lx.switch(i + 1, [jnp.sin, step], c), x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_body_sees_values_once_in_each_step(name: str) -> None:
    seen: list[float] = []
    f = lambda x: LOOPS[name](noted(seen), x)
    with jax.disable_jit():
        assert f(1.0) == 8.0
        assert seen == [1.0, 2.0, 4.0]
        assert_close(jax.value_and_grad(f)(1.0), (8.0, 8.0))
        assert_close(jax.hessian(f)(1.0), 0.0)
    assert seen == [1.0, 2.0, 4.0] * 3


# ---- checks


def test_a_bound_stops_a_loop() -> None:
    with jax.disable_jit():
        with pytest.raises(eqx.EquinoxRuntimeError, match="max_steps=2 stopped a loop"):
            lx.while_loop(lambda c: c < 30, lambda c: c * float(c), 1.0, max_steps=2)
        with pytest.raises(ValueError, match="max_steps=2 stopped a loop"):
            lx.fori_loop(0, 3, lambda i, c: c * float(c), 3.0, max_steps=2)


# ---- batches


BATCHED: dict[str, Callable[[Any], Any]] = {
    "lengths": lambda x: lx.fori_loop(0, x.astype(int), lambda i, c: c * x, x),
    "stop in reverse": lambda x: lx.scan(
        lambda c, row: (c + x * row, c), 0.0, XS, stop=lambda c, _: c > 5, info=True, reverse=True
    ),
    "reference": lambda x: with_reference(x, lambda c, _: c > 5),
    "nested": lambda x: lx.fori_loop(0, 3, lambda i, c: lx.fori_loop(0, x.astype(int), lambda j, c: c * x, c), x),
    "cond": lambda x: lx.cond(x > 2, lambda x: 2 * x, lambda x: x, x),
}
LANES = jnp.array([3.0, 1.0, 2.0])


@pytest.mark.parametrize("name", BATCHED)
def test_batches(name: str) -> None:
    f = BATCHED[name]
    slopes = jax.vmap(jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(f(x)) if y.dtype == x.dtype)))
    expected = jax.jit(lambda x: (jax.vmap(f)(x), slopes(x)))(LANES)
    with jax.disable_jit():
        assert_close((jax.vmap(f)(LANES), slopes(LANES)), expected)


# ---- programs that are traced anyway


@pytest.mark.parametrize(
    "traced",
    [
        lambda f: jax.make_jaxpr(f)(1.0),
        lambda f: jax.eval_shape(f, 1.0),
        lambda f: jax.checkpoint(f)(1.0),
        lambda f: lx.rewrite_loops(f)(1.0),
        lambda f: lx.explain(f, 1.0),
    ],
)
def test_programs_are_traced(traced: Any) -> None:
    calls: list[Any] = []
    f = lambda x: lx.fori_loop(0, 5, lambda i, c: (calls.append(c), c * x)[1], x)
    with jax.disable_jit():
        traced(f)
    assert len(calls) == 1
