"""Calls of `jax.lax` loops work when the name of the module is changed, to the value and type of every result."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx


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


def same(actual: Any, expected: Any) -> None:
    """Equal pytrees, to the dtype and weak type of every leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(jnp.asarray(a)) == jax.typeof(jnp.asarray(e))  # weak types included
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def eagerly(f: Any) -> Any:
    return f


EACH_MODULE = pytest.mark.parametrize("module", [lax, lx], ids=["lax", "loopax"])


# ---- calls as they stand in programs


def nested_scans(m: Any) -> Any:
    inner = lambda c, x: m.scan(lambda c, x: (c + x, c * x), c, x)
    return m.scan(inner, 0.0, ROWS)


def while_in_fori(m: Any) -> Any:
    return m.fori_loop(0, 4, lambda i, x: m.while_loop(lambda y: y < 10 * i, lambda y: 2 * y + 1, x), 0)


def fori_in_scan(m: Any) -> Any:
    return m.scan(lambda c, n: (m.fori_loop(0, n, lambda i, x: x + i, c), c), 0, jnp.arange(5))


def scan_in_cond(m: Any) -> Any:
    total = lambda xs: m.scan(lambda c, x: (c + x, None), 0.0, xs)[0]
    return lax.cond(ROWS[0, 0] < 1, total, lambda xs: xs[0], ROWS[:, 1])


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
    "while_loop with a NumPy bool": lambda m: m.while_loop(lambda x: np.bool_(False), lambda x: x, 1.0),
    "fori_loop": lambda m: m.fori_loop(0, 5, lambda i, x: x + i, 0),
    "fori_loop by name": lambda m: m.fori_loop(lower=1, upper=5, body_fun=lambda i, x: x + i, init_val=0, unroll=2),
    "fori_loop of no steps": lambda m: m.fori_loop(5, 0, lambda i, x: x + i, 0),
    "fori_loop of an empty range": lambda m: m.fori_loop(5, 5, lambda i, x: x + i, 0),
    "fori_loop from below zero": lambda m: m.fori_loop(-3, 4, lambda i, x: 2 * x + i, 0),
    "fori_loop beyond int32": lambda m: m.fori_loop(2**40, 2**40 + 3, lambda i, x: x + i, 0),
    "fori_loop around int32": lambda m: m.fori_loop(2**31 - 2, 2**31 + 2, lambda i, x: x + i, 0),
    "fori_loop to an array": lambda m: m.fori_loop(0, WEAK_FIVE, lambda i, x: x + i, 0),
    "fori_loop to int32": lambda m: m.fori_loop(0, FIVE, lambda i, x: x + i, jnp.int32(0)),
    "fori_loop to int32 with a carry of int8": lambda m: m.fori_loop(0, FIVE, lambda i, x: x + i, jnp.int8(0)),
    "fori_loop between int32 with a carry of float16": lambda m: m.fori_loop(
        THREE, FIVE, lambda i, x: x * i, jnp.float16(1)
    ),
    "fori_loop to a NumPy integer": lambda m: m.fori_loop(0, np.int16(4), lambda i, x: x + i, jnp.int16(0)),
    "fori_loop over the range of int8": lambda m: m.fori_loop(
        np.int8(-128), np.int8(127), lambda i, x: x + i.astype(int), 0
    ),
    "fori_loop over the range of uint8": lambda m: m.fori_loop(
        np.uint8(0), np.uint8(255), lambda i, x: x + i.astype(int), 0
    ),
    "fori_loop that indexes": lambda m: m.fori_loop(0, 4, lambda i, x: x.at[i].set(ROWS[i].sum()), jnp.zeros(4)),
    "fori_loop that ignores its index": lambda m: m.fori_loop(0, 3, lambda _, x: (x[1], x[0]), (1.0, 2.0)),
    "fori_loop, unroll=2": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=2),
    "fori_loop, unroll=9": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=9),
    "fori_loop, unroll=True": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=True),
    "fori_loop, unroll=0": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=0),
    "scan, unroll=0": lambda m: m.scan(lambda c, x: (c + x, c), 0, jnp.arange(5), unroll=0),
    "fori_loop, unroll=False": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=False),
    "fori_loop, unroll=None": lambda m: m.fori_loop(0, 5, lambda i, x: 2 * x + i, 0, unroll=None),
    "scan": lambda m: m.scan(lambda c, x: (c + x, c * x), jnp.zeros(3), ROWS),
    "scan by name": lambda m: m.scan(
        f=lambda c, x: (c + x, c), init=0, xs=jnp.arange(4), length=4, reverse=True, unroll=2
    ),
    "scan by position": lambda m: m.scan(lambda c, x: (c + x, c), 0, jnp.arange(4), 4, True, 2),
    "scan in reverse": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), reverse=True),
    "scan in reverse without rows": lambda m: m.scan(lambda c, _: (2 * c, c), 1, None, 5, reverse=True),
    "scan with length": lambda m: m.scan(lambda c, _: (2 * c, c), 1, None, 5),
    "scan with length by name": lambda m: m.scan(lambda c, _: (2 * c, c), 1, length=5),
    "scan with rows and length": lambda m: m.scan(lambda c, x: (c + x, c), 0.0, ROWS[0], 3),
    "scan with a NumPy length": lambda m: m.scan(lambda c, _: (2 * c, c), 1, length=np.int64(5)),
    "scan with an array as length": lambda m: m.scan(lambda c, _: (2 * c, c), 1, length=FIVE),
    "scan with rows and an array as length": lambda m: m.scan(lambda c, x: (c + x, c), 0.0, ROWS[0], THREE),
    "scan of length 0": lambda m: m.scan(lambda c, _: (2 * c, c), 1, length=0),
    "scan of length 0 in reverse": lambda m: m.scan(lambda c, _: (2 * c, c), 1, None, 0, True),
    "scan of one row": lambda m: m.scan(lambda c, x: (c + x, c), 1.0, ROWS[:1, 0]),
    "scan of xs without arrays": lambda m: m.scan(lambda c, x: (c + 1, c), 0, {}, 3),
    "scan of many xs": lambda m: m.scan(lambda c, x: (c + x["a"], (x["b"], c, x["c"])), 0, MIXED),
    "scan of NumPy rows": lambda m: m.scan(lambda c, x: (c + x, x), np.float32(0), np.ones(3, np.float32)),
    "scan without outputs": lambda m: m.scan(lambda c, x: (c + x, None), 0.0, ROWS[0]),
    "scan with empty outputs": lambda m: m.scan(lambda c, x: (c + x, ((), {})), 0.0, ROWS[0]),
    "scan without a carry": lambda m: m.scan(lambda c, x: (c, 2 * x), None, ROWS),
    "scan with nested outputs": lambda m: m.scan(lambda c, x: (c, {"y": (x, [c])}), 1.0, ROWS),
    "scan with an output that is an int": lambda m: m.scan(lambda c, _: (c, 3), 1.0, length=2),
    "scan with an output that is a float": lambda m: m.scan(lambda c, _: (c, 3.5), 1.0, length=2),
    "scan with an output that is a bool": lambda m: m.scan(lambda c, _: (c, True), 1.0, length=2),
    "scan with an output of NumPy": lambda m: m.scan(lambda c, _: (c, np.arange(3)), 1.0, length=2),
    "scan with a constant output": lambda m: m.scan(lambda c, x: (c + x, ROWS), 1.0, ROWS[0]),
    "scan whose f returns a list": lambda m: tuple(m.scan(lambda c, x: [c + x, c], 0.0, ROWS[0])),
    "scan, unroll=2": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), unroll=2),
    "scan, unroll=9": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), unroll=9),
    "scan, unroll=True": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), unroll=True),
    "scan, unroll=False": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), unroll=False),
    "scan in reverse, unroll=2": lambda m: m.scan(lambda c, x: (2 * c + x, c), 0, jnp.arange(5), None, True, 2),
    "scan of length 0, unroll=True": lambda m: m.scan(lambda c, _: (2 * c, c), 1, length=0, unroll=True),
    "callable object": lambda m: m.fori_loop(0, 3, Doubling(), 1),
    "bound method": lambda m: m.fori_loop(0, 3, Doubling().method, 1),
    "partial": lambda m: m.scan(partial(lambda k, c, x: (c + k * x, c), 3.0), 0.0, ROWS[0]),
    "partial with a keyword": lambda m: m.scan(partial(lambda c, x, k: (c + k * x, c), k=3.0), 0.0, ROWS[0]),
    "jitted": lambda m: m.scan(jax.jit(Doubling().step), 1.0, ROWS),
    "checkpointed": lambda m: m.scan(jax.checkpoint(Doubling().step), 1.0, ROWS),
    "nested scans": nested_scans,
    "while_loop in fori_loop": while_in_fori,
    "fori_loop in scan": fori_in_scan,
    "scan in cond": scan_in_cond,
}


