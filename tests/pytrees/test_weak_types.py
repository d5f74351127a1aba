"""The types of a carry are those of `jax.lax`: Python numbers and weak types are promoted as there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.pytrees.comparison import eagerly, same

i32, i64, f16, f32, f64 = jnp.int32(1), jnp.int64(1), jnp.float16(1), jnp.float32(1), jnp.float64(1)
bf16, c64 = jnp.bfloat16(1), jnp.complex64(1)
CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int + float": (0, lambda x: x + 1.5),
    "int + bfloat16": (0, lambda x: x + bf16),
    "int to bool": (0, lambda x: x + jnp.asarray(True)),
    "float": (1.0, lambda x: x * 2.0),
    "float + bfloat16": (1.0, lambda x: x + bf16),
    "float + float64": (1.0, lambda x: x + f64),
    "bool": (True, lambda x: x & jnp.asarray(False)),
    "int32": (i32, lambda x: x + 1),
    "float32": (f32, lambda x: x * 2.0),
    "float to itself": (1.0, lambda x: x),
    "weak array": (jnp.asarray(1.0), lambda x: x + f16),
    "weak array to float": (jnp.asarray(1), lambda x: 2.5),
    "float to a Python number": (1.0, lambda x: 2.0),
    "swap of weak and strong": ((0, i64), lambda c: (c[1], c[0])),
    "numpy scalar": (np.float32(1), lambda x: x + 1.0),
    "numpy bool": (np.bool_(True), lambda x: ~x),
    "result in numpy": (f32, lambda x: np.float32(3)),
    "broadcast weak": (lax.full_like(jnp.asarray(1.0), 1.0, shape=(2,)), lambda x: x * 2.0),
}


def of_while(module: Any, step: Any, init: Any) -> Any:
    return module.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, init))


def of_fori(module: Any, step: Any, init: Any) -> Any:
    return module.fori_loop(0, 3, lambda _, c: step(c), init)


def of_scan(module: Any, step: Any, init: Any, length: int = 3) -> Any:
    return module.scan(lambda c, _: (step(c), (c, step(c))), init, length=length)


of_scan_without_steps = partial(of_scan, length=0)


EACH_FORM = pytest.mark.parametrize("form", [of_while, of_fori, of_scan, of_scan_without_steps])


@EACH_FORM
def test_types_are_those_of_lax(form: Any) -> None:
    with jax.numpy_dtype_promotion("standard"):
        for case, (init, step) in CASES.items():
            ours, theirs = (jax.make_jaxpr(partial(form, m, step))(init).out_avals for m in (lx, lax))
            assert ours == theirs, case


# Each way in which a leaf comes to its type, once: of Python, of NumPy, strong, weak, promoted by another.
OUTSIDE_OF_JIT = ["int + float", "float + bfloat16", "float32", "weak array", "swap of weak and strong", "numpy scalar"]
OUTSIDE_OF_JIT += ["result in numpy", "numpy bool", "float to itself"]


def of_each_case(module: Any) -> Any:
    run = lambda inits: {case: of_scan(module, CASES[case][1], init) for case, init in inits.items()}
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(run)({case: init for case, (init, _) in CASES.items()})


def test_values_and_types_are_those_of_lax() -> None:
    found, expected = of_each_case(lx), of_each_case(lax)
    for case, (init, step) in CASES.items():
        same(found[case], expected[case])
        if case in OUTSIDE_OF_JIT:
            with jax.numpy_dtype_promotion("standard"):
                same(jax.tree.map(jnp.asarray, of_scan(lx, step, init)), expected[case])
                same(*(jax.tree.map(jnp.asarray, of_scan_without_steps(m, step, init)) for m in (lx, lax)))


@EACH_FORM
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_weak_types_are_promoted_as_often_as_it_takes(form: Any, jit: Any) -> None:
    step = lambda c: (c[1], c[2], c[3] * 2, c[3])
    with jax.numpy_dtype_promotion("standard"):
        out = jit(partial(form, lx, step))((0, 0, 0, bf16))
    leaves = jax.tree.leaves(out)[1 if form is of_while else 0 :]
    assert [(x.dtype.name, x.weak_type) for x in leaves] == [("bfloat16", False)] * len(leaves)


REFUSED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int32 + float": (i32, lambda x: x + 1.5),
    "float32 to float64": (f32, lambda x: f64),
    "float16 to a Python number": (f16, lambda x: 2.0),
    "bool to int": (jnp.asarray(True), lambda x: 1),
    "int to bool": (0, lambda x: x > 1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_strong_types_are_refused_as_lax_does(case: str) -> None:
    init, step = REFUSED[case]
    with jax.numpy_dtype_promotion("standard"):
        for loop in (of_while, of_fori, of_scan):
            with pytest.raises(TypeError):
                loop(lax, step, init)
            with pytest.raises(TypeError, match="same types"):
                loop(lx, step, init)
