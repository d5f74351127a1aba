"""Any dtype goes through a loop, PRNG keys too, with gradients of their types."""

import functools as ft
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.pytrees.comparison import EACH_KIND, EACH_LOOP, lax_loop, same
from tests.support.blocks import python_loop

NUMBERS = [
    *("bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]


def bump(tree: Any) -> Any:
    return jax.tree.map(lambda x: ~x if x.dtype == bool else x + jnp.ones((), x.dtype), tree)


@ft.cache
def three_bumps() -> Any:
    return jax.jit(partial(python_loop, bump))(ones())


def of_each_dtype(make: Callable[[str], Any]) -> dict[str, Any]:
    return {dtype: jax.tree.map(jnp.asarray, make(dtype)) for dtype in NUMBERS}


def ones() -> Any:
    """Scalars, vectors and arrays without elements."""
    return of_each_dtype(lambda dtype: [np.ones(shape, np.dtype(dtype)) for shape in [(), (2,), (0, 3)]])


@EACH_LOOP
def test_dtypes(loop: Any) -> None:
    same(loop(bump, ones()), three_bumps())


def test_dtypes_of_rows() -> None:
    xs = of_each_dtype(lambda dtype: np.arange(3).astype(np.dtype(dtype)))
    first = of_each_dtype(lambda dtype: np.zeros((), np.dtype(dtype)))
    run = lambda scan: jax.jit(lambda first, xs: scan(lambda c, x: (bump(c), (x, c)), first, xs))(first, xs)
    same(run(lx.scan), run(lax.scan))


def squares(run: Any) -> Any:
    return lambda x: run(0, 2, lambda _, c: (c[0] * c[0], c[1] + 1), (x, jnp.int8(0)))[0]


@EACH_KIND
def test_gradient_in_its_dtype(kind: Any) -> None:
    f = squares(partial(lx.fori_loop, kind=kind))
    xs = {dtype: jnp.asarray(np.full((), 1.5, np.dtype(dtype))) for dtype in ("bfloat16", "float32", "complex64")}
    run = lambda xs: {dtype: jax.grad(f, holomorphic=dtype == "complex64")(x) for dtype, x in xs.items()}
    same(jax.jit(run)(xs), jax.jit(lambda xs: {dtype: 4 * x**3 for dtype, x in xs.items()})(xs))


# ---- PRNG keys

SPLIT: Any = lambda key: jax.random.split(key)[0]


def keys() -> Any:
    makers = {"typed": jax.random.key, "raw": jax.random.PRNGKey}
    return {(name, impl): make(0, impl=impl) for name, make in makers.items() for impl in ("threefry2x32", "rbg")}


def split_each(keys: Any) -> Any:
    """Raw keys are taken for those of the default implementation."""
    counts = ("raw", "rbg")
    return {name: key + jnp.uint32(1) if name == counts else SPLIT(key) for name, key in keys.items()}


@EACH_LOOP
def test_prng_keys_in_the_carry(loop: Any) -> None:
    same(jax.jit(partial(loop, split_each))(keys()), jax.jit(partial(lax_loop, split_each))(keys()))


# ---- nothing to carry, nothing to read, nothing to return


EMPTY: list[Any] = [(), None, {}, [], ((), None)]


def test_empty_carry() -> None:
    """Of each loop, in one program, and outside of `jit`."""

    def run() -> Any:
        options: Any = {"max_steps": 3, "throw": False, "info": True}
        scanned = [lx.scan(lambda c, x: (c, 2 * x), empty, jnp.arange(3)) for empty in EMPTY]
        nothing = [lx.scan(lambda c, _, empty=empty: (c, empty), empty, jnp.arange(3)) for empty in EMPTY]
        stopped = [lx.while_loop(lambda _: True, lambda c: c, empty, **options) for empty in EMPTY]
        none = [lx.while_loop(lambda _: False, lambda c: c, empty) for empty in EMPTY]
        return [lx.fori_loop(0, 3, lambda _, c: c, empty) for empty in EMPTY], none, nothing, scanned, stopped

    for f in (run, jax.jit(run)):
        counted, none, nothing, scanned, stopped = f()
        assert counted == none == EMPTY
        assert nothing == [(empty, empty) for empty in EMPTY]
        assert [(carry, ys.tolist()) for carry, ys in scanned] == [(empty, [0, 2, 4]) for empty in EMPTY]
        assert [(out, info.num_steps, info.limit_reached) for out, info in stopped] == [(e, 3, True) for e in EMPTY]


@pytest.mark.parametrize("xs", [None, (), {}, [(), None], {"name": "only"}])
def test_xs_without_arrays(xs: Any) -> None:
    carry, seen = lx.scan(lambda c, x: (c + 1, (c, x)), 0, xs, length=3)
    assert (carry, seen[0].tolist(), seen[1]) == (3, [0, 1, 2], xs)
