"""`lanes="auto"`: which way a batch is expected to be fastest, from what its steps cost; and stages by cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.ir.lane_choice import chosen, estimates, of_parts, of_transposed
from loopax._src.core.ir.lanes import AutoLanes, Compact, Lockstep, Sequential, stages
from loopax._src.core.jaxpr.cost import step_cost
from loopax._src.jax_internals import one_function
from tests.support.reference import assert_close

W = np.full((64, 64), 0.1, np.float32)
X = np.ones((1000, 25), np.float32)

BODIES = {
    "layer": (lambda h: jnp.tanh(W @ h), 64),
    "regression": (lambda h: h - jax.nn.sigmoid(X @ h) @ X, 25),
    "small layers": (lambda h: 0.1 * jnp.tanh(h @ W[:8, :32]) @ W[:32, :8], 8),
    "smallest layers": (lambda h: 0.1 * jnp.tanh(h @ W[:4, :8]) @ W[:8, :4], 4),
    "two operations": (lambda h: h * 0.5 + 1.0, 3),
    "functions": (lambda h: jnp.sin(h) + jnp.exp(h), 2000),
}
CHOICES = [
    ("layer", 1024, "compact"),  # a product of matrices is faster than products of a matrix and vectors
    ("layer", 8, "sequential"),  # and is called by few lanes
    ("regression", 32, "sequential"),
    ("two operations", 1024, "lockstep"),
    ("functions", 64, "compact"),  # one operation on a large array, which runs on several cores
    ("layer", 1, "lockstep"),
]
NAMES = {Lockstep: "lockstep", Compact: "compact", Sequential: "sequential"}


def body_of(name):
    function, size = BODIES[name]
    return jax.make_jaxpr(lambda row, h: function(h))(0, jax.ShapeDtypeStruct((size,), jnp.float32))


@pytest.mark.parametrize(("body", "lanes", "name"), CHOICES)
def test_choices(body, lanes, name):
    assert NAMES[type(chosen(AutoLanes(), body_of(body), 0, lanes))] == name


@pytest.mark.parametrize("lanes", [8, 1024, 16384])
def test_no_lane_runs_alone_on_another_device(lanes, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = chosen(AutoLanes(), body_of("layer"), 0, lanes)
    assert NAMES[type(found)] == ("compact" if lanes == 16384 else "lockstep")


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda *xs: f(*xs).sum())])
@pytest.mark.parametrize("body", ["layer", "two operations", "regression"])
def test_results_are_those_of_lockstep(body, transform):
    function, size = BODIES[body]
    steps = np.array([3, 0, 7, 1])
    starts = np.ones((4, size), np.float32)

    def run(lanes):
        loop = lambda h, n: lx.fori_loop(0, n, lambda _, h: function(h), h, lanes=lanes, max_steps=7)
        return jax.jit(transform(jax.vmap(loop)))(starts, steps)

    assert_close(run("auto"), run("lockstep"), 1e-4)


@pytest.mark.parametrize(
    ("lanes", "shrink", "sizes"),
    [
        (1024, None, [1024, 512, 256, 95, 32, 8]),
        (32, None, [32, 8]),
        (16, None, [16, 4]),
        (8, None, [8]),
        (1024, 8.0, [1024, 128]),
        (1024, 3.0, [1024, 342, 114, 38]),
        (64, 8.0, [64]),
        (1, None, [1]),
        (0, None, [0]),
    ],
)
def test_stages_by_default(lanes, shrink, sizes):
    assert [stage.places for stage in stages(Compact(), lanes, shrink)] == sizes


@pytest.mark.parametrize(
    ("body", "lanes", "sizes"),
    [
        ("layer", 1024, [128, 16]),
        ("layer", 64, [64, 16, 4]),  # a step of sixteen lanes takes as long as one of four
        ("layer", 4096, [4096, 2048, 128, 16]),  # many lanes on several cores, and the others on one
        ("layer", 16384, [4096, 512, 64, 8]),  # a quarter of the lanes, on several cores as well
        ("regression", 32, [8]),  # a step that costs much is compiled once
        ("two operations", 1024, [1024, 128]),
        ("small layers", 1024, [128, 16]),
        ("smallest layers", 1024, [1024, 342, 114, 38]),
    ],
)
def test_stages_that_are_refilled(body, lanes, sizes):
    cost = step_cost(body_of(body), 0)
    found = stages(Compact(), lanes, cost.shrink, partial(cost.places, 0))
    assert [stage.places for stage in found] == sizes


def test_lanes_that_are_moved_at_large_cost_are_not():
    cost = step_cost(body_of("layer"), 0)
    assert cost.places(1000, 1024) == 128
    assert cost.places(1000_000, 1024) == 0


def test_no_stage_is_refilled_on_another_device(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [stage.places for stage in stages(Compact(), 16384, places=lambda _: 4096)] == [16384, 8192, 4096]


@pytest.mark.parametrize("order", ["lanes of gradients", "gradient of lanes"])
def test_a_gradient_chooses_as_its_loop_does(order):
    """A sweep needs less of a step: here not the product, for which the loop keeps its lanes together."""
    weights, steps, starts = 0.003 * np.ones((400, 400), np.float32), np.array([3, 9]), np.array([0.3, 0.5], np.float32)

    def last(a, n, lanes):
        body = lambda _, c: (jnp.sin(a * c[0] + 0.1), weights @ c[1] + a * c[0].sum())
        y, s = lx.fori_loop(
            0, n, body, (a * np.ones(200, np.float32), a * np.ones(400, np.float32)), kind="checkpointed", lanes=lanes
        )
        return y.sum() + s.sum()

    def slopes(lanes):
        if order == "lanes of gradients":
            return jax.jit(jax.vmap(jax.grad(partial(last, lanes=lanes))))(starts, steps)
        return jax.jit(jax.grad(lambda a: jax.vmap(partial(last, lanes=lanes))(a, steps).sum()))(starts)

    assert_close(slopes("auto"), slopes("lockstep"), 1e-4)


# ---- a hint


@pytest.mark.parametrize("counts", [[3, 3, 3, 3], np.full(1000, 7.0), [0, 0]])
def test_lanes_that_take_as_many_steps_stay_together(counts):
    assert chosen(AutoLanes(), body_of("functions"), 0, 64) == Compact()
    assert chosen(AutoLanes(counts), body_of("functions"), 0, 64) == Lockstep()


def test_lanes_of_which_one_takes_far_more_steps():
    alike, apart = AutoLanes([100] * 8), AutoLanes([1] * 63 + [1000])
    at_once, for_one = (estimates(how, body_of("layer"), 0, 64) for how in (alike, apart))
    assert at_once[Lockstep()] < estimates(AutoLanes(), body_of("layer"), 0, 64)[Lockstep()] < for_one[Lockstep()]
    assert chosen(apart, body_of("layer"), 0, 64) == Sequential()


def test_the_counts_of_a_report():
    """Their order does not count, and only so many are kept."""
    loop = lambda n: lx.fori_loop(0, n, lambda i, x: jnp.sin(x), 1.0, info=True)[1]
    counts = jnp.arange(2000) % 7
    report = lx.lane_report(jax.vmap(loop)(counts))
    assert AutoLanes(report) == AutoLanes(counts) == AutoLanes(counts[::-1])
    assert len(AutoLanes(counts).counts) <= 256
    assert repr(AutoLanes(counts)) == "AutoLanes(counts=...)"
    assert hash(AutoLanes(report)) == hash(AutoLanes(counts))


@pytest.mark.parametrize("counts", [[], [-1], [np.nan], [np.inf], 3, [[1]]])
def test_counts_that_are_none(counts):
    with pytest.raises(ValueError, match=r"AutoLanes\(counts=...\): got .*, expected a finite number from 0 on"):
        AutoLanes(counts)


@pytest.mark.parametrize("counts", ["many", [True], [1j]])
def test_counts_of_no_numbers(counts):
    with pytest.raises(TypeError, match="expected a real number for each lane"):
        AutoLanes(counts)


def test_counts_that_are_traced():
    with pytest.raises(TypeError, match=r"AutoLanes\(counts=...\)"):
        jax.jit(lambda counts: AutoLanes(counts) and counts)(jnp.ones(3))


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda *xs: f(*xs).sum())])
def test_results_with_counts_are_those_of_lockstep(transform):
    steps, starts = np.array([3, 0, 7, 1]), np.ones((4, 64), np.float32)

    def run(lanes):
        loop = lambda h, n: lx.fori_loop(0, n, lambda _, h: jnp.tanh(W @ h), h, lanes=lanes, max_steps=7)
        return jax.jit(transform(jax.vmap(loop)))(starts, steps)

    assert_close(run(AutoLanes([3, 0, 7, 1])), run("lockstep"), 1e-4)


@pytest.mark.parametrize(("rows", "is_alone"), [(5, one_function.MAKES_FUNCTIONS), (12, True)])
def test_a_linear_solve(rows, is_alone):
    """A small one of a lane alone stands in a function; for a larger one, a library takes as long for each lane."""
    unit = jnp.eye(rows, dtype=jnp.float32)
    solve = lambda h: jnp.linalg.solve(jnp.outer(h, h) + unit, jnp.linalg.solve(unit, h))
    body = jax.make_jaxpr(lambda row, h: solve(h))(0, jax.ShapeDtypeStruct((rows,), jnp.float32))
    assert (chosen(AutoLanes(), body, 0, 64) == Sequential()) == is_alone


@pytest.mark.parametrize("factorize", [jnp.linalg.cholesky, lambda a: jnp.linalg.qr(a)[1], jnp.linalg.eigvalsh])
def test_a_factorization_costs_more_than_its_numbers(factorize):
    """It is computed on one core, however many lanes there are."""
    matrix = jax.ShapeDtypeStruct((20, 20), jnp.float32)
    body = jax.make_jaxpr(lambda row, a: factorize(jnp.where(a > 9.0, 0.0, a)))(0, matrix)
    cost, of_choice = (
        step_cost(body, 0),
        step_cost(jax.make_jaxpr(lambda row, a: jnp.where(a > 9.0, 0.0, a))(0, matrix), 0),
    )
    assert cost.of_lane > 5 * of_choice.of_lane
    assert (cost.widest, of_choice.widest) == (0, 400)


def halved(h, n, lanes):
    """A loop of as many steps as are said at the start."""
    return lx.fori_loop(0, n, lambda _, h: h - 0.5 * h * h, h, lanes=lanes, max_steps=9, throw=False)


def started(h, n, lanes):
    """A loop whose steps end alike, and start at rows of their own."""
    return lx.fori_loop(9 - n, 9, lambda i, h: h - 0.1 * h * h, h, lanes=lanes, max_steps=9)


def last_rows_first(h, n, lanes):
    """A scan in reverse over as many rows as are said at the start."""
    step = lambda h, x: (h - 0.1 * x * h * h, None)
    return lx.scan(step, h, jnp.ones(9, h.dtype), length=n, reverse=True, lanes=lanes, throw=False)[0]


def backward(h, n, lanes):
    """A scan in reverse that stops by its carry."""
    step = lambda h, x: ((h[0] - 0.1 * x * h[0] * h[0], h[1] + 1), h[0])
    stop = lambda h, y: h[1] >= n
    (h, _), ys = lx.scan(step, (h, jnp.int32(0)), jnp.ones(9, h.dtype), reverse=True, lanes=lanes, stop=stop)
    return h + ys.sum()


def grown(h, n, lanes):
    """A loop that stops by its carry."""
    step = lambda h: (h[0] + 0.1 * h[0] * h[0], h[1] + 1)
    return lx.while_loop(lambda h: h[1] < n, step, (h, jnp.int32(0)), lanes=lanes, max_steps=9, throw=False)[0]


TRANSFORMS = {
    "value": lambda f: f,
    "gradient": lambda f: jax.grad(lambda *xs: f(*xs).sum()),
    "Hessian times ones": lambda f: jax.grad(lambda *xs: jax.grad(lambda *xs: f(*xs).sum())(*xs).sum()),
    "tangents": lambda f: lambda h, n: jax.jvp(lambda h: f(h, n), (h,), (jnp.ones_like(h),)),
    "gradient in checkpoint": lambda f: jax.grad(jax.checkpoint(lambda *xs: f(*xs).sum())),
    "two batches": lambda f: lambda h, n: jax.vmap(f, (0, None))(jnp.stack([h, 2 * h]), n),
}


WALKS = [halved, pytest.param(started, marks=pytest.mark.slow), last_rows_first, grown]
WALKS.append(pytest.param(backward, marks=pytest.mark.slow))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("loop", WALKS)
def test_cheap_steps_go_together_and_their_gradients_in_groups(loop, transform):
    """The value of a batch in lockstep, a gradient of those that walk alike: the numbers of steps are known there."""
    steps, starts = jnp.arange(128, dtype=jnp.int32) % 10, jnp.linspace(0.1, 1, 128, dtype=jnp.float32)
    run = lambda lanes: TRANSFORMS[transform](jax.vmap(lambda h, n: loop(h, n, lanes)))
    assert_close(jax.jit(run("auto"))(starts, steps), jax.jit(run("lockstep"))(starts, steps), 1e-5)
    of_32_lanes = "f32[32]" in str(jax.make_jaxpr(run("auto"))(starts, steps))
    assert of_32_lanes == ("gradient" in transform or "Hessian" in transform)
    alike = jax.make_jaxpr(run(AutoLanes([9] * 128)))(starts, steps)
    assert "f32[32]" not in str(alike)


def test_lanes_that_add_to_cotangents_of_their_own():
    """In a batch of gradients each lane has a cotangent of the weights that all share; one lane alone keeps it near."""
    weights = W.size * W.itemsize
    assert chosen(AutoLanes(), body_of("layer"), 0, 1024) == Compact()
    priced = of_parts(AutoLanes(), body_of("layer"), 0)
    assert chosen(of_transposed(priced, weights), body_of("layer"), 0, 1024) == Sequential()
    assert chosen(of_transposed(priced, 64), body_of("layer"), 0, 1024) == Compact()


def test_gradients_that_go_back_otherwise_than_forward():
    """Lanes walk forward in stages, and back alone: results are those of lockstep."""
    steps, starts = jnp.arange(40, dtype=jnp.int32) % 7, jnp.ones((40, 64), jnp.float32)

    def loss(w, h, n, lanes):
        return lx.fori_loop(0, n, lambda _, h: jnp.tanh(w @ h), h, lanes=lanes, max_steps=7).sum()

    def gradients(lanes):
        of_lane = jax.grad(lambda w, h, n: loss(w, h, n, lanes), (0, 1))
        return jax.jit(jax.vmap(of_lane, (None, 0, 0)))(jnp.asarray(W), starts, steps)

    assert_close(gradients("auto"), gradients("lockstep"), 1e-5)


def in_orders(of_lane):
    """Value, gradient of the batch, and batch of gradients, added up."""
    batch = jax.vmap(of_lane)
    of_batch = jax.grad(lambda h, n: batch(h, n).sum())
    return lambda h, n: batch(h, n) + of_batch(h, n) + jax.vmap(jax.grad(lambda h, n: of_lane(h, n).sum()))(h, n)


STEPS_OF_LANES, STARTS = np.arange(128, dtype=np.int32) % 10, np.linspace(0.1, 1, 128, dtype=np.float32)
costly = lambda h, n, lanes: lx.fori_loop(
    0, n, lambda _, h: jnp.tanh(W @ (h * W[0])).sum(), h, lanes=lanes, max_steps=9
)


@pytest.mark.parametrize("loop", [halved, grown, costly])
def test_lanes_on_several_devices_stay_together(loop):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("d"))) for x in (STARTS, STEPS_OF_LANES)]
        found = in_orders(lambda h, n: loop(h, n, "auto"))(*given)
    assert_close(found, in_orders(lambda h, n: loop(h, n, "lockstep"))(STARTS, STEPS_OF_LANES), 1e-5)


def test_lanes_that_communicate_with_others_stay_together():
    """Over the axis of a map around theirs, whose lanes all take the same steps."""

    def lane(lanes):
        step = lambda _, h: h - 0.1 * jax.lax.psum(h, "outer") * h
        return lambda h, n: lx.fori_loop(0, n, step, h, lanes=lanes, max_steps=9)

    def run(lanes):
        batch = lambda h: jax.vmap(lane(lanes))(h, STEPS_OF_LANES)
        outer = jax.vmap(batch, axis_name="outer")
        back = jax.vmap(jax.grad(lambda h: batch(h).sum()), axis_name="outer")
        return lambda h: outer(h) + jax.grad(lambda h: outer(h).sum())(h) + back(h)

    twice = np.stack([STARTS, 2 * STARTS])
    assert_close(run("auto")(twice), run("lockstep")(twice), 1e-5)


@pytest.mark.parametrize("loop", [halved, grown])
def test_batches_of_a_symbolic_number(loop):
    (size,) = jax.export.symbolic_shape("size")
    run = lambda lanes: jax.vmap(in_orders(lambda h, n: loop(h, n, lanes)))
    types = (jax.ShapeDtypeStruct((size, 128), dtype) for dtype in (jnp.float32, jnp.int32))
    exported = jax.export.export(jax.jit(run("auto")))(*types)
    given = np.stack([STARTS, 2 * STARTS]), np.stack([STEPS_OF_LANES] * 2)
    assert_close(exported.call(*given), run("lockstep")(*given), 1e-5)