@pytest.mark.parametrize("jit", [jax.jit, eagerly])
@pytest.mark.parametrize("call", CALLS)
def test_call(call: str, jit: Any) -> None:
    same(*(jit(lambda module=module: CALLS[call](module))() for module in (lx, lax)))


@pytest.mark.parametrize("call", ["while_loop", "fori_loop", "fori_loop to an array", "scan", "nested scans"])
def test_call_with_jit_disabled(call: str) -> None:
    with jax.disable_jit():
        same(*(CALLS[call](module) for module in (lx, lax)))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "call", ["while_loop", "fori_loop", "fori_loop to int32", "fori_loop in scan", "scan by position"]
)
def test_call_with_and_without_x64(call: str, enabled: bool) -> None:
    with jax.enable_x64(enabled):
        same(*(CALLS[call](module) for module in (lx, lax)))


# ---- the index of fori_loop

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


@pytest.mark.parametrize("jit", [jax.jit, eagerly])
@pytest.mark.parametrize("limits", LIMITS)
def test_index_is_of_the_type_that_it_is_of_in_lax(limits: str, jit: Any) -> None:
    types = {}

    def run(module: Any, lower: Any, upper: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            types[module] = jax.typeof(i)
            return 10 * x + i.astype(int)

        return module.fori_loop(lower, upper, body, jnp.int64(0))

    same(*(jit(partial(run, module))(*LIMITS[limits]) for module in (lx, lax)))
    assert types[lx] == types[lax]


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


@pytest.mark.parametrize("limits", [(np.int32(0), np.int64(3)), (np.uint8(0), np.int8(3)), (np.int8(0), jnp.int16(3))])
@EACH_MODULE
def test_limits_of_different_types_are_refused(module: Any, limits: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"equal types|no available implicit dtype promotion"):
        module.fori_loop(*limits, lambda _, x: x, 0)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (np.int8(-128), np.int8(127)),
        (np.int8(100), np.int8(127)),
        (np.uint8(250), np.uint8(255)),
        (np.uint8(5), np.uint8(3)),
        (np.int32(2**31 - 4), np.int32(2**31 - 1)),
        (np.int32(-(2**31)), np.int32(-(2**31) + 3)),
        (np.int64(2**62), np.int64(2**62 + 3)),
        (np.uint64(2**64 - 4), np.uint64(2**64 - 1)),
    ],
)
def test_traced_limits_at_the_ends_of_their_types(lower: Any, upper: Any) -> None:
    def run(module: Any) -> Any:
        body = lambda i, c: (c[0] + 1, i)
        return jax.jit(lambda lower, upper: module.fori_loop(lower, upper, body, (0, lower)))(lower, upper)

    same(run(lx), run(lax))


