"""`sharded_lanes`: lanes spread over eight virtual devices, each with a loop of its own."""

import threading
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import loopax as lx
from loopax._src.sharding.sharded_lanes import by_work
from tests.support.compiled import collectives, collectives_in_loops
from tests.support.limited_loops import raises
from tests.support.reference import assert_close

COUNTS = np.array([3, 19, 1, 7, 0, 12, 5, 2, 9, 4, 1, 1, 16, 8, 2, 6])
STARTS = np.linspace(-1.0, 1.0, 16)
W = np.float64(1.1)
LANES = [lx.Lockstep(), lx.Compact(min_lanes=1)]


def devices(number=8, axis_type=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:number]), ("d",), axis_types=(axis_type,))


def lane(w, lanes, x, n):
    """Steps that share `w`, as many as the lane's own `n`."""
    return lx.fori_loop(0, n, lambda _, h: jnp.sin(w * h) + 0.1, x, max_steps=20, lanes=lanes)


def sharded(w, x, n, counts=None, lanes=LANES[0], mesh=None):
    return lx.sharded_lanes(partial(lane, w, lanes), mesh or devices(), "d")(x, n, counts=counts)


def mapped(w, x, n):
    """In NumPy, what the lanes give, and what its derivatives by w and x and its second one by w are."""
    y, by_w, by_x, twice = np.array(x), np.zeros(len(x)), np.ones(len(x)), np.zeros(len(x))
    for step in range(max(n)):
        inner = y + w * by_w  # the derivative of w * y by w
        sine, cosine = np.sin(w * y), np.cos(w * y)
        new = sine + 0.1, cosine * inner, cosine * w * by_x, cosine * (2 * by_w + w * twice) - sine * inner**2
        y, by_w, by_x, twice = (np.where(step < n, *pair) for pair in zip(new, (y, by_w, by_x, twice), strict=True))
    return y, by_w, by_x, twice


def gradient_of_squares(w, x, n, weights: Any = 1.0):
    """Of the weighed sum of the squares of what the lanes give, by w and x."""
    y, by_w, by_x, _ = mapped(w, x, n)
    return (2 * weights * y * by_w).sum(), 2 * weights * y * by_x


@pytest.mark.parametrize(("counts", "lanes"), [("none", LANES[0]), ("known", LANES[1]), ("traced", LANES[0])])
@pytest.mark.parametrize(
    ("number", "axis_type"),
    [(16, AxisType.Explicit), (13, AxisType.Auto), (3, AxisType.Explicit)],
    ids=["divided, explicit", "not divided", "fewer than devices, explicit"],
)
def test_values_and_gradients(number, counts, lanes, axis_type):
    x, n = STARTS[:number], COUNTS[:number]
    work = {"none": lambda _: None, "known": lambda _: n, "traced": lambda n: n}[counts]
    mesh = devices(axis_type=axis_type)
    f = lambda w, x, n: sharded(w, x, n, work(n), lanes, mesh)
    weights = np.arange(1.0, number + 1)
    total = lambda w, x: ((y := f(w, x, n)) ** 2 @ weights, y)
    with jax.set_mesh(mesh):
        (_, y), actual = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(W, x)
    wanted = mapped(W, x, n)[0]
    assert_close(jax.device_get((y, actual)), (wanted, gradient_of_squares(W, x, n, weights)))
    y = jax.jit(f)(W, x, n)
    assert number % 8 or y.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("d")), 1)
    assert_close(jax.device_get(y), wanted)


def test_second_derivatives():
    x, n, weights = STARTS[:13], COUNTS[:13] % 5, np.arange(1.0, 14.0)
    lanes = lambda w: sharded(w, x, n, counts=n)
    both = jax.jit(lambda w: (jax.hessian(lambda w: lanes(w) ** 3 @ weights)(w), jax.jvp(lanes, (w,), (1.0,))))
    y, slope, _, curvature = mapped(W, x, n)
    hessian = (6 * y * slope**2 + 3 * y**2 * curvature) @ weights
    assert_close(jax.device_get(both(W)), (hessian, (y, slope)))


