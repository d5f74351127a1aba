"""Every transformation of a tiny loop, and branches of a batch, against the same in plain Python."""

from collections.abc import Callable
from math import cos, sin, sqrt
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from loopax._command.table import in_words

X, STEPS, BOUND = 0.7, 5, 9
STARTS, COUNTS = np.array([0.7, 0.2, 1.1]), np.array([5, 1, 9])


class SelfTest(NamedTuple):
    """Something that has to give a known answer."""

    name: str
    results: Callable[[], tuple[Any, Any]]  # what came out, and what should have


def run(check: SelfTest) -> str:
    """What is wrong, nothing if it is well; whatever a check raises is what it reports."""
    try:
        got, wanted = map(np.asarray, check.results())
        is_well = got.shape == wanted.shape and np.allclose(got, wanted, rtol=1e-4, atol=1e-5)
        return "" if is_well else f"got {got.tolist()}, expected {wanted.tolist()}"
    except Exception as error:  # noqa: BLE001 - what is looked for here
        return in_words(error)


def in_python(x: float, steps: int) -> tuple[float, float, float]:
    """`x = sin(x)`, so many times, with first and second derivative."""
    first, second = 1.0, 0.0
    for _ in range(steps):
        x, first, second = sin(x), cos(x) * first, cos(x) * second - sin(x) * first**2
    return x, first, second


VALUE, SLOPE, CURVATURE = in_python(X, STEPS)
VALUES, SLOPES, CURVATURES = zip(*map(in_python, STARTS, COUNTS), strict=True)


def loop(x: Any, n: Any, kind: Any = "auto", bound: int | None = BOUND, lanes: Any = "lockstep") -> Any:
    """The iteration of `in_python` as a loop of loopax, for a traced number of steps."""
    return lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, max_steps=bound, kind=kind, lanes=lanes)


