"""Derivatives and batches show a loop once: its forward pass, however its lanes run, and on each device one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import loopax as lx
from tests.support.progress_recorder import KINDS, both, counted, expected, once, powers, recorder, same, summed

__all__ = ["recorder"]  # a fixture

slow = pytest.mark.slow
NS, XS = np.array([5, 35, 12, 0]), np.linspace(0.1, 0.9, 4)
LEFT = [3, 2, 1, 1]  # of these lanes, at each report


def until(x, progress, n=35, **options):
    """A loop of which nobody knows how many steps it takes."""
    step = lambda c: (c[0] + 1, jnp.sin(c[1] * x))
    return lx.while_loop(lambda c: c[0] < n, step, (0, x), progress=progress, **options)[1]


def with_large_constants(progress):
    """Such a batch runs in stretches, with constants that are lent anew for each."""
    run = lambda w, n: lx.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w @ w.T), np.ones(100), progress=progress)
    return lambda ns: jax.vmap(run)(np.full((4, 100, 64), 0.01), ns)


# A program, its arguments, how many steps it takes, how many are known to come, and lanes that are active at a report.
SHOWN = {
    **{
        f"gradient, {kind}": (lambda p, k=kind: jax.grad(powers(35, p, kind=k, max_steps=64)), (0.7,), 35, 35, [])
        for kind in KINDS.values()
    },
    "gradient without a bound": (lambda p: jax.grad(lambda x: until(x, p)), (0.7,), 35, -1, []),
    "hessian": (lambda p: jax.hessian(powers(25, p)), (0.7,), 25, 25, []),
    "forward mode": (lambda p: jax.jacfwd(powers(25, p)), (0.7,), 25, 25, []),
    "checkpoint": (lambda p: jax.value_and_grad(jax.checkpoint(powers(25, p))), (0.7,), 25, 25, []),
    "a batch": (lambda p: jax.vmap(lambda n: counted(n, p)), (NS,), 35, -1, LEFT),
    "lanes of lanes": (lambda p: jax.vmap(jax.vmap(lambda n: counted(n, p))), (NS.reshape(2, 2),), 35, -1, LEFT),
    "lanes of known steps": (lambda p: jax.vmap(lambda x, n: jax.grad(powers(n, p))(x)), (XS, NS), 35, 35, LEFT),
    "lanes of the same steps": (lambda p: jax.vmap(powers(35, p)), (XS,), 35, 35, []),
    "large constants": (with_large_constants, (NS,), 35, 35, LEFT),
}


@pytest.mark.parametrize("name", SHOWN)
def test_one_run_is_shown(recorder, name):
    f, arguments, steps, total, lanes = SHOWN[name]
    same(both(f, *arguments))
    once(recorder, steps, total)
    assert recorder.lanes == (lanes or [-1] * len(recorder.steps))


@pytest.mark.parametrize("transform", [lambda f: jax.grad(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))])
def test_a_forward_pass_that_nobody_needs_shows_nothing(recorder, transform):
    """Other loops evaluate the steps again, with what the derivative needs of them."""
    same(both(lambda progress: transform(powers(25, progress, kind="checkpointed")), 0.7))
    assert recorder.begun == []


def test_linearize_then_apply(recorder):
    _, derivative = jax.linearize(powers(25, True), 0.7)
    once(recorder, 25)
    derivative(1.0)
    once(recorder, 25)


# ---- loops in loops


def nested(progress, wrap=lambda f: f, **options):
    step = wrap(lambda c, x: lx.fori_loop(0, 12, lambda j, c: jnp.sin(c * x), c, progress=progress))
    return lambda x: lx.fori_loop(0, 4, lambda i, c: step(c, x), x, **options)


def in_branch(f):
    return lambda c, x: jax.lax.cond(x > 0, f, lambda c, x: c, c, x)


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        *(pytest.param(kind, lambda f: f, marks=slow) for kind in ("few", "bounded")),
        *((kind, lambda f: f) for kind in ("checkpointed", "residuals")),
        *(("auto", wrap) for wrap in (jax.checkpoint, jax.jit, in_branch)),
    ],
)
def test_inner_loops_are_shown_each_time_and_not_replayed(recorder, kind, wrap):
    same(both(lambda progress: jax.value_and_grad(nested(progress, wrap, kind=KINDS[kind])), 0.7))
    assert [end for _, end in recorder.ended] == [12] * 4
    assert recorder.steps == expected(12) * 4


# ---- lanes in groups and stages


@pytest.mark.parametrize("loop", [counted, summed])
def test_compact_lanes_are_one_display(recorder, loop):
    ns = np.array([3, 35, 4, 6, 2, 5, 30, 1])
    lanes = lx.Compact(shrink=3, min_lanes=2)
    same(both(lambda progress: jax.vmap(lambda n: loop(n, progress, lanes=lanes)), ns))
    (parts,) = {parts for _, _, parts, _ in recorder.begun}
    assert len(recorder.begun) == len(recorder.ended) == parts > 1
    if loop is counted:
        assert sum(steps for _, steps in recorder.ended) == 35


@pytest.mark.parametrize("lanes", ["lockstep", pytest.param(lx.Compact(min_lanes=2), marks=slow)], ids=str)
def test_a_batch_in_jax_checkpoint(recorder, lanes):
    loop = lambda x, n: until(x, True, n, max_steps=64, lanes=lanes)
    total = lambda xs, ns: jnp.sum(jax.checkpoint(jax.vmap(loop))(xs, ns))
    jax.block_until_ready(jax.jit(jax.value_and_grad(total))(XS, NS))
    assert len(recorder.ended) == recorder.begun[0][2]
    assert sum(steps for _, steps in recorder.ended) == 35


def test_free_lanes(recorder):
    def value(n):
        step = lambda i, c: lx.fori_loop(0, i, lambda j, c: jnp.sin(jnp.sin(c)), c + 1.0)
        return lx.fori_loop(0, n, step, 0.0, lanes="free", max_steps=8, progress=True)

    jax.block_until_ready(jax.jit(jax.vmap(value))(np.array([1, 4, 8])))
    ((_, iterations),) = recorder.ended
    assert iterations == 1 + sum(max(i, 1) for i in range(8))  # one to begin
    assert recorder.lanes[0] == 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(recorder, check_vma):
    mesh, rows = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), PartitionSpec("d")
    f = jax.shard_map(powers(25, True), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
    np.testing.assert_array_equal(jax.jit(f)(XS), jax.jit(jax.vmap(powers(25, None)))(XS))
    assert sorted(recorder.ended) == [(number, 25) for number in (1, 2, 3, 4)]