@pytest.mark.parametrize(("counts", "lanes"), [("none", LANES[0]), ("known", LANES[1]), ("traced", LANES[1])])
def test_no_device_waits_for_another_in_a_loop(lanes, counts):
    """The gradient of the shared weight is summed once, behind the loops."""

    def total(w, x, n):
        work = {"none": None, "known": COUNTS, "traced": n}[counts]
        return (sharded(w, x, n, work, lanes) ** 2).sum()

    spread = NamedSharding(devices(), PartitionSpec("d"))
    args = W, jax.device_put(STARTS, spread), jax.device_put(COUNTS, spread)
    text = jax.jit(jax.grad(total, (0, 1))).lower(*args).compile().as_text() or ""
    assert text.count(" while(") > 0
    assert collectives_in_loops(text) == []
    assert "all-reduce" in collectives(text)  # of the shared weight


def test_what_is_summed_over_devices_in_each_step_is_found():
    """The test above can fail: the gradient of a shared weight, where JAX decides on shardings."""
    spread = NamedSharding(devices(), PartitionSpec("d"))
    f = lambda w, x: (lx.fori_loop(0, 9, lambda _, h: jnp.sin(w * h), x) ** 2).sum()
    text = jax.jit(jax.grad(f)).lower(W, jax.device_put(STARTS, spread)).compile().as_text() or ""
    assert set(collectives_in_loops(text)) == {"all-reduce"}


class DeviceCounter:
    """Counts the lanes that each device evaluates, as the program runs."""

    def __init__(self):
        self.lanes, self.lock = np.zeros(8, int), threading.Lock()

    def __call__(self, x):
        shape = jax.ShapeDtypeStruct((), x.dtype)
        return jax.pure_callback(self.count, shape, x, jax.lax.axis_index("d"), vmap_method="expand_dims")

    def count(self, x, device):
        with self.lock:
            self.lanes[int(np.asarray(device).reshape(-1)[0])] += x.size
        return x


@pytest.mark.parametrize("dealt", [False, True])
def test_devices_finish_together(dealt):
    """Step work is the sum of the steps of a device's lanes; `Compact` evaluates little more, a lane alone nothing."""
    counts = np.ceil(20 * np.random.RandomState(0).lognormal(sigma=1.0, size=256)).astype(int)
    counter = DeviceCounter()
    f = lambda n: lx.fori_loop(0, n, lambda _, x: counter(x) + 1.0, 0.0, lanes=lx.Compact(min_lanes=1))
    y = jax.jit(lambda n: lx.sharded_lanes(f, devices(), "d")(n, counts=n if dealt else None))(counts)
    assert jax.block_until_ready(y).tolist() == counts.tolist()
    shares = by_work(counts, 8).lanes if dealt else np.arange(256)
    steps = counts[np.asarray(shares)].reshape(8, 32).sum(1)
    assert steps.sum() == counts.sum()
    assert (steps.max() <= 1.15 * steps.mean()) == dealt
    assert (counter.lanes.max() <= 1.15 * counter.lanes.mean()) == dealt
    assert steps.sum() <= counter.lanes.sum() <= 1.5 * steps.sum()


DEAL = jax.jit(by_work, static_argnums=1)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_every_deal_has_all_lanes(counts, devices):
    deal = DEAL(np.array(counts, np.int32), devices)
    lanes, places = np.asarray(deal.lanes), np.asarray(deal.places)
    assert len(lanes) % devices == 0
    assert len(lanes) - devices < len(counts) <= len(lanes)
    assert lanes[places].tolist() == list(range(len(counts)))
    assert all(counts[lane] == min(counts) for lane in np.delete(lanes, places))
    strange = by_work(jnp.array([jnp.nan, jnp.inf, -1.0, 3e38, 3e38, 0.0]), 3)
    assert sorted(strange.lanes.tolist()) == list(range(6))


def test_lanes_with_the_most_work_are_dealt_first():
    assert by_work(jnp.array([5, 4, 2, 1]), 2).lanes.tolist() == [0, 3, 1, 2]  # 5 + 1 and 4 + 2


