"""Shardings that JAX propagates: loops keep those of carries and streams, in the backward pass too."""

import functools as ft
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
from tests.support.problem import KINDS, name_of
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
    h = jax.device_put(np.linspace(-0.9, 1.1, FEATURES), NamedSharding(mesh, carry))
    xs = np.outer(np.linspace(0.0, 0.2, STEPS), np.ones(FEATURES))
    return h, jax.device_put(xs, NamedSharding(mesh, rows)), np.int32(STEPS - 3)


FEATURE = PartitionSpec("d"), PartitionSpec(None, "d")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("kind", [KINDS[0], lx.Lax()], ids=name_of)
def test_results_are_sharded_as_the_start(kind, axis_type):
    devices = mesh(axis_type)
    with jax.set_mesh(devices):
        args = arguments(devices, *FEATURE)
        results = jax.jit(lambda *args: {name: loop(kind, *args) for name, loop in LOOPS.items()})(*args)
    for h, ys in results.values():
        assert h.sharding.is_equivalent_to(args[0].sharding, 1)
        assert ys is None or ys.sharding.is_equivalent_to(args[1].sharding, 2)


@ft.cache
def on_one_device(loop, kind):
    """The gradient, and the memory that it takes."""
    args = jax.device_get(arguments(mesh(), *FEATURE))
    compiled = jax.jit(jax.value_and_grad(total(loop, kind), (0, 1))).lower(*args).compile()
    return jax.device_get(compiled(*args)[1]), temporary(compiled)


TYPED = [
    (loop, axis_type)
    for axis_type in (AxisType.Auto, AxisType.Explicit)
    for loop in (LOOPS if axis_type == AxisType.Auto else ["scan"])
]


@pytest.mark.parametrize(("loop", "axis_type"), TYPED, ids=str)
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
    wanted, memory = on_one_device(loop, kind)
    assert temporary(compiled) <= memory / 8 * 1.1 + 4096
    assert_close(jax.device_get((ct_h, ct_xs)), wanted)


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


@ft.cache
def without_devices(name):
    """Gradients of lanes that are not spread, the same for all kinds."""
    f = partial(SAME_STEPS[name], lx, kind=lx.Residuals(), **({"max_steps": 5} if name == "while" else {}))
    slope = jax.grad(lambda x, w: weights(f(x, w)), (0, 1))
    return jax.device_get(jax.jit(jax.vmap(slope, (0, None)))(SPREAD, 1.1))


SPREAD = np.linspace(0.1, 1.3, 16)
HOW = [*((kind, "lockstep") for kind in KINDS), (KINDS[0], "compact")]


def spread_lanes(ours, plain):
    """Results of both, and gradients of ours outside of the lanes and inside."""
    over = lambda f: jax.vmap(f, (0, None))
    slope = jax.grad(lambda x, w: weights(ours(x, w)), (0, 1))
    outside = jax.grad(lambda x, w: weights(over(ours)(x, w)), (0, 1))
    return lambda x, w: (over(ours)(x, w), over(plain)(x, w), outside(x, w), over(slope)(x, w))


@pytest.mark.parametrize(("kind", "lanes"), HOW, ids=name_of)
def test_lanes_spread_along_an_explicit_axis(kind, lanes):
    """Where all take the same steps; types are those of `jax.lax`, and what a gradient gives is spread as well."""
    devices = mesh(AxisType.Explicit)
    programs = {}
    for name, f in SAME_STEPS.items():
        options = {"kind": kind, "lanes": lanes, **({"max_steps": 5} if name == "while" else {})}
        programs[name] = spread_lanes(partial(f, lx, **options), partial(f, jax.lax))
    with jax.set_mesh(devices):
        starts = jax.device_put(SPREAD, NamedSharding(devices, PartitionSpec("d")))
        results = jax.jit(lambda x, w: {name: f(x, w) for name, f in programs.items()})(starts, 1.1)
        types = jax.typeof(starts)
    for name, (found, expected, outside, inside) in results.items():
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
        assert_close(jax.device_get(found), jax.device_get(expected))
        assert jax.typeof(outside[0]) == jax.typeof(inside[0]) == types
        wanted = without_devices(name)
        assert_close(jax.device_get(inside), wanted)
        assert_close(jax.device_get(outside), (wanted[0], wanted[1].sum()))


# Of a start, with as many steps as it asks for. A square root leaves its domain in a lane that goes on.
OWN_STEPS = {
    "while": lambda x, **options: lx.while_loop(lambda c: c < 2.0, lambda c: jnp.sqrt(c) * 0.3 + c, x, **options),
    "fori": lambda x, **options: lx.fori_loop(0, (x * 4).astype(int), lambda i, c: jnp.sin(c * x), x, **options),
    "scan": lambda x, **options: lx.scan(
        lambda c, r: (c * r * x, c), x, jnp.linspace(0.5, 1.5, 9), (x * 4).astype(int), reverse=True, **options
    ),
    "rows": lambda x, **options: lx.fori_loop(
        0, (x * 4).astype(int), lambda i, c: c.at[i + 1].set(jnp.sin(c[i]) * x), jnp.linspace(x, 2.0, 300), **options
    ),
    "rows in a branch": lambda x, **options: lx.fori_loop(
        0,
        3,
        lambda i, c: jax.lax.cond(x > 0.3 * i, lambda c: c.at[i + 1].set(jnp.sin(c[i]) * x), lambda c: c, c),
        jnp.linspace(x, 2.0, 300),
        **options,
    ),
    "nested": lambda x, **options: lx.while_loop(
        lambda c: c < 2.0, lambda c: lx.while_loop(lambda d: d < c + 0.3, lambda d: d * 1.2, c), x, **options
    ),
}