# ---- under transformations


def power(m: Any, x: Any) -> Any:
    return m.fori_loop(0, 3, lambda _, y: y * x, x)


def horner(m: Any, x: Any) -> Any:
    carry, ys = m.scan(lambda c, a: (c * x + a, c * a), x, jnp.arange(4.0))
    return carry + ys.sum()


def horner_in_reverse(m: Any, x: Any) -> Any:
    return m.scan(lambda c, a: (c * x + a, c), 0 * x, jnp.arange(4.0), reverse=True, unroll=3)[0]


def nested(m: Any, x: Any) -> Any:
    return m.scan(lambda c, a: (power(m, x) + a * c, None), x, jnp.arange(3.0))[0]


PROGRAMS = pytest.mark.parametrize("program", [power, horner, horner_in_reverse, nested])
REVERSE = [jax.grad, jax.value_and_grad, lambda f: jax.grad(jax.grad(f)), jax.jacfwd, jax.hessian]


@pytest.mark.parametrize("transform", REVERSE, ids=["grad", "value_and_grad", "grad of grad", "jacfwd", "hessian"])
@PROGRAMS
def test_derivatives_of_loops_with_a_fixed_number_of_steps(program: Any, transform: Any) -> None:
    same(*(jax.jit(transform(partial(program, module)))(jnp.float64(2.0)) for module in (lx, lax)))