def test_arguments_of_all_kinds():
    """Pytrees, axes of their own, shared arguments, static leaves, keys, an Equinox module, and two results."""
    model = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 10)
    xs = np.random.RandomState(2).randn(3, 10)

    def f(model, data, key, scale, how):
        assert how == "tanh"
        assert isinstance(scale, int)
        x = data["x"] + jax.random.normal(key, (3,))
        h = lx.fori_loop(0, data["n"], lambda _, h: jnp.tanh(model(h)) * scale, x, max_steps=10)
        return {"h": h, "key": jax.random.split(key)}, h.sum()

    args = model, {"x": xs, "n": np.arange(10) % 4}, keys, 2, "tanh"
    in_axes, out_axes = (None, {"x": 1, "n": 0}, 0, None, None), ({"h": -1, "key": 1}, 0)
    ours = lx.sharded_lanes(f, devices(4), "d", in_axes=in_axes, out_axes=out_axes)
    plain = lambda model, data, keys: jax.vmap(
        lambda data, key: f(model, data, key, 2, "tanh"), in_axes=(in_axes[1], 0), out_axes=out_axes
    )(data, keys)
    wanted = eqx.filter_jit(plain)(*args[:3])
    for counts in (None, np.arange(10) % 4):
        actual = eqx.filter_jit(lambda *args, counts=counts: ours(*args, counts=counts))(*args)
        assert actual[0]["key"].shape == wanted[0]["key"].shape == (2, 10)
        data = lambda tree: jax.device_get(({"h": tree[0]["h"], "key": jax.random.key_data(tree[0]["key"])}, tree[1]))
        assert_close(data(actual), data(wanted))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_another_axis_of_the_mesh(axis_type):
    """Weights sharded over it stay so; each row of devices runs its own loop."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("d", "model"), axis_types=(axis_type, axis_type))
    w, x = np.random.RandomState(0).randn(6, 6) * 0.5, np.random.RandomState(1).randn(16, 6)

    def lane(w, x, n):
        return lx.fori_loop(0, n, lambda _, h: jnp.tanh(h @ w), x, max_steps=20)

    ours = lx.sharded_lanes(lane, mesh, "d", in_axes=(None, 0, 0))
    plain = jax.vmap(lane, in_axes=(None, 0, 0))
    total = lambda f, **options: lambda w, x: (f(w, x, COUNTS, **options) ** 2).sum()
    wanted = jax.jit(jax.grad(total(plain), (0, 1)))(w, x)
    w = jax.device_put(w, NamedSharding(mesh, PartitionSpec("model" if axis_type == AxisType.Auto else None)))
    actual = jax.jit(jax.grad(total(ours, counts=COUNTS), (0, 1)))(w, x)
    assert_close(jax.device_get(actual), jax.device_get(wanted))


# ---- arguments that are wrong: it says so before anything runs


def call(in_axes: Any = 0, out_axes: Any = 0, mesh: Any = None, axis="d", counts=None, f=lambda x: x):
    return lambda *args: lx.sharded_lanes(f, mesh or devices(), axis, in_axes=in_axes, out_axes=out_axes)(
        *args, counts=counts
    )


WRONG = [
    (call(f=3), (STARTS,), TypeError, "f of sharded_lanes: got int 3, expected a callable"),
    (call(mesh="cpu"), (STARTS,), TypeError, "expected a `jax.sharding.Mesh`"),
    (call(), (), ValueError, "no argument has lanes"),
    (call(in_axes=None), (STARTS,), ValueError, "no argument has lanes"),
    (call(f=lambda x, y: x), (STARTS, {"a": STARTS[:5]}), ValueError, "args[1]['a']: 5 lanes at axis 0 (float64[5])"),
    (call(), (np.float64(2.0),), ValueError, "got 0 for args[0], which has 0 axes (float64[])"),
    (call(in_axes=(0, 0)), (STARTS,), ValueError, "with an int or None for each part of the arguments"),
    (call(in_axes="0"), (STARTS,), TypeError, "got str '0', expected an int or None"),
    (call(out_axes=None), (STARTS,), ValueError, "got None for result, but every result has lanes"),
    (call(out_axes=2), (STARTS,), ValueError, "got 2 for result, which has 1 axes"),
    (call(out_axes=(0, 0)), (STARTS,), ValueError, "with an int or None for each part of the results"),
    (call(counts=COUNTS[:3]), (STARTS,), ValueError, "got int64[3], expected shape (16,)"),
    (call(counts=COUNTS > 3), (STARTS,), TypeError, "expected a real number for each lane"),
]


def test_bad_arguments():
    for run, args, error, message in WRONG:
        with raises(error, message):
            run(*args)
