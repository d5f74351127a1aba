"""JAX's flags for debugging, `jax_debug_nans` and `jax_debug_infs`, and Equinox's for what fails: `EQX_ON_ERROR`."""

import functools as ft
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import RUN_TIME, eagerly, raises
from tests.support.op_by_op import op_by_op

TWO = jnp.array([1.0, 2.0])


def grown(x: Any, **options: Any) -> Any:
    """x and as much again until it is 3; a vector, for which a constant has to be made larger."""
    return lx.while_loop(lambda c: c.sum() < 6, lambda c: c + x, x * TWO / TWO, max_steps=6, **options).sum()


def growing_power(x: Any, lane: Any = 1.0) -> Any:
    """Without a bound: reverse mode does not know how far it can count."""
    return lx.while_loop(lambda c: c.sum() < 60, lambda c: c * x, x * TWO * lane).sum()


def rows(x: Any, n: Any) -> Any:
    carry, ys = lx.scan(lambda c, row: (c + x * row, c), jnp.zeros(2), jnp.ones((4, 2)), n)
    return (carry + ys.sum(0)).sum()


def buffer(x: Any) -> Any:
    full = lx.fori_loop(0, 3, lambda i, b: b.append(x * TWO, when=i > 0), lx.Buffer(3, like=TWO))
    return (full[-1] * full[0] + full.rows.sum(0)).sum()


def lanes(x: Any, how: Any = "compact") -> Any:
    return jax.vmap(lambda y: grown(y, lanes=how))(x * TWO).sum()


def other_dtypes(x: Any) -> Any:
    start = (jax.lax.complex(x * TWO, TWO), TWO.astype(jnp.bfloat16), jax.random.key(0), 1, True)
    z, *_ = lx.while_loop(lambda c: c[0].real.sum() < 6, lambda c: (c[0] * 2, *c[1:]), start, max_steps=6)
    return jnp.abs(z).sum()


searched = lx.rewrite_loops(lambda x: jax.lax.while_loop(lambda c: c < 9, lambda c: c * x, x), max_steps=6)
N = jnp.int32(2)

PROGRAMS: Any = {
    "while_loop": (grown, 2.0),
    **{f"gradient, {kind}": (jax.grad(lambda x, kind=kind: grown(x, kind=kind)), 2.0) for kind in ("auto", "bounded")},
    "hessian": (jax.hessian(grown), 2.0),
    "no bound, jvp": (lambda x: jax.jvp(growing_power, (x,), (x,)), 2.0),
    "traced length, grad": (jax.grad(lambda x: rows(x, N)), 2.0),
    "traced length, lanes": (jax.vmap(rows, (None, 0)), 2.0, jnp.arange(3)),
    "Buffer, vmap of grad": (jax.vmap(jax.grad(buffer)), TWO),
    "compact lanes": (jax.grad(lanes), 2.0),
    "other dtypes": (other_dtypes, 2.0),
    "rewrite_loops": (jax.grad(searched), 2.0),
    "trace": (
        lambda x: lx.stochtrace.estimate_trace(jnp.eye(3) * x, jax.random.key(0), num_matvecs=N, max_matvecs=3).value,
        2.0,
    ),
}


def debugging(infs: bool = True) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(jax.debug_nans(True))
    stack.enter_context(jax.debug_infs(infs))
    return stack


@ft.cache
def expected(program: str) -> Any:
    f, *arguments = PROGRAMS[program]
    return jax.jit(f)(*arguments)


LONG_WITHOUT_JIT = ["trace", "hessian", "other dtypes"]
CASES = [
    pytest.param(name, jit, marks=pytest.mark.slow if name in (["trace"] if jit else LONG_WITHOUT_JIT) else ())
    for name in PROGRAMS
    for jit in (True, False)
]


@pytest.mark.parametrize(("program", "jit"), CASES)
def test_no_nan_is_computed_where_none_is_a_result(program: str, jit: bool) -> None:
    """Every operation is looked at outside of `jit`, and inside too without it."""
    f, *arguments = PROGRAMS[program]
    # A standard error is infinite until there are two samples, as `estimate_trace` says.
    with debugging(infs=program != "trace"):
        found = f(*arguments) if jit else op_by_op(f)(*arguments)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected(program)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def broken(x: Any) -> Any:
    return lx.fori_loop(0, 4, lambda _, x: jnp.log(x), x)


@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_what_fails_is_found_where_it_is(jit: Any) -> None:
    """JAX looks for NaN operation by operation, in which one of ours would come first."""
    with jax.debug_nans(True), raises(FloatingPointError, "invalid value (nan) encountered in log"):
        jit(lambda x: jnp.log(grown(x) - 100))(2.0)
    for f in (broken, jax.vmap(broken)):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in while") as error:
            jit(f)(jnp.full(3, 2.0))
        assert "give finite=True to the loop" in str(error.value.__notes__)
    for f in (grown, jax.grad(grown)):
        with debugging(), raises((*RUN_TIME, ValueError), "max_steps=6 stopped a loop"):
            jax.block_until_ready(jit(f)(1e-3))


FLAGGED = """
import warnings
import jax, jax.numpy as jnp, loopax as lx
def f(x):
    return lx.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + x, c[1] + 1, c[1] > 0), (x, 0, False), max_steps=1)
def show(result):
    print(*map(str, jax.tree.leaves(result)))
for jit in (jax.jit, lambda f: f):
    for g in (f, jax.grad(lambda x: f(x)[0])):
        for x in (1.0, 2.0):
            with warnings.catch_warnings(action="ignore"):  # Equinox warns of what it knows when the program is traced
                show(jit(g)(x))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "failed"), [("nan", ["nan 2147483647 True", "nan"]), ("off", ["2.0 1 False", "2.0"])])
def test_other_ways_to_fail(mode: str, failed: list[str]) -> None:
    """They are for the whole process."""
    environment = os.environ | {"EQX_ON_ERROR": mode, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", FLAGGED], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [failed[0], "4.0 1 False", failed[1], "2.0"] * 2
