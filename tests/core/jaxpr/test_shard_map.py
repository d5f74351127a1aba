"""`shard_map`, collectives and shardings on eight virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from tests.support.compiled import collectives_in_loops
from tests.support.problem import KINDS, WITH_LAX, name_of
from tests.support.reference import assert_close

STARTS = np.linspace(-0.9, 1.1, 16)
SPEC = PartitionSpec("d")


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("d",), axis_types=(axis_type,))


def sharded(f, check_vma, arguments=1):
    return jax.shard_map(f, mesh=mesh(), in_specs=(SPEC,) * arguments, out_specs=SPEC, check_vma=check_vma)


def sines(h, counts):
    """So many steps of h <- 1.1 sin(h), elementwise: the results, and their first and second derivatives."""
    y, slope, curvature = np.array(h), np.ones(len(h)), np.zeros(len(h))
    for k, n in enumerate(np.broadcast_to(counts, y.shape)):
        for _ in range(n):
            first, second = 1.1 * np.cos(y[k]), -1.1 * np.sin(y[k])
            curvature[k] = second * slope[k] ** 2 + first * curvature[k]
            slope[k] *= first
            y[k] = 1.1 * np.sin(y[k])
    return y, slope, curvature


def energy(kind):
    """Elementwise, so that shards do not need each other."""
    return lambda h: (lx.scan(lambda h, _: (jnp.sin(h) * 1.1, h), h, None, length=5, kind=kind)[0] ** 2).sum()


def energy_expected(h):
    """Its value and gradient."""
    y, slope, _ = sines(h, 5)
    return (y**2).sum(), 2 * y * slope


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_forward_and_gradients_inside_and_outside(kind):
    forward = lambda check: sharded(lambda h: energy(kind)(h)[None], check)
    programs = {}
    for check in (False, True):
        programs[check, "forward"] = forward(check)
        programs[check, "inside"] = sharded(jax.grad(energy(kind)), check)
        programs[check, "outside"] = jax.grad(lambda h, check=check: forward(check)(h).sum())
    found = jax.jit(lambda h: {name: f(h) for name, f in programs.items()})(STARTS)
    value, gradient = energy_expected(STARTS)
    for (_, name), actual in found.items():
        actual = np.asarray(actual)
        assert_close(*((actual.sum(), value) if name == "forward" else (actual, gradient)))


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_collective_in_the_body(kind):
    step = lambda total: lambda h: jnp.sin(h) + 0.1 * total(h)
    shard = lambda h: lx.fori_loop(0, 4, lambda i, h: step(lambda h: lax.psum(h.sum(), "d"))(h), h, kind=kind)
    ours = lambda check: jax.grad(lambda h: (sharded(shard, check)(h) ** 2).sum())

    def plain(h):
        for _ in range(4):
            h = step(jnp.sum)(h)
        return (h**2).sum()

    unchecked, checked, wanted = jax.jit(lambda h: (ours(False)(h), ours(True)(h), jax.grad(plain)(h)))(STARTS)
    assert_close((unchecked, checked), (wanted, wanted))


def of_count(kind, bound, **options):
    return lambda h, n: lx.fori_loop(0, n, lambda i, h: jnp.sin(h) * 1.1, h, max_steps=bound, kind=kind, **options)


def of_condition(kind, bound, **options):
    def loop(h, n):
        body = lambda c: (jnp.sin(c[0]) * 1.1, c[1] + 1)
        return lx.while_loop(lambda c: c[1] < n, body, (h, 0), max_steps=bound, kind=kind, **options)[0]

    return loop


def of_rows(kind, bound, **options):
    def loop(h, n):
        step = lambda h, x: (jnp.sin(h) * x, None)
        return lx.scan(step, h, np.full(bound, 1.1), length=n, reverse=True, kind=kind, **options)[0]

    return loop


COUNTS = np.arange(16, dtype=np.int32) % 9


PER_DEVICE = {
    "value": lambda f: lambda h, n: f(h, n[0]),  # the lanes of a device take as many steps as its first
    "grad": lambda f: lambda h, n: jax.grad(f)(h[0], n[0])[None],
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "grad of vmap": lambda f: jax.grad(lambda h, n: jax.vmap(f)(h, n).sum()),
}


@pytest.mark.parametrize(
    ("loop", "kind", "bound"),
    [
        *((loop, kind, 9) for loop in (of_count, of_condition, of_rows) for kind in KINDS),
        *((loop, kind, None) for loop in (of_count, of_condition) for kind in (lx.Checkpointed(), lx.Checkpointed(3))),
    ],
    ids=name_of,
)
def test_gradients_of_counts_that_differ_between_devices(loop, kind, bound):
    """Rows of the replay vary, and JAX's check of what varies is on."""
    f = loop(kind, bound)
    shard = lambda h, n: {name: transform(f)(h, n) for name, transform in PER_DEVICE.items()}
    found = jax.device_get(jax.jit(sharded(shard, True, 2))(STARTS, COUNTS))
    _, slopes, _ = sines(STARTS, COUNTS)
    values, *_ = sines(STARTS, COUNTS[::2].repeat(2))
    assert_close(found, {"value": values, "grad": slopes[::2], "vmap of grad": slopes, "grad of vmap": slopes})


@pytest.mark.parametrize("loop", [of_count, of_condition])
def test_compact_lanes_of_counts_that_differ_between_devices(loop):
    lanes = jax.vmap(jax.grad(loop(lx.Checkpointed(), 9, lanes=lx.Compact(min_lanes=1))))
    found = jax.jit(sharded(lanes, True, 2))(STARTS, COUNTS)
    assert_close(jax.device_get(found), sines(STARTS, COUNTS)[1])