@pytest.mark.parametrize("name", OWN_STEPS)
def test_lanes_along_an_explicit_axis_that_differ(name):
    """Values, derivatives inside and outside of the lanes, and the types of `jax.lax`."""
    devices, f = mesh(AxisType.Explicit), OWN_STEPS[name]
    total = lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(f(x)))

    def program(xs):
        inside = jax.vmap(jax.value_and_grad(total))
        return jax.vmap(f)(xs), inside(xs), jax.grad(lambda xs: inside(xs)[0].sum())(xs), jax.jvp(inside, (xs,), (xs,))

    expected = jax.jit(program)(SPREAD)
    with jax.set_mesh(devices):
        starts = jax.device_put(SPREAD, NamedSharding(devices, PartitionSpec("d")))
        found = jax.jit(program)(starts)
        assert jax.typeof(found[1][1]) == jax.typeof(found[2]) == jax.typeof(starts)
        if name == "while":
            plain = jax.vmap(lambda x: jax.lax.while_loop(lambda c: c < 2.0, lambda c: jnp.sqrt(c) * 0.3 + c, x))
            assert jax.typeof(found[0]) == jax.typeof(jax.jit(plain)(starts))
            assert_close(jax.device_get(jax.vmap(f)(starts)), jax.device_get(expected[0]))
    assert_close(jax.device_get(found), jax.device_get(expected))


def test_lanes_along_an_explicit_axis_that_would_be_gathered_are_refused():
    devices = mesh(AxisType.Explicit)
    with jax.set_mesh(devices):
        starts = jax.device_put(SPREAD, NamedSharding(devices, PartitionSpec("d")))
        for lanes in ("sequential", lx.Compact(min_lanes=1)):
            for name in ("while", "fori", "scan"):
                with pytest.raises(NotImplementedError, match=r"Explicit.*`loopax\.sharded_lanes\(f, mesh, 'd'\)`"):
                    jax.jit(jax.vmap(partial(OWN_STEPS[name], lanes=lanes))).lower(starts)


def test_a_carry_that_changes_its_sharding():
    """The error names the user's function and the leaf, and not `while_loop ... state.carry[0]`."""
    loops = {
        "f of scan": lambda step, c: lx.scan(lambda c, _: (step(c), None), c, length=3),
        "body_fun of while_loop": lambda step, c: lx.while_loop(lambda c: c["a"].sum() < 3, step, c),
        "step of rollout": lambda step, c: lx.rollout(lambda c: (step(c), None), c, 3),
    }
    devices = mesh(AxisType.Explicit)
    with jax.set_mesh(devices):
        starts = jax.device_put(SPREAD, NamedSharding(devices, PartitionSpec("d")))
        step = lambda c: {"a": c["a"] + starts, "b": c["b"]}
        leaf = r"\['a'\]: got float64\[16\] sharded as P.*, expected float64\[16\]\n.*reshard"
        for where, loop in loops.items():
            with pytest.raises(TypeError, match=rf"(?s){where} must return .*{leaf}"):
                jax.jit(lambda x, loop=loop: loop(step, {"a": x, "b": x}))(jnp.asarray(SPREAD))


def recurrent(kind):
    """Sequences in the rows of a batch, which is what is sharded."""

    def f(w, h, xs):
        h, ys = lx.scan(lambda h, x: (jnp.tanh(h @ w + x), h * 2.0), h, xs, kind=kind)
        return (h**2).sum() + jnp.sin(ys).sum()

    return f


def batch_arguments():
    random = np.random.RandomState(0)
    return random.randn(16, 16) * 0.1, random.randn(64, 16), random.randn(STEPS, 64, 16)


@ft.cache
def gradient_of_weights():
    """On one device, the same for all kinds."""
    return jax.device_get(jax.jit(jax.grad(recurrent(lx.Residuals())))(*batch_arguments()))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_batch_axis(kind):
    """A gradient communicates in loops only for weights that all devices share, as often as that of `jax.lax.scan`."""
    devices, batch = mesh(), PartitionSpec(None, "d", None)
    w, h, xs = batch_arguments()
    h = jax.device_put(h, NamedSharding(devices, PartitionSpec("d", None)))
    xs = jax.device_put(xs, NamedSharding(devices, batch))
    of_data = jax.jit(jax.grad(recurrent(kind), (1, 2))).lower(w, h, xs).compile()
    assert collectives(of_data.as_text() or "") == []
    assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(of_data(w, h, xs), (h, xs), strict=True))
    of_weights = jax.jit(jax.grad(recurrent(kind))).lower(w, h, xs).compile()
    assert collectives_in_loops(of_weights.as_text() or "") == ["all-reduce"]
    assert_close(jax.device_get(of_weights(w, h, xs)), gradient_of_weights())


def test_checks_that_fail_are_raised_by_all_devices():
    """If one did, as JAX would have it, the others would wait for it until the process is aborted."""
    command = [sys.executable, "-W", "error", "-m", "tests.support.failing_checks"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lanes = sum(1.1**i for i in range(6))  # and its derivative, as each lane is linear in x
    found = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    of_lanes = ["lanes", "lanes in jit", "gradient of lanes", "gradient of lanes in jit"]
    assert [name for name, result in found if result == "raised"] == [*of_lanes, "carry", "carry in jit"]
    numbers = [float(result) for _, result in found if result != "raised"]
    assert numbers == pytest.approx([lanes] * 4 + [80 * 1.1**3] * 2)