def checks() -> list[SelfTest]:
    """All of them, in the order in which they are shown."""

    def condition(x: Any) -> Any:
        return lx.while_loop(lambda c: c[1] < STEPS, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0), max_steps=BOUND)[0]

    def rows(x: Any, n: Any) -> Any:
        return lx.scan(lambda x, _: (jnp.sin(x), x), x, jnp.zeros(BOUND), length=n)[1]

    def nested(x: Any, n: Any) -> Any:
        return lx.fori_loop(0, n, lambda i, x: loop(x, i), x, max_steps=BOUND)

    states = [in_python(X, i)[0] for i in range(STEPS)] + [0.0] * (BOUND - STEPS)
    slopes = [in_python(x, n * (n - 1) // 2)[1] for x, n in zip(STARTS, COUNTS, strict=True)]
    return [
        SelfTest("jit, traced length", lambda: (jax.jit(loop)(X, STEPS), VALUE)),
        SelfTest("while_loop", lambda: (jax.jit(condition)(X), VALUE)),
        SelfTest("scan, rows and traced length", lambda: (jax.jit(rows)(X, STEPS), states)),
        *_derivatives(),
        *_batches(),
        *_branches(),
        SelfTest("nested loops, vmap of grad", lambda: (jax.jit(jax.vmap(jax.grad(nested)))(STARTS, COUNTS), slopes)),
        SelfTest(f"shard_map of vmap of grad, devices: {len(jax.devices())}", _sharded),
        SelfTest("run-time check raises", _check_raises),
    ]


def _derivatives() -> list[SelfTest]:
    def of_kind(name: str, kind: Any, bound: int | None) -> SelfTest:
        gradient = jax.grad(lambda x, n: loop(x, n, kind, bound))
        return SelfTest(f"grad, {name}", lambda: (jax.jit(gradient)(X, STEPS), SLOPE))

    static = jax.grad(lambda x: loop(x, STEPS, lx.Lax(), None))

    def tangent(x: Any, n: Any) -> Any:
        return jax.jvp(lambda x: loop(x, n), (x,), (1.0,))[1]

    return [
        SelfTest("jvp", lambda: (jax.jit(tangent)(X, STEPS), SLOPE)),
        of_kind("Auto()", lx.Auto(), BOUND),
        of_kind("Auto(), no bound", lx.Auto(), None),
        of_kind("Checkpointed()", lx.Checkpointed(), BOUND),
        of_kind("Checkpointed(3)", lx.Checkpointed(3), BOUND),
        of_kind("Checkpointed(3), no bound", lx.Checkpointed(3), None),
        of_kind("Bounded()", lx.Bounded(), BOUND),
        of_kind("Residuals()", lx.Residuals(), BOUND),
        SelfTest("grad, Lax(), static length", lambda: (jax.jit(static)(X), SLOPE)),
        SelfTest("hessian, forward over reverse", lambda: (jax.jit(jax.hessian(loop))(X, STEPS), CURVATURE)),
        SelfTest("hessian, reverse over forward", lambda: (jax.jit(jax.jacrev(jax.jacfwd(loop)))(X, STEPS), CURVATURE)),
        SelfTest("hessian, reverse over reverse", lambda: (jax.jit(jax.grad(jax.grad(loop)))(X, STEPS), CURVATURE)),
        SelfTest("jax.linearize", lambda: (jax.linearize(lambda x: loop(x, STEPS), X)[1](1.0), SLOPE)),
        SelfTest("jax.checkpoint", lambda: (jax.jit(jax.grad(jax.checkpoint(loop)))(X, STEPS), SLOPE)),
    ]


def _batches() -> list[SelfTest]:
    lanes = jax.vmap(loop)
    compact = jax.vmap(lambda x, n: loop(x, n, lanes=lx.Compact(min_lanes=1)))

    def total(batch: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda starts: batch(starts, COUNTS).sum())

    return [
        SelfTest("vmap, counts per lane", lambda: (jax.jit(lanes)(STARTS, COUNTS), VALUES)),
        SelfTest("vmap, compact lanes", lambda: (jax.jit(compact)(STARTS, COUNTS), VALUES)),
        SelfTest("vmap of grad", lambda: (jax.jit(jax.vmap(jax.grad(loop)))(STARTS, COUNTS), SLOPES)),
        SelfTest("grad of vmap", lambda: (jax.jit(total(lanes))(STARTS), SLOPES)),
        SelfTest("grad of vmap, compact lanes", lambda: (jax.jit(total(compact))(STARTS), SLOPES)),
        SelfTest("vmap of hessian", lambda: (jax.jit(jax.vmap(jax.hessian(loop)))(STARTS, COUNTS), CURVATURES)),
    ]


def _branches() -> list[SelfTest]:
    """Value and slope of each lane: a lane outside of a function's domain does not take it."""
    sines = [(sin(x), cos(x)) for x in STARTS]
    of_cond = [(sqrt(x - 0.5), 0.5 / sqrt(x - 0.5)) if x > 0.5 else sine for x, sine in zip(STARTS, sines, strict=True)]
    of_switch = [in_python(X, STEPS)[:2], sines[1], in_python(STARTS[2], STEPS)[:2]]

    def of_lanes(lanes: Any, name: str) -> list[SelfTest]:
        def by_predicate(x: Any, _: Any) -> Any:
            return lx.cond(x > 0.5, lambda x: jnp.sqrt(x - 0.5), jnp.sin, x, lanes=lanes)

        def by_index(x: Any, n: Any) -> Any:
            return lx.switch(n, [jnp.cos, jnp.sin, lambda x: loop(x, STEPS)], x, lanes=lanes)

        def found(f: Callable[..., Any]) -> Any:
            values = jax.jit(jax.vmap(f))
            return jnp.stack([values(STARTS, COUNTS), jax.grad(lambda x: values(x, COUNTS).sum())(STARTS)], 1)

        return [
            SelfTest(f"cond, {name}", lambda: (found(by_predicate), of_cond)),
            SelfTest(f"switch, {name}", lambda: (found(by_index), of_switch)),
        ]

    return [*of_lanes("lockstep", "grad of vmap"), *of_lanes(lx.Compact(min_lanes=1), "grad of vmap, compact lanes")]


def _sharded() -> tuple[Any, Any]:
    """Two lanes for each device, each with a number of steps of its own."""
    number = len(jax.devices())
    starts, counts = jnp.linspace(0.2, 1.1, 2 * number), jnp.arange(2 * number) % BOUND
    mesh, spec = jax.make_mesh((number,), ("devices",), axis_types=(AxisType.Auto,)), PartitionSpec("devices")
    gradient = jax.shard_map(jax.vmap(jax.grad(loop)), mesh=mesh, in_specs=spec, out_specs=spec)
    slopes = [in_python(float(x), int(n))[1] for x, n in zip(starts, counts, strict=True)]
    return jax.jit(gradient)(starts, counts), slopes


def _check_raises() -> tuple[Any, Any]:
    """A loop that its bound would cut raises; True where the error says so."""
    try:
        jax.block_until_ready(eqx.filter_jit(loop)(X, jnp.int32(BOUND + 1)))
    except Exception as error:
        if "max_steps" in str(error):
            return True, True
        raise
    return False, True
