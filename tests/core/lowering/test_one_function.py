"""Loops of which XLA makes one function: every operation that it is told to take, in all dtypes, and what it is not."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import loopax as lx
from loopax._src.core import Checkpoints, LoopFacts
from loopax._src.core.ir.kind import ResidualFacts, StepFacts
from loopax._src.core.jaxpr.cost import STEP_IN_FUNCTION
from loopax._src.jax_internals import one_function
from loopax._src.settings import costs

Step = Callable[[Any, Any], Any]
MARK = "xla_cpu_small_call"
needs_telling = pytest.mark.skipif(
    not one_function.NEEDS_TELLING,
    reason="XLA makes such functions itself from jaxlib 0.12 on, and is told on x86 alone",
)

makes_functions = pytest.mark.skipif(
    not one_function.MAKES_FUNCTIONS, reason="XLA makes functions of the least loops only"
)

FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
INTS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLAGS = [[bool(bits >> place & 1) for place in range(5)] for bits in (1, 6, 13, 18, 23, 31, 8, 4)]
SHAPES = [(), (1,), (7,), (0,), (3, 5), (2, 0), (33, 40)]


def of_floats(x: Array) -> list[Array]:
    y = 0.4 * x + jnp.asarray(0.1, x.dtype)
    few = x.reshape(-1)[:9]
    special = [] if x.dtype in ("float16", "bfloat16") else [lax.lgamma(y + 1), lax.digamma(y + 1), lax.erf_inv(y)]
    return [
        *(f(y) for f in (jnp.sin, jnp.cos, jnp.tan, jnp.arcsin, jnp.arccos, jnp.arctan, jnp.sinh, jnp.cosh, jnp.tanh)),
        *(f(y) for f in (jnp.exp, jnp.exp2, jnp.expm1, jnp.log1p, lax.erf, lax.erfc, lax.logistic, lax.cbrt)),
        *(f(abs(y) + 1) for f in (jnp.log, jnp.log2, jnp.sqrt, lax.rsqrt, jnp.arccosh, lax.bessel_i0e, lax.bessel_i1e)),
        *(f(y) for f in (jnp.floor, jnp.ceil, jnp.round, jnp.sign, jnp.isfinite, jnp.arcsinh, jnp.arctanh, lax.square)),
        jnp.arctan2(y, x + 2),
        jnp.nextafter(y, x) if x.dtype in ("float32", "float64") else y,
        y ** jnp.asarray(1.5, x.dtype),
        lax.reduce_precision(y, 5, 4),
        jnp.sort(jnp.where(few > jnp.asarray(1, x.dtype), few, jnp.asarray(jnp.nan, x.dtype))),
        lax.clamp(jnp.asarray(0, x.dtype), y, jnp.asarray(0.2, x.dtype)),
        *special,
    ]


def of_numbers(x: Array) -> list[Array]:
    one, flat = jnp.ones((), x.dtype), x.reshape(-1)
    ones, few, both = partial(jnp.ones, dtype=x.dtype), flat[:9], jnp.concatenate([flat, flat])
    found = [x + one, x - one, x * x, -x, lax.div(x, x * 0 + one + one), x**3, x == one, x != one]
    found += [jnp.where(x == x, x, one), x[None], flat[::-1], both, lax.pad(flat, one, [(1, 2, 0)]), x.T]
    found += [jnp.stack([x, x]), x.sum(dtype=x.dtype), x.prod(dtype=x.dtype), flat * flat.sum(dtype=x.dtype)]
    found += [lax.reduce_sum(x, (0,)) if x.ndim else x, jnp.cumsum(flat), jnp.cumprod(flat), jnp.outer(few, few)]
    found += [jnp.broadcast_to(x, (2, *x.shape)), flat @ flat, (one + one) * flat, flat[1:-1]]
    wide, stack = jnp.resize(flat, (4, 7)) if flat.size else ones((4, 7)), partial(lax.dot_general, ones((3, 4, 5)))
    found += [jnp.tril(ones((6, 5))) @ ones(5) * one, ones((5, 4)) @ wide, wide @ wide.T, wide @ wide.T @ wide]
    found += [wide[:1] @ wide.T, wide @ wide[1:2].T, stack(ones((3, 5, 2)), (([2], [1]), ([0], [0]))) * wide[0, 0]]
    found += [stack(ones((5, 3, 4)), (([1, 2], [2, 0]), ([0], [1]))) * wide[0, 1], ones((0, 4)) @ wide]
    found += [jnp.asarray(x.real, "float32").sum(), jnp.roll(x, 1), jnp.zeros_like(x), *jnp.split(both, 2)]
    return [*found, jnp.pad(flat, 1)[1:], flat[: flat.size // 2]]


def of_ordered(x: Array) -> list[Array]:
    flat, one = x.reshape(-1), jnp.ones((), x.dtype)
    found = [x < one, x >= one, x <= one, x > one, jnp.maximum(x, one), jnp.minimum(x, one), lax.rem(x, one + one)]
    found += [lax.cummax(flat), lax.cummin(flat), jnp.abs(x), jnp.clip(x, one, one + one)]
    few = flat[:9]
    found += [jnp.sort(few), jnp.argsort(few), *lax.sort((few % (one + one), few), num_keys=1)]
    return found + ([flat.max(), flat.min(), flat.argmax(), flat.argmin()] if x.size else [])


def of_places(x: Array) -> list[Array]:
    """Parts of an array at places that are computed."""
    flat, one = x.reshape(-1), jnp.ones((), x.dtype)
    i = (flat.size // 2 + jnp.abs(flat[0]).astype(jnp.int32)) % flat.size
    found = [flat[i], lax.dynamic_slice_in_dim(flat, i, 1), flat.at[i].set(one), flat.at[i].add(one)]
    found += [flat[jnp.stack([i, i])], flat.at[i].get(mode="fill"), lax.dynamic_update_index_in_dim(flat, one, i, 0)]
    places = (i + jnp.arange(5, dtype=jnp.int32)) % flat.size
    found += [
        flat[places],
        flat.at[places - 1].set(one),
        flat.at[places].add(x.reshape(-1)[0]),
        flat.at[places].mul(one),
    ]
    if x.ndim == 2:
        row, column = i % x.shape[0], jnp.stack([i, i, i + 1]) % x.shape[1]
        found += [x.at[jnp.stack([row, row])].add(x[:2]), x.at[row, column].add(one), x.at[:, column].set(one)]
        found += [x.at[column, column].add(one, mode="fill"), jax.vmap(lambda y: y.at[column].add(y[0]))(x)]
        found += [
            jax.vmap(lambda y, j: y.at[jnp.stack([j, j])].multiply(y[1]))(
                x[:, :5], row + jnp.arange(len(x), dtype=jnp.int32) % 5
            )
        ]
    return found


def of_matrices(x: Array) -> list[Array]:
    """Small ones, factorized and solved with."""
    numbers = jnp.resize(x.reshape(-1), (4, 4)) if x.size else jnp.ones((4, 4), x.dtype)
    square, right = (0.25 * numbers + jnp.diag(jnp.arange(2, 6).astype(x.dtype)))[::-1], numbers[:, :3]
    positive = square @ square.conj().T
    flags = [
        dict(zip(("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal"), f, strict=True)) for f in FLAGS
    ]
    solved = [lax.linalg.triangular_solve(square[::-1], right if f["left_side"] else right.T, **f) for f in flags]
    found = [*lax.linalg.lu(square), jnp.linalg.solve(square, right), jnp.linalg.inv(square), *solved]
    found += [jnp.linalg.cholesky(positive), jax.scipy.linalg.cho_solve((positive, True), right[:, 0])]
    return [*found, jnp.linalg.cholesky(-positive), jnp.linalg.inv(jnp.stack([square, positive]))]


def of_ints(x: Array) -> list[Array]:
    one = jnp.ones((), x.dtype)
    found = [x & one, x | one, x ^ one, ~x, x // (one + one), x % (one + one), lax.population_count(x), lax.clz(x)]
    found += [f(x, one) for f in (lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical)]
    return [*found, lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")]


def of_complex(x: Array) -> list[Array]:
    found = [x.real, x.imag, jnp.conj(x), abs(x), lax.complex(x.real, x.imag), x ** (x + 1), jnp.sign(x)]
    return [*found, *(f(x) for f in (jnp.exp, jnp.sin, jnp.cos, jnp.tanh, jnp.sqrt)), jnp.log(x + 1)]


def steps_of(dtype: str) -> list[Callable[[Array], list[Array]]]:
    matrices = [of_matrices] if dtype in ("float32", "float64", *COMPLEX) else []
    if dtype in COMPLEX:
        return [of_numbers, of_places, of_complex, *matrices]
    return [of_numbers, of_ordered, of_places, of_floats if dtype in FLOATS else of_ints, *matrices]


def text_of(function: Any, *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).as_text()


def scanned(scan: Any, step: Callable[[Array], list[Array]], start: Array) -> Any:
    def body(i: Array, _: None) -> tuple[Array, list[Array]]:
        return i + 1, step(start + i.astype(start.dtype))

    return scan(body, jnp.int32(0), None, length=2)[1]


FAST = [("float32", (3, 5)), ("float64", ()), ("complex64", (7,)), ("int32", (0,)), ("bfloat16", (1,))]
ALL = [(dtype, shape) for dtype in (*FLOATS, *COMPLEX, *INTS) for shape in SHAPES]


@makes_functions
@pytest.mark.parametrize(
    ("dtype", "shape"), [pytest.param(*one, marks=() if one in FAST else pytest.mark.slow) for one in ALL], ids=str
)
def test_operations(dtype: str, shape: tuple[int, ...]) -> None:
    start = jnp.asarray(np.random.RandomState(0).uniform(0, 2, shape), dtype)
    for step in steps_of(dtype):
        if step is of_places and not start.size:
            continue
        told = jax.jit(lambda x, step=step: scanned(lx.scan, step, x))
        assert MARK in told.lower(start).as_text() or not one_function.NEEDS_TELLING, step
        expected = jax.jit(lambda x, step=step: scanned(lax.scan, step, x))(start)
        for i, (x, y) in enumerate(zip(told(start), expected, strict=True)):
            exact = jnp.finfo(x.dtype).eps if jnp.issubdtype(x.dtype, jnp.inexact) else 0
            x, y = (np.asarray(a).astype("complex128" if dtype in COMPLEX else "float64") for a in (x, y))
            np.testing.assert_allclose(x, y, 16 * float(exact), 16 * float(exact), err_msg=f"{step.__name__}, {i}")


W, DENSE = jnp.full((64, 64), 0.01), jnp.full((8, 8), 0.1)
LEFT_ALONE: dict[str, tuple[Step, Any]] = {
    "a product of matrices": (lambda i, x: jnp.tanh(x @ DENSE), jnp.ones((129, 8))),
    "a batch of products": (lambda i, x: jnp.einsum("bij,bj->bi", jnp.stack([DENSE] * 17), x), jnp.ones((17, 8))),
    "a convolution": (lambda i, x: lax.conv(x, jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"), jnp.ones((1, 1, 9, 9))),
    "a sort": (lambda i, x: jnp.sort(x)[::-1], jnp.arange(99.0)),
    "a solve": (lambda i, x: jnp.linalg.solve(jnp.eye(9) + 0.1, x), jnp.ones(9)),
    "writes at many places": (lambda i, x: x.at[(i + jnp.arange(200, dtype=jnp.int32)) % 9].add(1.0), jnp.ones(9)),
    "a sum of many": (lambda i, x: x - x.sum() / 5000, jnp.ones(5000)),
    "a product of long vectors": (lambda i, x: x - x @ x / 5000, jnp.ones(5000)),
    "a large array": (lambda i, x: jnp.sin(x), jnp.ones(20_000)),
    "keys of XLA's own": (
        lambda i, x: x + jax.random.normal(jax.random.fold_in(jax.random.key(0, impl="rbg"), i)),
        jnp.ones(()),
    ),
    "numbers of eight bits": (lambda i, x: (x.astype("float32") * 0.5).astype(x.dtype), jnp.ones(3, "float8_e4m3fn")),
    "a callback": (lambda i, x: (jax.debug.print("{}", x), jnp.sin(x))[1], jnp.ones(3)),
    "a value from the host": (
        lambda i, x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        jnp.ones(3),
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_no_function_can_hold(name: str) -> None:
    """XLA would not compile it, or compute it more slowly, or without the threads that it is worth."""
    step, start = LEFT_ALONE[name]
    loop = jax.jit(lambda x: lx.fori_loop(0, 2, step, x))
    assert MARK not in loop.lower(start).as_text()
    expected = lax.fori_loop(0, 2, lambda i, x: step(jnp.int32(i), x), start)
    np.testing.assert_allclose(loop(start).astype("float32"), expected.astype("float32"), 1e-6)


TABLE = np.random.RandomState(0).randn(3000)
TAKEN: dict[str, tuple[Step, Any]] = {
    "a matrix and a vector": (lambda i, x: jnp.tanh(W @ x + x @ W), jnp.ones(64)),
    "an operand without a use": (lambda i, x: (x[0] + 1, jnp.sin(x[1]), 0 * x[2]), (1, jnp.ones(3), jnp.arange(3))),
    "constants": (lambda i, x: jnp.sin(x) + jnp.asarray(TABLE)[7 * i], jnp.ones(())),
    "a loop of lax": (lambda i, x: lax.fori_loop(0, 3, lambda j, x: jnp.sin(x) + i, x), jnp.ones(5)),
    "a scan of lax": (lambda i, x: lax.scan(lambda c, y: (c + y, c), x[0], x)[1], jnp.ones(5)),
    "a loop of loopax": (lambda i, x: lx.fori_loop(0, i + 2, lambda j, x: jnp.sin(x) + j, x, max_steps=9), jnp.ones(5)),
    "sums at places": (lambda i, x: jnp.sin(x[jnp.stack([i, 2 * i, 2 * i])]).sum() + x, jnp.ones(9)),
    "small matrices": (lambda i, x: jnp.linalg.solve(x @ x.T + jnp.eye(3), x[::-1]), jnp.arange(9.0).reshape(3, 3)),
    "a sort of few": (lambda i, x: jnp.sort(x)[::-1] * x, jnp.arange(9.0)),
    "branches": (lambda i, x: lx.switch(i % 3, [jnp.sin, jnp.cos, lambda x: x], x), jnp.ones(5)),
    "branches of lax": (lambda i, x: lax.cond(i % 2 == 0, jnp.sin, jnp.cos, x), jnp.ones(5)),
    "random numbers": (lambda i, x: x + jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (5,)), jnp.ones(5)),
}


@needs_telling
@pytest.mark.parametrize("name", TAKEN)
def test_derivatives(name: str) -> None:
    """The loop and its gradient, alone and in a batch, are functions of any kind, and the same as those of none."""
    step, start = TAKEN[name]
    is_real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)

    def total(kind: Any, x: Any) -> Array:
        leaves = jax.tree.leaves(lx.fori_loop(0, 5, step, x, kind=kind))
        return sum((jnp.sum(y) for y in leaves if is_real(y)), jnp.zeros(()))

    def programs(kind: Any) -> list[tuple[Any, Any]]:
        program = jax.value_and_grad(partial(total, kind), allow_int=True)
        return [(program, start), (jax.vmap(program), jax.tree.map(lambda x: jnp.stack([x, x]), start))]

    with mock.patch.object(one_function, "NEEDS_TELLING", False):
        jax.clear_caches()
        expected = [jax.jit(function)(x) for function, x in programs("residuals")]
        jax.clear_caches()
    for kind in ("residuals", "bounded", "checkpointed", lx.Checkpointed(2)):
        for is_batch, (function, x) in enumerate(programs(kind)):
            lowered = jax.jit(function).lower(x)
            assert MARK in lowered.as_text() or (is_batch and name == "a matrix and a vector")
            found = lowered.compile()(x)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected[is_batch]), strict=True):
                if is_real(a):
                    np.testing.assert_allclose(a, b, 1e-12, 1e-14)


@makes_functions
def test_small_operations_are_written_so_under_any_setting() -> None:
    step, start = TAKEN["small matrices"]
    gradient = jax.grad(lambda x: lx.fori_loop(0, 3, step, x).sum())
    with jax.disable_jit():
        text = jax.jit(gradient).lower(start).as_text()
    assert "lapack" not in text
    with jax.enable_checks(True), jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(gradient)(start), gradient(start), 1e-10)


@needs_telling
def test_many_small_leaves_are_one_function_forward_and_back() -> None:
    """Nothing is called by itself in the loops of 60 scalars."""
    start = [jnp.float32(0.1 * i) for i in range(60)]
    scan = lambda x: lx.scan(lambda c, _: ([jnp.sin(x) for x in c], None), x, None, length=100)[0]
    text = jax.jit(jax.grad(lambda x: sum(scan(x)))).lower(start).compile().as_text() or ""
    entry = text[text.index("\nENTRY") :]
    assert text.count(f'{MARK}="true"') >= 2
    assert " while(" not in entry


def test_programs_of_several_devices_and_for_export_are_left_alone() -> None:
    """What XLA inserts there does not compile within a function; what is exported, another version compiles."""
    loop = jax.jit(lambda x: lx.fori_loop(0, 2, lambda i, x: jnp.sin(x), x))
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    spread = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("d")))
    assert MARK not in loop.lower(spread).as_text()
    by_device = jax.shard_map(loop, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert MARK not in jax.jit(by_device).lower(spread).as_text()
    assert MARK not in str(jax.export.export(loop)(spread).mlir_module())
    np.testing.assert_allclose(loop(spread), loop(jnp.ones(8)), 1e-15)


class Asking(lx.Kind):
    """A kind that remembers what it was told of a loop."""

    def __init__(self) -> None:
        """Nothing so far."""
        self.told: list[tuple[StepFacts, ResidualFacts]] = []

    def plan(self, loop: LoopFacts) -> Checkpoints:
        """Carries at some steps."""
        self.told.append((loop.step, loop.residuals))
        return Checkpoints()


def facts_of(step: Step, *shape: int) -> tuple[StepFacts, ResidualFacts]:
    """What a kind is told of a step."""
    asking = Asking()
    jax.make_jaxpr(jax.grad(lambda x: lx.fori_loop(0, 100, step, x, kind=asking).sum()))(jnp.ones(shape))
    return asking.told[-1]


@makes_functions
def test_kinds_are_told_of_functions() -> None:
    """Their steps and operations cost no calls."""
    small, rows = facts_of(lambda i, y: y - 0.1 * y * y, 3)
    nested, _ = facts_of(TAKEN["a loop of loopax"][0], 3)
    assert small.overhead == nested.overhead == STEP_IN_FUNCTION
    assert rows.derivative < costs().step
    other, rows = facts_of(lambda i, y: jnp.tanh(y @ W), 64, 64)
    assert other.overhead == costs().step
    assert rows.derivative > costs().step + costs().call


def test_other_devices_have_no_such_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    step, _ = facts_of(lambda i, y: y - 0.1 * y * y, 3)
    assert step.overhead == costs().step


def test_programs_that_are_gone_keep_no_arrays_alive() -> None:
    def run() -> None:
        data = jnp.ones(1234)
        step = jax.jit(lambda c: c + data[0])
        thrice = lambda: lx.fori_loop(0, 3, lambda _, c: step(c), 0.0)
        program = jax.jit(lambda: lx.cond(data[1] > 0, step, lambda c: c, thrice()))
        assert program() == 4.0
        program.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]

    run()
    gc.collect()
    assert [x for x in jax.live_arrays() if x.shape == (1234,)] == []
