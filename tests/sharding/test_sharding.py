"""Shardings that JAX propagates: loops keep those of carries and streams, in the backward pass too."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import loopax as lx
from tests.support.compiled import collectives, collectives_in_loops, temporary
from tests.support.limited_loops import raises
from tests.support.problem import KINDS, WITH_LAX, name_of
from tests.support.reference import assert_close

STEPS, FEATURES = 40, 1 << 12
ROOT = Path(__file__).parents[2]


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("d",), axis_types=(axis_type,))


def step(h, x=0.1):
    return jnp.sin(h) * 1.1 + x


def scan_loop(kind, h, xs, n):
    """Rows of xs and ys are sharded as the carry is."""
    h, ys = lx.scan(lambda h, x: (step(h, x), h * 2.0), h, xs, length=n, kind=kind)
    return h, ys


def fori_loop(kind, h, xs, n):
    return lx.fori_loop(0, n, lambda i, h: step(h, xs[i]), h, max_steps=STEPS, kind=kind), None


def while_loop(kind, h, xs, n):
    body = lambda c: (step(c[0], xs[c[1]]), c[1] + 1)
    return lx.while_loop(lambda c: c[1] < n, body, (h, 0), max_steps=STEPS, kind=kind)[0], None


LOOPS = {"scan": scan_loop, "fori": fori_loop, "while": while_loop}


def total(loop, kind):
    def f(h, xs, n):
        h, ys = LOOPS[loop](kind, h, xs, n)
        return (h**2).sum() + (0.0 if ys is None else jnp.sin(ys).sum())

    return f


def arguments(mesh, carry, rows):
    """A start and rows, sharded so, and a number of steps known at run time."""
    h = jax.device_put(jnp.linspace(-0.9, 1.1, FEATURES), NamedSharding(mesh, carry))
    xs = jnp.outer(jnp.linspace(0.0, 0.2, STEPS), jnp.ones(FEATURES))
    return h, jax.device_put(xs, NamedSharding(mesh, rows)), jnp.int32(STEPS - 3)


FEATURE = PartitionSpec("d"), PartitionSpec(None, "d")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_results_are_sharded_as_the_start(kind, loop, axis_type):
    devices = mesh(axis_type)
    with jax.set_mesh(devices):
        args = arguments(devices, *FEATURE)
        h, ys = jax.jit(lambda *args: LOOPS[loop](kind, *args))(*args)
    assert h.sharding.is_equivalent_to(args[0].sharding, 1)
    assert ys is None or ys.sharding.is_equivalent_to(args[1].sharding, 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_gradients_and_what_they_store_are_sharded_as_the_start(kind, loop, axis_type):
    devices, gradient = mesh(axis_type), jax.value_and_grad(total(loop, kind), (0, 1))
    with jax.set_mesh(devices):
        args = arguments(devices, *FEATURE)
        compiled = jax.jit(gradient).lower(*args).compile()
    ct_h, ct_xs = compiled(*args)[1]
    assert ct_h.sharding.is_equivalent_to(args[0].sharding, 1)
    assert ct_xs.sharding.is_equivalent_to(args[1].sharding, 2)
    text = compiled.as_text() or ""
    assert set(collectives(text)) <= {"all-reduce"}  # of the sum
    assert collectives_in_loops(text) == []
    alone = jax.jit(gradient).lower(*jax.device_get(args)).compile()
    assert temporary(compiled) <= temporary(alone) / 8 * 1.1 + 4096
    assert_close(jax.device_get((ct_h, ct_xs)), jax.device_get(alone(*jax.device_get(args))[1]))


SAME_STEPS = {
    "scan": lambda loops, x, w, **options: loops.scan(
        lambda c, r: (jnp.sin(c * r) * w, c * 2.0), x, jnp.linspace(0.5, 1.5, 3), **options
    ),
    "fori": lambda loops, x, w, **options: loops.fori_loop(0, 3, lambda i, c: jnp.sin(c) * w, x, **options),
    "while": lambda loops, x, w, **options: loops.while_loop(
        lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]) * w, c[1] + 1), (x, 0), **options
    )[0],
    "start that lanes share": lambda loops, x, w, **options: loops.scan(
        # JAX's own batching fails where its carry starts as a number that lanes share.
        lambda c, r: (c * r + x, None),
        w if loops is lx else w + 0.0 * x,
        jnp.linspace(0.5, 1.5, 3),
        **options,
    )[0],
}


def weights(tree):
    """The sum of what the lanes have, each weighed differently."""
    return sum((leaf**2).sum() * (i + 1.0) for i, leaf in enumerate(jax.tree.leaves(tree)))


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_lanes_spread_along_an_explicit_axis(kind, lanes):
    """Where all take the same steps; types are those of `jax.lax`, and what a gradient gives is spread as well."""
    devices = mesh(AxisType.Explicit)
    bounded = {"kind": kind, "lanes": lanes}
    with jax.set_mesh(devices):
        starts = jax.device_put(jnp.linspace(0.1, 1.3, 16), NamedSharding(devices, PartitionSpec("d")))
        for name, f in SAME_STEPS.items():
            options = bounded | ({"max_steps": 5} if name == "while" else {})
            _check_spread_lanes(partial(f, lx, **options), partial(f, jax.lax), starts)


def _check_spread_lanes(ours, plain, starts):
    over = lambda f: jax.vmap(f, (0, None))
    found, expected = jax.jit(lambda x, w: (over(ours)(x, w), over(plain)(x, w)))(starts, 1.1)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
    assert_close(jax.device_get(found), jax.device_get(expected))
    slope = jax.grad(lambda x, w: weights(ours(x, w)), (0, 1))
    outside = jax.jit(jax.grad(lambda x, w: weights(over(ours)(x, w)), (0, 1)))(starts, 1.1)
    inside = jax.jit(over(slope))(starts, 1.1)
    assert jax.typeof(outside[0]) == jax.typeof(inside[0]) == jax.typeof(starts)
    wanted = jax.device_get(jax.jit(over(slope))(jax.device_get(starts), 1.1))  # not spread
    assert_close(jax.device_get(inside), wanted)
    assert_close(jax.device_get(outside), (wanted[0], wanted[1].sum()))


def test_checks_of_lanes_along_an_explicit_axis():
    """They are raised outside of the lanes, once on each device."""
    devices = mesh(AxisType.Explicit)
    sines = lambda x, n: lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, max_steps=5)
    appended = lambda x, n: lx.Buffer(3, like=x).append(x * n).rows.sum()
    with jax.set_mesh(devices):
        starts = jax.device_put(jnp.linspace(0.1, 1.3, 16), NamedSharding(devices, PartitionSpec("d")))
        over = jax.jit(lambda n: jax.vmap(sines, (0, None))(starts, n))
        assert jax.typeof(over(2)) == jax.typeof(starts)
        assert_close(jax.device_get(over(2)), jax.device_get(jnp.sin(jnp.sin(starts))))
        slopes = jax.jit(jax.vmap(jax.grad(appended), (0, None)))(starts, 2.0)
        assert_close(jax.device_get(slopes), np.full(16, 2.0))
        with raises(RuntimeError, "loopax.fori_loop at tests/sharding/test_sharding.py", "max_steps=5 stopped a loop"):
            jax.block_until_ready(over(7))


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_lanes_along_an_explicit_axis_that_differ_are_refused(lanes):
    devices = mesh(AxisType.Explicit)
    own_steps = {
        "while": lambda x: lx.while_loop(lambda c: c < 2.0, lambda c: c * 1.1, x, lanes=lanes),
        "fori": lambda x: lx.fori_loop(0, (x * 4).astype(int), lambda i, c: c * 1.1, x, lanes=lanes),
        "scan": lambda x: lx.scan(lambda c, r: (c * r, c), x, jnp.ones(9), (x * 4).astype(int), lanes=lanes),
    }
    with jax.set_mesh(devices):
        starts = jax.device_put(jnp.linspace(0.1, 1.3, 16), NamedSharding(devices, PartitionSpec("d")))
        for f in own_steps.values():
            with pytest.raises(NotImplementedError, match=r"Explicit.*`loopax\.sharded_lanes\(f, mesh, 'd'\)`"):
                jax.jit(jax.vmap(f)).lower(starts)
        alone = own_steps["fori"](jnp.asarray(0.9))
        spread = lx.sharded_lanes(own_steps["fori"], devices, "d")
        assert_close(jax.device_get(jax.jit(spread)(starts))[10], jax.device_get(alone))


def recurrent(kind):
    """Sequences in the rows of a batch, which is what is sharded."""

    def f(w, h, xs):
        h, ys = lx.scan(lambda h, x: (jnp.tanh(h @ w + x), h * 2.0), h, xs, kind=kind)
        return (h**2).sum() + jnp.sin(ys).sum()

    return f


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_batch_axis(kind):
    """A gradient communicates in loops only for weights that all devices share, as often as that of `jax.lax.scan`."""
    devices, batch = mesh(), PartitionSpec(None, "d", None)
    random = np.random.RandomState(0)
    w, h, xs = random.randn(16, 16) * 0.1, random.randn(64, 16), random.randn(STEPS, 64, 16)
    h = jax.device_put(h, NamedSharding(devices, PartitionSpec("d", None)))
    xs = jax.device_put(xs, NamedSharding(devices, batch))
    of_data = jax.jit(jax.grad(recurrent(kind), (1, 2))).lower(w, h, xs).compile()
    assert collectives(of_data.as_text() or "") == []
    assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(of_data(w, h, xs), (h, xs), strict=True))
    of_weights = jax.jit(jax.grad(recurrent(kind))).lower(w, h, xs).compile()
    assert collectives_in_loops(of_weights.as_text() or "") == ["all-reduce"]
    assert_close(jax.device_get(of_weights(w, h, xs)), jax.grad(recurrent(kind))(w, *jax.device_get((h, xs))))


def test_checks_that_fail_are_raised_by_all_devices():
    """If one did, as JAX would have it, the others would wait for it until the process is aborted."""
    command = [sys.executable, "-W", "error", "-m", "tests.support.failing_checks"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lanes = sum(1.1**i for i in range(6))  # and its derivative, as each lane is linear in x
    found = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, result in found if result == "raised"] == [
        "lanes",
        "lanes in jit",
        "gradient of lanes",
        "gradient of lanes in jit",
        "carry",
        "carry in jit",
    ]
    numbers = [float(result) for _, result in found if result != "raised"]
    assert numbers == pytest.approx([lanes, lanes, lanes, lanes, 80 * 1.1**3, 80 * 1.1**3])
