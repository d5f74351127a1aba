"""Calls of `jax.lax` loops work when the name of the module is changed, to the value and type of every result."""

import functools as ft
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.parity import same


class Pair(NamedTuple):
    a: Any
    b: Any


class Doubling:
    """A callable object."""

    def __call__(self, _: Any, x: Any) -> Any:
        return 2 * x

    def method(self, _: Any, x: Any) -> Any:
        return 3 * x

    def step(self, c: Any, x: Any) -> Any:
        return 2 * c, x


ROWS = jnp.arange(12.0).reshape(4, 3)
FIVE, THREE, WEAK_FIVE = jnp.int32(5), jnp.int32(3), jnp.asarray(5)
MIXED = {"a": jnp.arange(4), "b": (jnp.arange(8.0).reshape(4, 2), np.arange(4, dtype=np.int8)), "c": None}


# ---- calls as they stand in programs


def fori_in_scan(m: Any) -> Any:
    return m.scan(lambda c, n: (m.fori_loop(0, n, lambda i, x: x + i, c), c), 0, jnp.arange(5))


CALLS: dict[str, Any] = {
    "while_loop": lambda m: m.while_loop(lambda x: x < 9, lambda x: 2 * x, 1),
    "while_loop by name": lambda m: m.while_loop(cond_fun=lambda x: x < 9, body_fun=lambda x: 2 * x, init_val=1),
    "while_loop of no steps": lambda m: m.while_loop(lambda x: x < 1, lambda x: 2 * x, 1),
    "while_loop of a dict": lambda m: m.while_loop(
        lambda c: c["n"] < 5,
        lambda c: {"n": c["n"] + 1, "x": c["x"] * 2, "none": None},
        {"n": 0, "x": ROWS, "none": None},
    ),
    "while_loop of a named tuple": lambda m: m.while_loop(
        lambda c: c.a < 5, lambda c: Pair(c.a + 1, c.b * 2), Pair(0, 1.0)
    ),
    "while_loop with a Python bool": lambda m: m.while_loop(lambda x: False, lambda x: x, 1.0),
    "fori_loop": lambda m: m.fori_loop(0, 5, lambda i, x: x + i, 0),
    "fori_loop by name": lambda m: m.fori_loop(lower=1, upper=5, body_fun=lambda i, x: x + i, init_val=0, unroll=2),
    "fori_loop of no steps": lambda m: m.fori_loop(5, 0, lambda i, x: x + i, 0),
    "fori_loop from below zero": lambda m: m.fori_loop(-3, 4, lambda i, x: 2 * x + i, 0),
    "fori_loop beyond int32": lambda m: m.fori_loop(2**40, 2**40 + 3, lambda i, x: x + i, 0),
    "fori_loop to an array": lambda m: m.fori_loop(0, WEAK_FIVE, lambda i, x: x + i, 0),
    "fori_loop to int32": lambda m: m.fori_loop(0, FIVE, lambda i, x: x + i, jnp.int32(0)),
    "fori_loop to a NumPy integer": lambda m: m.fori_loop(0, np.int16(4), lambda i, x: x + i, jnp.int16(0)),
    "fori_loop over the range of uint8": lambda m: m.fori_loop(
        np.uint8(0), np.uint8(255), lambda i, x: x + i.astype(int), 0
    ),
    "fori_loop that indexes": lambda m: m.fori_loop(0, 4, lambda i, x: x.at[i].set(ROWS[i].sum()), jnp.zeros(4)),
    "fori_loop, unroll=2": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=2),
    "fori_loop, unroll=True": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=True),
    "fori_loop, unroll=0": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=0),
    "scan, unroll=0": lambda m: m.scan(lambda c, x: (c + x, c), 0, jnp.arange(5), unroll=0),
    "scan": lambda m: m.scan(lambda c, x: (c + x, c * x), jnp.zeros(3), ROWS),
    "scan by name": lambda m: m.scan(
        f=lambda c, x: (c + x, c), init=0, xs=jnp.arange(4), length=4, reverse=True, unroll=2
    ),
    "scan by position": lambda m: m.scan(lambda c, x: (c + x, c), 0, jnp.arange(4), 4, True, 2),
    "scan in reverse": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), reverse=True),
    "scan with length": lambda m: m.scan(lambda c, _: (2 * c, c), 1, None, 5),
    "scan with rows and length": lambda m: m.scan(lambda c, x: (c + x, c), 0.0, ROWS[0], 3),
    "scan with an array as length": lambda m: m.scan(lambda c, _: (2 * c, c), 1, length=FIVE),
    "scan with rows and an array as length": lambda m: m.scan(lambda c, x: (c + x, c), 0.0, ROWS[0], THREE),
    "scan of length 0": lambda m: m.scan(lambda c, _: (2 * c, c), 1, length=0),
    "scan of xs without arrays": lambda m: m.scan(lambda c, x: (c + 1, c), 0, {}, 3),
    "scan of many xs": lambda m: m.scan(lambda c, x: (c + x["a"], (x["b"], c, x["c"])), 0, MIXED),
    "scan of NumPy rows": lambda m: m.scan(lambda c, x: (c + x, x), np.float32(0), np.ones(3, np.float32)),
    "scan without outputs": lambda m: m.scan(lambda c, x: (c + x, None), 0.0, ROWS[0]),
    "scan with an output that is an int": lambda m: m.scan(lambda c, _: (c, 3), 1.0, length=2),
    "scan with an output that is a bool": lambda m: m.scan(lambda c, _: (c, True), 1.0, length=2),
    "scan with an output of NumPy": lambda m: m.scan(lambda c, _: (c, np.arange(3)), 1.0, length=2),
    "scan with a constant output": lambda m: m.scan(lambda c, x: (c + x, ROWS), 1.0, ROWS[0]),
    "scan whose f returns a list": lambda m: tuple(m.scan(lambda c, x: [c + x, c], 0.0, ROWS[0])),
    "scan, unroll=2": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), unroll=2),
    "scan, unroll=True": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), unroll=True),
    "scan in reverse, unroll=2": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), None, True, 2),
    "callable object": lambda m: m.fori_loop(0, 3, Doubling(), 1),
    "bound method": lambda m: m.fori_loop(0, 3, Doubling().method, 1),
    "partial with a keyword": lambda m: m.scan(partial(lambda c, x, k: (c + k * x, c), k=3.0), 0.0, ROWS[0]),
    "jitted": lambda m: m.scan(jax.jit(Doubling().step), 1.0, ROWS),
    "checkpointed": lambda m: m.scan(jax.checkpoint(Doubling().step), 1.0, ROWS),
    "fori_loop in scan": fori_in_scan,
}