@PROGRAMS
def test_lanes(program: Any) -> None:
    same(*(jax.jit(jax.vmap(partial(program, module)))(jnp.arange(3.0)) for module in (lx, lax)))


@PROGRAMS
def test_gradient_of_lanes(program: Any) -> None:
    same(*(jax.jit(jax.vmap(jax.grad(partial(program, module))))(jnp.arange(3.0)) for module in (lx, lax)))


def collatz(m: Any, x: Any) -> Any:
    return m.while_loop(lambda c: c[0] > 1, lambda c: (jnp.where(c[0] % 2, 3 * c[0] + 1, c[0] // 2), c[1] + 1), (x, 0))


def test_while_loop_in_lanes_of_different_lengths() -> None:
    same(*(jax.jit(jax.vmap(partial(collatz, module)))(jnp.arange(1, 8)) for module in (lx, lax)))


def test_fori_loop_in_lanes_with_limits_of_their_own() -> None:
    run = lambda m: jax.vmap(lambda n: m.fori_loop(0, n, lambda i, x: 2 * x + i, 0))
    same(*(jax.jit(run(module))(jnp.array([3, 0, -2, 5])) for module in (lx, lax)))


def doubled_until(m: Any, x: Any) -> Any:
    return m.while_loop(lambda y: y < 9, lambda y: 2 * y, x)


def test_forward_mode_of_while_loop() -> None:
    run = lambda m: jax.jit(lambda x, t: jax.jvp(partial(doubled_until, m), (x,), (t,)))
    same(*(run(module)(1.5, 1.0) for module in (lx, lax)))


def test_linearized_while_loop() -> None:
    run = lambda m: jax.jit(lambda x, t: jax.linearize(partial(doubled_until, m), x)[1](t))
    same(*(run(module)(jnp.float64(1.5), jnp.float64(1.0)) for module in (lx, lax)))


@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_tangent_that_is_a_python_number(jit: Any) -> None:
    run = lambda m: jit(lambda x: jax.jvp(partial(doubled_until, m), (x,), (1.0,)))
    same(*(run(module)(1.5) for module in (lx, lax)))


def test_tangent_of_an_integer_that_counts() -> None:
    count = lambda m, x: m.fori_loop(0, 3, lambda i, c: (c[0] * 2, c[1] + i), (x, 0))
    out, tangent = (jax.jvp(partial(count, module), (1.5,), (1.0,)) for module in (lx, lax))
    same((out[0], out[1][0]), (tangent[0], tangent[1][0]))
    assert out[1][1].dtype == tangent[1][1].dtype == jax.dtypes.float0


def test_linear_transpose() -> None:
    run = lambda m, xs: m.scan(lambda c, x: (c + 3.0 * x, 2.0 * c), xs[0], xs)
    transpose = lambda m: jax.linear_transpose(partial(run, m), jnp.zeros(3))
    same(*(transpose(module)((jnp.float64(1.0), jnp.arange(3.0))) for module in (lx, lax)))


def in_fori_loop(m: Any, add: Any) -> Any:
    return m.fori_loop(0, 3, lambda _, c: c + add(), 0.0)


def in_while_loop(m: Any, add: Any) -> Any:
    return m.while_loop(lambda c: c < 5.0, lambda c: c + add(), 0.0)


def in_scan(m: Any, add: Any) -> Any:
    return m.scan(lambda c, x: (c + x, add()), 0.0, jnp.arange(3.0))


@pytest.mark.parametrize("loop", [in_fori_loop, in_while_loop, in_scan])
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_mutable_array_that_the_body_closes_over_is_refused(loop: Any, jit: Any) -> None:
    """`jax.lax` lets a body write to one; a replay would write again, so loopax says that it does not."""

    def run() -> Any:
        ref = jax.new_ref(jnp.float64(0.0))

        def add() -> Any:
            ref[...] += 1.0
            return ref[...]

        return loop(lx, add), ref[...]

    with pytest.raises(NotImplementedError, match="closes over a mutable array"):
        jit(run)()


def test_shapes_without_running() -> None:
    run = lambda m, xs: m.scan(lambda c, x: (c, c * x), 1.0, xs)
    assert jax.eval_shape(partial(run, lx), ROWS) == jax.eval_shape(partial(run, lax), ROWS)