def test_spmd_axis_name():
    f = lambda h, n: lx.fori_loop(0, n, lambda i, h: jnp.sin(h) * 1.1, h, max_steps=9)
    lanes = jax.jit(jax.vmap(jax.grad(f), spmd_axis_name="d"))
    assert_close(jax.device_get(lanes(STARTS, COUNTS)), sines(STARTS, COUNTS)[1])


VARYING = {
    "stop": lambda x: lx.scan(lambda c, _: (c * 1.2, c), x, length=6, stop=lambda c, y: c.sum() > 1.5)[0],
    "inner check": lambda x: lx.fori_loop(
        0, 2, lambda _, c: lx.while_loop(lambda c: c.sum() < 1.5, lambda c: c * 1.2, c, max_steps=30), x
    ),
    "lanes": jax.vmap(lambda x: lx.while_loop(lambda c: c < 1.5, lambda c: c * 1.2, x, max_steps=60)),
    "lanes that stop": jax.vmap(
        lambda x: lx.scan(lambda c, _: (c * 1.2, c), x, length=6, stop=lambda c, y: c > 1.5)[1].sum()
    ),
}


@pytest.mark.parametrize("program", VARYING)
def test_conditions_that_vary_between_devices(program):
    """Flags and conditions start as varying where what they come to depend on does."""
    f, starts = VARYING[program], np.abs(STARTS) + 0.1
    both = lambda x: (f(x), jax.grad(lambda x: f(x).sum())(x))
    alone = jax.jit(both)
    wanted = tuple(np.concatenate(parts) for parts in zip(*map(alone, starts.reshape(8, 2)), strict=True))
    assert_close(jax.device_get(jax.jit(sharded(both, True))(starts)), wanted)


def with_shared_values(body, start):
    """A loss of one lane, and of values that devices share; the carry has a shared leaf, and another one."""

    def loss(shared, x):
        step = lambda c, row: body(shared, c, row)
        (scale, c), ys = lx.scan(step, start(shared, x), shared["rows"])
        return (scale * c).sum() + (0 if ys is None else ys.sum())

    return loss


def table(shared, carry, row):
    i = carry[0].astype(int)
    return (carry[0] + 1, jnp.sin(carry[1] * shared["w"][i] + shared["w"][i + 1]) + row), None


def matrix(shared, carry, row):
    return (carry[0] * shared["decay"], jnp.tanh(shared["w"][:4] @ carry[1]) * carry[0] + row), carry[1] * row


def jitted(shared, carry, row):
    scaled = jax.jit(lambda w, c: jnp.sin(w[0] * c) * w.sum())(shared["w"] * shared["decay"], carry[1])
    return (carry[0], scaled + row), row * carry[1]


def inner_loop(shared, carry, row):
    c = lx.fori_loop(0, 2, lambda j, c: jnp.sin(c * shared["w"][j]), carry[1])
    return (carry[0], c * shared["decay"] + row), None


SHARED = {"w": jnp.sin(jnp.arange(24.0)).reshape(6, 4), "decay": jnp.array(0.9), "rows": jnp.linspace(0.0, 1.0, 4)}
# What is summed once. `decay` also makes the shared leaf of the carry, whose cotangent each device has as a whole.
SHARED_STEPS = {
    "table": (table, lambda shared, x: (jnp.zeros(()), x), True),
    "matrix": (matrix, lambda shared, x: (shared["decay"], x), False),
    "jitted": (jitted, lambda shared, x: (shared["decay"], x), True),
    "inner loop": (inner_loop, lambda shared, x: (shared["decay"], x), True),
}


@pytest.mark.parametrize("name", SHARED_STEPS)
def test_cotangents_of_shared_values_are_summed_once(name):
    """After the loop, and not in each of its steps."""
    body, start, at_once = SHARED_STEPS[name]
    loss = with_shared_values(body, start)
    lanes = jax.vmap(loss, (None, 0))
    of_devices = jax.shard_map(lanes, mesh=mesh(), in_specs=(PartitionSpec(), SPEC), out_specs=SPEC)
    xs = jnp.cos(jnp.arange(64.0)).reshape(16, 4)
    gradient = lambda f: jax.grad(lambda shared: f(shared, xs).sum())
    for way in (gradient, lambda f: lambda shared: jax.jvp(gradient(f), (shared,), (shared,))[1]):
        assert_close(jax.jit(way(of_devices))(SHARED), jax.jit(way(lanes))(SHARED))
    text = jax.jit(gradient(of_devices)).lower(SHARED).compile().as_text() or ""
    assert (collectives_in_loops(text) == []) == at_once


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("calibration", ["h100", "tpu-v5e"])
def test_a_large_carry_on_accelerators(calibration, is_known):
    """XLA is given an order of what varies over the devices, and of what does not, such as the number of the step."""

    def loss(x):
        take, start, kind = lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0), lx.Checkpointed(3)
        if is_known:
            return lx.fori_loop(0, 12, lambda i, c: take(c), start, kind=kind)[0].sum()
        return lx.while_loop(lambda c: c[1] < 12, take, start, kind=kind)[0].sum()

    of_devices = jax.shard_map(lambda x: lax.psum(loss(x), "d"), mesh=mesh(), in_specs=SPEC, out_specs=PartitionSpec())
    x = jnp.linspace(0, 1, 8 * 2**17)
    with lx.configure(calibration=calibration):
        gradient = jax.jit(jax.grad(of_devices))
        assert "optimization_barrier" in gradient.lower(x).as_text()
        assert_close(gradient(x), jax.jit(jax.grad(loss))(x))
