"""The temporary memory of a gradient, predicted from its trace and reported by the compiler."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from benchmarks import choices, workloads
from tests.support.compiled import temporary
from tests.support.example_files import precision_of_a_user

MIB = 2**20


@pytest.fixture(autouse=True)
def _precision_of_a_user():
    with precision_of_a_user():
        yield


def reported(function, *args):
    return temporary(jax.jit(function).lower(*args).compile())


def agrees(predicted, measured, stored):
    """Within 15 %, or 64 KiB where less than 1 MiB is stored."""
    return abs(predicted - measured) <= (64 * 1024 if stored < MIB else 0.15 * measured)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((number, lx.Auto()) for number in range(8)),
        (0, lx.Checkpointed()),
        *(pytest.param(number, lx.Checkpointed(), marks=pytest.mark.slow) for number in range(1, 8)),
    ],
    ids=str,
)
def test_programs_of_the_benchmark(number, kind):
    """Nothing is run."""
    workload = choices.programs()[number]
    program = workloads.with_loopax(workload, kind, static=True)
    found = lx.explain(program, *workload.arguments, argnums=workload.differentiated)
    (loop,) = found.loops
    measured = reported(workloads.gradient(workload, program), *workload.arguments)
    assert agrees(found.gradient_bytes, measured, loop.stored_bytes), (found.gradient_bytes, measured)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", [lx.Bounded(), lx.Residuals(), lx.Checkpointed(10)], ids=repr)
def test_other_kinds_and_run_time_lengths(kind, static):
    workload = choices.rows_of_functions()
    program = workloads.with_loopax(workload, kind, static=static)
    found = lx.explain(program, *workload.arguments, argnums=workload.differentiated)
    measured = reported(workloads.gradient(workload, program), *workload.arguments)
    assert agrees(found.gradient_bytes, measured, found.loops[0].stored_bytes)


def test_a_scan_of_jax():
    workload = workloads.perceptron()
    program = workloads.with_lax_scan(workload, checkpoint=False)
    found = lx.explain(program, *workload.arguments, argnums=workload.differentiated)
    measured = reported(workloads.gradient(workload, program), *workload.arguments)
    assert found.loops[0].stored_bytes > 100 * MIB
    assert agrees(found.gradient_bytes, measured, found.loops[0].stored_bytes)


def lane(weights, y, n):
    return (lx.fori_loop(0, n, lambda i, y: jnp.tanh(y @ weights), y, max_steps=400, kind="bounded") ** 2).sum()


def of_lanes(weights, y, n):
    return jax.vmap(lane, (None, 0, 0))(weights, y, n).sum()


def nested(weights, y, n):
    def outer(i, y):
        return lx.fori_loop(0, n, lambda j, y: jnp.tanh(y @ weights), y, max_steps=30, kind="bounded")

    return (lx.fori_loop(0, 200, outer, y, kind="bounded") ** 2).sum()


def rows(weights, y, n):
    def step(y, _):
        y = jnp.tanh(y @ weights)
        return y, y

    _, ys = lx.scan(step, y, None, n, max_steps=400, kind="bounded")
    return (ys**2).sum()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(of_lanes, [(32, 32), (64, 32), (64,)]), (nested, [(64, 64), (128, 64), ()]), (rows, [(64, 64), (32, 64), ()])],
    ids=["lanes", "nested", "rows of ys"],
)
def test_lanes_nested_loops_and_rows(function, shapes):
    weights, y, n = shapes
    args = jnp.ones(weights), jnp.ones(y), jnp.full(n, 30)
    found = lx.explain(function, *args)
    measured = reported(jax.grad(function, (0, 1)), *args)
    assert measured > MIB
    assert agrees(found.gradient_bytes, measured, MIB), (found.gradient_bytes, measured)


def test_a_forward_pass():
    """The rows, and hardly more."""
    workload = choices.heat()
    program = workloads.with_loopax(workload, lx.Lax(), static=True)
    found = lx.explain(program, *workload.arguments)
    measured = reported(program, *workload.arguments)
    assert abs(found.forward_bytes - measured) <= 64 * 1024 or abs(found.forward_bytes / measured - 1) <= 0.5