MODULES: dict[str, Any] = {"loopax": lx, "lax": lax}


@ft.cache
def all_calls(name: str) -> Any:
    """In one program."""
    module = MODULES[name]
    return jax.jit(lambda: {name: call(module) for name, call in CALLS.items()})()


def test_calls() -> None:
    for name in CALLS:
        same(all_calls("loopax")[name], all_calls("lax")[name])


# Outside of jit: each loop, each sort of limit and length, of callable and of result.
EAGER = ["while_loop", "while_loop with a Python bool", "while_loop of a named tuple", "fori_loop", "fori_loop by name"]
EAGER += ["fori_loop to int32", "fori_loop to an array", "fori_loop, unroll=2", "fori_loop in scan", "scan by position"]
EAGER += ["scan with rows and an array as length", "scan of length 0", "scan of many xs", "callable object"]


@pytest.mark.parametrize(
    "call", [pytest.param(name, marks=[] if name in EAGER else [pytest.mark.slow]) for name in CALLS]
)
def test_call_outside_of_jit(call: str) -> None:
    same(CALLS[call](lx), all_calls("lax")[call])


# ---- under transformations


def power(m: Any, x: Any) -> Any:
    return m.fori_loop(0, 3, lambda _, y: y * x, x)


def horner(m: Any, x: Any) -> Any:
    carry, ys = m.scan(lambda c, a: (c * x + a, c * a), x, jnp.arange(4.0))
    return carry + ys.sum()


def nested(m: Any, x: Any) -> Any:
    return m.scan(lambda c, a: (power(m, x) + a * c, None), x, jnp.arange(3.0))[0]


TRANSFORMS: dict[str, Any] = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "grad of grad": lambda f: jax.grad(jax.grad(f)),
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("program", [power, horner, nested])
def test_derivatives_and_lanes_of_loops_with_a_fixed_number_of_steps(program: Any) -> None:
    def run(module: Any) -> Any:
        f = partial(program, module)
        of_lanes = lambda xs: {"values": jax.vmap(f)(xs), "gradients": jax.vmap(jax.grad(f))(xs)}
        derivatives = lambda x: {name: transform(f)(x) for name, transform in TRANSFORMS.items()}
        return jax.jit(lambda x, xs: (derivatives(x), of_lanes(xs)))(jnp.float64(2.0), np.arange(3.0))

    same(run(lx), run(lax))


def collatz(m: Any, x: Any) -> Any:
    return m.while_loop(lambda c: c[0] > 1, lambda c: (jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1] + 1), (x, 0))


def doubled_until(m: Any, x: Any) -> Any:
    return m.while_loop(lambda y: y < 9, lambda y: 2 * y, x)


def with_rows(m: Any, xs: Any) -> Any:
    return m.scan(lambda c, x: (c + 3.0 * x, 2.0 * c), xs[0], xs)


def along(m: Any, x: Any) -> Any:
    """With a Python number as tangent."""
    return jax.jvp(partial(doubled_until, m), (x,), (1.0,))


TRANSFORMED: dict[str, Any] = {
    "lanes of different lengths": lambda m: jax.jit(jax.vmap(partial(collatz, m)))(jnp.arange(1, 8)),
    "jvp": lambda m: jax.jit(partial(along, m))(1.5),
    "transpose": lambda m: jax.linear_transpose(partial(with_rows, m), jnp.zeros(3))(
        (jnp.float64(1.0), jnp.arange(3.0))
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_other_transformations(name: str) -> None:
    same(TRANSFORMED[name](lx), TRANSFORMED[name](lax))
