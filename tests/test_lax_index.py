"""The index of `fori_loop` is of the type that it is of in `jax.lax`, whatever types its limits are of."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.parity import same

LIMITS: Any = {
    "int, int": (1, 3),
    "int, int32": (1, np.int32(3)),
    "int, int64": (1, np.int64(3)),
    "int, int8": (1, np.int8(3)),
    "int8, int": (np.int8(1), 3),
    "int64, int": (np.int64(1), 3),
    **{f"{t}, {t}": (np.dtype(t).type(1), np.dtype(t).type(3)) for t in ["int8", "int16", "int64", "uint8", "uint64"]},
    "array, int": (jnp.asarray(1), 3),
    "int, array": (1, jnp.asarray(3)),
    "array, array": (jnp.asarray(1), jnp.asarray(3)),
    "array, int32": (jnp.asarray(1), jnp.int32(3)),
    "array, int64": (jnp.asarray(1), jnp.int64(3)),
    "int64, array": (jnp.int64(1), jnp.asarray(3)),
}


def run(module: Any, name: str, types: dict[Any, Any], limits: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        types[name, module] = jax.typeof(i)
        return 10 * x + i.astype(int)

    return module.fori_loop(*limits, body, jnp.int64(0))


@pytest.mark.parametrize("traced", [True, False])
def test_index_is_of_the_type_that_it_is_of_in_lax(traced: bool) -> None:
    """All limits in one program."""
    types: dict[Any, Any] = {}

    def all_of(module: Any) -> Any:
        over = lambda limits: {name: run(module, name, types, pair) for name, pair in limits.items()}
        return jax.jit(over)(LIMITS) if traced else jax.jit(lambda: over(LIMITS))()

    same(all_of(lx), all_of(lax))
    for name in LIMITS:
        assert types[name, lx] == types[name, lax]


@pytest.mark.parametrize("limits", [(1, np.int32(3)), (np.int32(1), 3), (np.int32(1), np.int32(3))])
def test_index_is_of_the_type_that_it_is_of_in_lax_without_x64(limits: Any) -> None:
    types = {}

    def run(module: Any, lower: Any, upper: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            types[module] = jax.typeof(i)
            return x

        return module.fori_loop(lower, upper, body, 0.0)

    with jax.enable_x64(False):
        same(*(jax.jit(partial(run, module))(*limits) for module in (lx, lax)))
    assert types[lx] == types[lax]
