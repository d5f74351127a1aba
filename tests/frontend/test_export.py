"""`jax.export`: a loop or its derivative is written to bytes, read again, and called, also by a batch of any size."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import loopax as lx
from tests.support.limited_loops import EACH_LIMITED, raises
from tests.support.problem import LOOPS, XS, H, W, name_of

STEPS = np.int32(7)


def each(program: Any) -> Any:
    """A lane for each start and number of steps, with the same weights and rows."""
    return jax.vmap(program, (None, 0, None, 0))


def total_of_lanes(program: Any) -> Any:
    return lambda *arguments: each(program)(*arguments).sum()


# What would be checked at run time cannot be exported: each has throw=False.
PROGRAMS = {name: partial(LOOPS[name][0], throw=False) for name in ("while", "fori", "scan")}


def through_bytes(f: Any, *arguments: Any, vjp_order: int = 0) -> export.Exported:
    """Export for arguments of these types, serialize, and deserialize."""
    exported = export.export(jax.jit(f))(*arguments)
    return export.deserialize(exported.serialize(vjp_order=vjp_order))


def assert_same(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13), ours, theirs)


def assert_same_after_a_round_trip(f: Any) -> None:
    read, jitted = through_bytes(f, W, H, XS, STEPS), jax.jit(f)
    for steps in (STEPS, np.int32(0)):
        assert_same(read.call(W, H, XS, steps), jitted(W, H, XS, steps))


@pytest.mark.parametrize("loop", PROGRAMS)
def test_round_trip(loop: str) -> None:
    assert_same_after_a_round_trip(PROGRAMS[loop](lx.Auto()))


CASES = [("scan", lx.Bounded()), ("scan", lx.Residuals()), ("while", lx.Auto()), ("fori", lx.Checkpointed(3))]


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_round_trip_of_a_gradient(loop: str, kind: Any) -> None:
    assert_same_after_a_round_trip(jax.grad(PROGRAMS[loop](kind), (0, 1, 2)))


def test_gradient_of_what_was_read() -> None:
    """Serialized with its derivative, a loop can be differentiated where its source is not known."""
    f = PROGRAMS["scan"](lx.Checkpointed(3))
    read = through_bytes(f, W, H, XS, STEPS, vjp_order=1)
    both = jax.jit(lambda *arguments: tuple(jax.grad(g, (0, 1, 2))(*arguments) for g in (read.call, f)))
    assert_same(*both(W, H, XS, STEPS))


# ---- a symbolic number of lanes: exported once for every batch size


def lanes(count: int) -> tuple[Any, ...]:
    starts = np.outer(np.linspace(0.5, 1.0, count), H)
    return W, starts, XS, np.arange(count, dtype=np.int32) + 1


def symbolic_lanes() -> list[Any]:
    (b,) = export.symbolic_shape("b")
    shapes = [W.shape, (b, *H.shape), XS.shape, (b,)]
    return [jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, lanes(1), strict=True)]


LANES: dict[str, Callable[[Any], Any]] = {
    "values": each,
    "gradient of the sum": lambda f: jax.grad(total_of_lanes(f), (0, 1)),
    "hessian of each lane": lambda f: each(jax.hessian(f, 1)),
}


def assert_works_for_batches(f: Any, *counts: int) -> None:
    read = through_bytes(f, *symbolic_lanes())
    for count in counts:
        assert_same(read.call(*lanes(count)), jax.jit(f)(*lanes(count)))


WHAT = [
    pytest.param(loop, what, marks=pytest.mark.slow if loop == "while" and what == "hessian of each lane" else ())
    for loop in ("while", "scan")
    for what in LANES
]


@pytest.mark.parametrize(("loop", "what"), WHAT, ids=name_of)
def test_any_number_of_lanes(loop: str, what: str) -> None:
    assert_works_for_batches(LANES[what](PROGRAMS[loop](lx.Auto())), 1, 4)


# ---- run-time checks


@EACH_LIMITED
def test_a_check_that_can_fail_cannot_be_exported(loop: Any) -> None:
    """JAX exports no callbacks, not even where its own check of what a program calls is disabled."""
    where = f"loopax.{loop.__name__.removesuffix('_with_stop')} at ", f"({loop.__name__}): "
    for allowed in ([], [export.DisabledSafetyCheck.custom_call("xla_ffi_python_cpu_callback")]):
        with raises(NotImplementedError, "jax.export: the program can raise an error", *where, "throw=False"):
            export.export(jax.jit(lambda n: loop(n, max_steps=3)), disabled_checks=allowed)(STEPS)
    read = through_bytes(lambda n: loop(n, max_steps=3, throw=False, info=True)[1].limit_reached, STEPS)
    assert [bool(read.call(jnp.int32(n))) for n in (3, 4)] == [False, True]


def over_rows(xs: Any) -> Any:
    return lx.fori_loop(0, xs.shape[0], lambda i, c: jnp.sin(c + xs[i]), xs.dtype.type(0))


# Functions of an array, whose size is their number of steps.
SIZES: dict[str, Any] = {
    "fori_loop to a number": lambda xs: lx.fori_loop(xs.shape[0], 7, lambda i, c: c + i, 0, info=True)[1].num_steps,
    "fori_loop, a bound": lambda xs: lx.fori_loop(0, xs.shape[0], lambda i, c: c + i, 0, max_steps=3, throw=False),
    "scan": lambda xs: lx.scan(lambda c, _: (jnp.sin(c + 1), None), xs.dtype.type(0), length=xs.shape[0])[0],
    "rollout": lambda xs: lx.rollout(lambda s: (s + 1, s), 0, xs.shape[0], max_steps=6, throw=False).state,
    "a gradient": jax.grad(over_rows),
}


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_symbolic_numbers_of_steps(name: str, x64: bool) -> None:
    """The size of an array is a traced limit, which needs no check."""
    with jax.enable_x64(x64):
        row = jax.ShapeDtypeStruct(export.symbolic_shape("b"), jnp.float32)
        read = through_bytes(SIZES[name], row)
        for rows in (1, 5):
            xs = jnp.linspace(0.1, 0.7, rows, dtype=jnp.float32)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), read.call(xs), SIZES[name](xs))


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["value", "gradient"])
@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential", "auto"])
def test_symbolic_sizes_of_lanes(lanes: Any, transform: Any) -> None:
    """Five lanes of any size, whose steps sort, multiply and read, and so have costs that are not known."""

    def step(i: Any, x: Any) -> Any:
        spread = jnp.sort(x)[None] * jnp.tanh(x)[:, None]
        return 0.5 * x + 0.1 * jnp.exp(-(x**2)) + 0.01 * (spread @ x) + x[0]

    def total(x: Any, n: Any) -> Any:
        one = lambda x, n: lx.fori_loop(0, n, step, x, max_steps=9, lanes=lanes, throw=False)
        return jax.vmap(one)(x, n).sum()

    (b,) = export.symbolic_shape("b")
    read = through_bytes(transform(total), jax.ShapeDtypeStruct((5, b), float), jax.ShapeDtypeStruct((5,), np.int32))
    for size in (1, 7):
        x, n = jnp.linspace(0.1, 1.0, 5 * size).reshape(5, size), jnp.array([3, 0, 9, 1, 4], np.int32)
        assert_same(read.call(x, n), transform(total)(x, n))
