"""The types of a carry are those of `jax.lax`: Python numbers and weak types are promoted as there."""

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
from tests.pytrees.comparison import eagerly, same

i32, i64, f16, f32, f64 = jnp.int32(1), jnp.int64(1), jnp.float16(1), jnp.float32(1), jnp.float64(1)
bf16, c64 = jnp.bfloat16(1), jnp.complex64(1)
CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int": (0, lambda x: x + 1),
    "int + float": (0, lambda x: x + 1.5),
    "int + int8": (0, lambda x: x + jnp.int8(1)),
    "int + uint8": (0, lambda x: x + jnp.uint8(1)),
    "int + int32": (0, lambda x: x + i32),
    "int + int64": (0, lambda x: x + i64),
    "int + bfloat16": (0, lambda x: x + bf16),
    "int + complex": (0, lambda x: x + 1j),
    "int to int64": (0, lambda x: i64),
    "int to bool": (0, lambda x: x + jnp.asarray(True)),
    "float": (1.0, lambda x: x * 2.0),
    "float + int": (1.0, lambda x: x + 1),
    "float + int32": (1.0, lambda x: x + i32),
    "float + float16": (1.0, lambda x: x + f16),
    "float + bfloat16": (1.0, lambda x: x + bf16),
    "float + float32": (1.0, lambda x: x + f32),
    "float + float64": (1.0, lambda x: x + f64),
    "float + complex64": (1.0, lambda x: x + c64),
    "float + complex": (1.0, lambda x: x + 1j),
    "complex": (1j, lambda x: x * 2.0),
    "complex + complex64": (1j, lambda x: x + c64),
    "bool": (True, lambda x: x & jnp.asarray(False)),
    "int32": (i32, lambda x: x + 1),
    "float32": (f32, lambda x: x * 2.0),
    "float32 to itself": (f32, lambda x: x),
    "float to itself": (1.0, lambda x: x),
    "weak array": (jnp.asarray(1.0), lambda x: x + f16),
    "weak array to float": (jnp.asarray(1), lambda x: 2.5),
    "float64 to a Python number": (f64, lambda x: 2.0),
    "int64 to a Python number": (i64, lambda x: 2),
    "float to a Python number": (1.0, lambda x: 2.0),
    "swap of weak and strong": ((0, i64), lambda c: (c[1], c[0])),
    "swap of weak and strong floats": ((1.0, f64), lambda c: (c[1], c[0])),
    "numpy scalar": (np.float32(1), lambda x: x + 1.0),
    "numpy int": (np.int8(1), lambda x: x + 1),
    "numpy array": (np.ones(2, np.float32), lambda x: x * 2.0),
    "numpy bool": (np.bool_(True), lambda x: ~x),
    "result in numpy": (f32, lambda x: np.float32(3)),
    "array of weak type": (jnp.ones(2) * 1.0, lambda x: x * 2.0),
    "broadcast weak": (lax.full_like(jnp.asarray(1.0), 1.0, shape=(2,)), lambda x: x * 2.0),
}


def of_while(module: Any, step: Any, init: Any) -> Any:
    return module.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, init))


def of_fori(module: Any, step: Any, init: Any) -> Any:
    return module.fori_loop(0, 3, lambda _, c: step(c), init)


def of_scan(module: Any, step: Any, init: Any) -> Any:
    return module.scan(lambda c, _: (step(c), (c, step(c))), init, length=3)


def of_scan_without_steps(module: Any, step: Any, init: Any) -> Any:
    return module.scan(lambda c, _: (step(c), (c, step(c))), init, length=0)


EACH_FORM = pytest.mark.parametrize("form", [of_while, of_fori, of_scan, of_scan_without_steps])


@EACH_FORM
@pytest.mark.parametrize("case", CASES)
def test_types_are_those_of_lax(form: Any, case: str) -> None:
    init, step = CASES[case]
    types = lambda module: jax.make_jaxpr(partial(form, module, step))(init).out_avals
    with jax.numpy_dtype_promotion("standard"):
        assert types(lx) == types(lax)


def of_each_case(module: Any) -> Any:
    run = lambda inits: {case: of_scan(module, CASES[case][1], init) for case, init in inits.items()}
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(run)({case: init for case, (init, _) in CASES.items()})


@ft.cache
def lax_of_each_case() -> Any:
    return of_each_case(lax)


def test_values_and_types_are_those_of_lax() -> None:
    found, expected = of_each_case(lx), lax_of_each_case()
    for case in CASES:
        same(found[case], expected[case])


# Each way in which a leaf comes to its type, once: of Python, of NumPy, strong, weak, promoted by another.
OUTSIDE_OF_JIT = ["int + float", "float + bfloat16", "float32", "weak array", "swap of weak and strong", "numpy scalar"]
OUTSIDE_OF_JIT += ["result in numpy", "numpy bool", "float to itself"]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in OUTSIDE_OF_JIT else [pytest.mark.slow]) for case in CASES]
)
def test_values_and_types_are_those_of_lax_outside_of_jit(case: str) -> None:
    init, step = CASES[case]
    with jax.numpy_dtype_promotion("standard"):
        same(jax.tree.map(jnp.asarray, of_scan(lx, step, init)), lax_of_each_case()[case])


@pytest.mark.parametrize("case", ["int + float", "int + int64", "swap of weak and strong"])
def test_types_are_those_of_lax_where_no_step_is_taken_outside_of_jit(case: str) -> None:
    init, step = CASES[case]
    with jax.numpy_dtype_promotion("standard"):
        same(*(of_scan_without_steps(module, step, init) for module in (lx, lax)))


@EACH_FORM
def test_types_are_those_of_lax_under_vmap(form: Any) -> None:
    step = lambda c: (c[0] + 1.5, c[1] + f32, c[2])
    run = lambda module: jax.vmap(partial(form, module, step), in_axes=((0, None, None),))((jnp.arange(2.0), 0, 0))
    with jax.numpy_dtype_promotion("standard"):
        same(run(lx), run(lax))


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
    "float32 to a weak float64": (f32, lambda x: 2.0 * jnp.ones(())),
    "float16 to a Python number": (f16, lambda x: 2.0),
    "bool to int": (jnp.asarray(True), lambda x: 1),
    "int to bool": (0, lambda x: x > 1),
    "numpy int to float": (np.int32(1), lambda x: x * 0.5),
}


@pytest.mark.parametrize("loop", [of_while, of_fori, of_scan])
@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_strong_types_are_refused_as_lax_does(loop: Any, case: str) -> None:
    init, step = REFUSED[case]
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(TypeError):
            loop(lax, step, init)
        with pytest.raises(TypeError, match="same types"):
            loop(lx, step, init)
