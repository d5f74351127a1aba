"""`Free`: a loop in a loop as one, in which lanes do not wait for each other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loopax as lx
from tests.core.batching.counting import LaneCounter, alone
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close

LANES = 6
W = np.linspace(0.2, 0.9, LANES)
X = np.random.RandomState(0).randn(LANES, 3)
OUTER = np.array([3, 0, 5, 1, 4, 2])
INNER = np.array([0, 1, 2, 3, 4, 9])


def inner_while(w, h, steps, kind):
    body = lambda c: (jnp.tanh(w * c[0] + 0.1 * c[1]), c[1] + 1)
    return lx.while_loop(lambda c: c[1] < steps, body, (h, 0), max_steps=4, kind=kind)[0]


def inner_scan(w, h, steps, kind):
    """Reads rows that depend on the outer step, and writes some."""
    h, ys = lx.scan(lambda h, x: (jnp.tanh(w * h + x), h * x), h, jnp.arange(1.0, 5.0) * w, length=steps, kind=kind)
    return h + ys.sum(0)


def nested(inner, outer, kind, lanes):
    """A program of (w, x, outer steps, inner steps)."""

    def f(w, x, outer_steps, inner_steps):
        def step(h, k):
            h = inner(w, jnp.sin(h) + jnp.asarray(k, float) * 0.1, (inner_steps + k) % 4, kind)
            return h * 1.1 + w

        if outer == "fori":
            return lx.fori_loop(0, outer_steps, lambda k, h: step(h, k), x, max_steps=5, kind=kind, lanes=lanes).sum()
        if outer == "while":
            body = lambda c: (step(*c), c[1] + 1)
            going = lambda c: c[1] < outer_steps
            return lx.while_loop(going, body, (x, 0), max_steps=5, kind=kind, lanes=lanes)[0].sum()
        rows = (jnp.arange(5), jnp.arange(5.0) * w)
        row = lambda h, x: (step(h, x[0]) + x[1], h)
        h, ys = lx.scan(row, x, rows, length=outer_steps, kind=kind, lanes=lanes, reverse=outer == "reverse")
        return h.sum() + (ys**2).sum()

    return f


def by_itself(inner, outer):
    """A lane alone. What it gives does not depend on the kind."""
    return nested(inner, outer, lx.Residuals(), "lockstep")


# Flattening does not depend on the kind: each outer form, each inner form, and each kind.
CASES = [
    (inner_while, "fori", KINDS[0]),
    (inner_while, "while", KINDS[1]),
    (inner_scan, "scan", KINDS[0]),
    (inner_while, "reverse", KINDS[3]),
    (inner_scan, "fori", KINDS[2]),
]


@pytest.mark.parametrize(("inner", "outer", "kind"), CASES, ids=name_of)
def test_values_and_gradients_are_those_of_nested_loops(inner, outer, kind):
    f = nested(inner, outer, kind, "free")
    wanted = alone(jax.value_and_grad(by_itself(inner, outer), (0, 1)), W, X, OUTER, INNER)

    def total(w, x):
        values = jax.vmap(f)(w, x, OUTER, INNER)
        return values.sum(), values

    (_, values), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(W, X)
    assert_close((values, gradients), wanted)


@pytest.mark.slow
def test_higher_derivatives():
    small = lambda f: lambda w, n, m: f(w, np.full(3, 0.3), n, m)
    f, g = small(nested(inner_while, "fori", lx.Checkpointed(), "free")), small(by_itself(inner_while, "fori"))
    hessian, gradient = alone(lambda *lane: (jax.hessian(g)(*lane), jax.grad(g)(*lane)), W, OUTER, INNER)

    @jax.jit
    def found(w):
        total = lambda w: jax.vmap(f)(w, OUTER, INNER).sum()
        return jax.vmap(jax.hessian(f))(w, OUTER, INNER), jax.grad(jax.checkpoint(total))(w)

    assert_close(found(W), (hessian, gradient))


def counts_program(counter, lanes):
    """Nested loops with given numbers of inner steps, rows of them for the outer steps."""

    def f(x, counts, length):
        def step(x, n):
            x, info = lx.while_loop(
                lambda c: c[1] < n, lambda c: (jnp.sin(c[0]) + counter(x), c[1] + 1), (x, 0), info=True
            )
            return x[0], info.num_steps

        return lx.scan(step, x, counts, length=length, lanes=lanes, info=True)

    return f


COUNTER = LaneCounter()
FREE, LOCKSTEP = (jax.jit(jax.vmap(counts_program(COUNTER, lanes))) for lanes in ("free", "lockstep"))


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=5, max_size=5), st.data())
def test_iterations_are_those_of_the_report(counts, data):
    rows = np.array(counts)
    lengths = np.array(data.draw(st.lists(st.integers(0, 4), min_size=5, max_size=5)))
    args = (np.linspace(0.1, 0.9, 5), rows, lengths)
    (free, info), (lockstep, _) = FREE(*args), LOCKSTEP(*args)
    assert_close(free, lockstep)
    report = lx.lane_report(info, free[1])
    assert report.free is not None
    assert report.nested is not None
    own = [row[:n] for row, n in zip(np.array(counts), np.array(lengths), strict=True)]
    most = max(int(lane.sum()) for lane in own)
    iterations, _ = COUNTER.of(FREE, *args)
    assert iterations <= report.free.iterations <= most + int(lengths.max())
    # The inner body runs in every iteration but those in which all lanes take an outer step without inner ones.
    assert iterations >= most
    assert COUNTER.of(LOCKSTEP, *args)[0] == report.nested.iterations


def test_a_lane_leaves_no_domain_while_it_waits():
    """Before, in and after the inner loop, values of other lanes at that time would be errors or not numbers."""

    def f(x):
        def body(x):
            x = eqx.error_if(x, x < 0.5, "outer step after the end")
            inner = lambda y: eqx.error_if(y, y < 0.2, "inner step after the end") - 0.25
            x = lx.while_loop(lambda y: y > x - 0.6, inner, x)
            return x + 0.0 * jnp.sqrt(x - 0.05)

        return lx.while_loop(lambda x: x > 1.0, body, x, lanes="free", max_steps=40)

    starts = np.array([1.5, 6.2, 0.2, 3.9])
    with jax.debug_nans(True):
        gradients = eqx.filter_jit(jax.vmap(jax.value_and_grad(f)))(starts)
    assert_close(gradients, alone(jax.value_and_grad(f), starts))


# Nests: several loops, in each other, in branches and in a `jit`.


def nest(kind, lanes):
    """A program of (w, x, n), in which each lane takes other numbers of steps at each level."""

    def innermost(x, w, length):
        body = lambda c: (jnp.sin(w * c[0]) + 0.1, c[1] + 1)
        return lx.while_loop(lambda c: c[1] < length, body, (x, 0), max_steps=4)[0]

    def middle(x, w, length):
        def body(j, x):
            x = jax.jit(innermost)(x, w, (3 * j + length) % 4)
            shrunk = lambda x: lx.fori_loop(0, (length + j) % 3, lambda _, x: 0.9 * x, x, max_steps=2)
            return lx.cond(x.sum() > 1.0, shrunk, lambda x: x + 0.2, x)

        return lx.fori_loop(0, length, body, x, max_steps=4)

    def f(w, x, n):
        def step(x, row):
            x = middle(jnp.cos(x), w, (n + row[0]) % 5)
            y, rows = lx.scan(lambda y, r: (y * 0.9 + r, y), x, row[1] * jnp.arange(3.0), length=n % 4)
            z = lx.switch(n % 3, [lambda x: x, lambda x: innermost(x, w, n % 2), lambda x: x * w], y)
            return z + rows.sum(0), (x, y)

        rows = jnp.arange(5), jnp.linspace(0.1, 0.5, 5)
        x, (a, b) = lx.scan(step, x, rows, length=n, kind=kind, lanes=lanes)
        return x.sum() + (a * b).sum()

    return f


NUMBERS = np.array([3, 0, 5, 1, 4, 2])


@pytest.mark.parametrize("kind", ["auto", lx.Checkpointed(4)])
def test_nests(kind):
    f, alone_f = nest(kind, "free"), nest("auto", "lockstep")
    wanted = alone(jax.value_and_grad(alone_f, (0, 1)), W, X, NUMBERS)
    dots = np.ones_like(W), np.ones_like(X)

    def total(w, x):
        values = jax.vmap(f)(w, x, NUMBERS)
        return values.sum(), values

    @jax.jit
    def found(w, x):
        (_, values), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(w, x)
        _, tangents = jax.jvp(lambda w, x: jax.vmap(f)(w, x, NUMBERS), (w, x), dots)
        return (values, gradients), jax.vmap(jax.value_and_grad(f, (0, 1)))(w, x, NUMBERS), tangents

    of_batch, each, tangents = found(W, X)
    assert_close(of_batch, wanted)
    assert_close(each, wanted)
    assert_close(tangents, wanted[1][0] + wanted[1][1].sum(-1))


@pytest.mark.slow
def test_second_derivatives_of_a_nest():
    f, alone_f = nest("auto", "free"), nest("auto", "lockstep")
    of_one = lambda f: lambda w, n: jax.hessian(f)(w, np.full(2, 0.3), n)
    assert_close(jax.jit(jax.vmap(of_one(f)))(W, NUMBERS), alone(of_one(alone_f), W, NUMBERS))


def test_a_nest_takes_as_many_steps_as_the_lane_with_the_most():
    """Of the innermost loop; an outer step without one counts as one."""
    lengths = np.random.RandomState(0).randint(0, 5, (8, 3, 4))

    def f(x, lengths):
        def innermost(x, length):
            body = lambda _, x: jnp.sin(x) + COUNTER(x)
            return lx.fori_loop(0, length, body, x), None

        middle = lambda x, lengths: (lx.scan(innermost, x, lengths, length=lengths[0])[0], None)
        return lx.scan(middle, x, lengths, lanes="free")[0]

    batch, starts = jax.jit(jax.vmap(f)), np.linspace(0.1, 0.9, 8)
    iterations, _ = COUNTER.of(batch, starts, lengths)
    steps = [[lane[i, : lane[i, 0]] for i in range(3)] for lane in lengths]
    least = max(sum(int(inner.sum()) for inner in lane) for lane in steps)
    most = max(sum(max(1, int(np.maximum(inner, 1).sum())) for inner in lane) for lane in steps)
    assert least <= iterations <= most


def test_a_loop_without_steps_takes_one_of_the_single_loop():
    """Which then goes on to the next loop. The others take all steps that their bounds allow."""

    def f(x, n):
        def step(x, _):
            x = lx.while_loop(lambda x: x > 99.0, lambda x: x, x, max_steps=0)
            often = lambda _, x: lx.fori_loop(0, n, lambda _, x: x + 1.0, x, max_steps=2)
            return lx.fori_loop(0, n, often, x, max_steps=2), None

        return lx.scan(step, x, None, 3, lanes="free")[0]

    assert_close(jax.jit(jax.vmap(f))(np.array([0.5, 0.7]), np.array([2, 1])), np.array([12.5, 3.7]))


def test_a_finished_lane_of_a_nest_says_nothing():
    """What it would print, and errors that it would raise."""
    said = []

    def f(n):
        def body(i, x):
            jax.debug.callback(lambda i, n: said.append((int(n), int(i))), i, n)
            x = eqx.error_if(x, i >= n, "a step after the end")
            return lx.fori_loop(0, i % 3, lambda _, x: x + 1.0, x)

        return lx.fori_loop(0, n, body, 0.0, lanes="free")

    jax.block_until_ready(jax.jit(jax.vmap(f))(np.array([2, 0, 4])))
    jax.effects_barrier()
    assert sorted(said) == [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)]


def inner(x, **options):
    return lx.while_loop(lambda x: x < 2.0, lambda x: x + 1.0, x, **options)


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (lambda x: x + 1.0, {}, r"this body holds none\. .*Write lanes='compact'"),
        (
            lambda x: jax.lax.cond(x > 1.0, inner, lambda x: x + 1.0, x),
            {},
            r"the while_loop at .*test_nested_lanes.py:\d+ stands in a `cond`, .*rewrite_loops",
        ),
        (lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, None, 2)[0], {}, r"stands in a `scan`"),
        # A kind that stores every step needs bounds of all.
        (inner, {"max_steps": 3, "kind": "bounded"}, "Give `max_steps=` to each loop"),
        (
            lambda x: inner(x, kind=lx.Lax()),
            {},
            r"the while_loop at .*test_nested_lanes.py:\d+ has kind=Lax\(\), and stands in a loop",
        ),
        (lambda x: inner(x, kind=lx.Checkpointed(3)), {"kind": lx.Checkpointed(4)}, "or give both loops the same"),
        (lambda x: inner(x, lanes="compact"), {}, r"has lanes=Compact\("),
    ],
)
def test_other_forms_are_refused(body, options, message):
    with pytest.raises(ValueError, match=message):
        lx.while_loop(lambda x: x < 3.0, body, 0.0, lanes="free", **options)


def test_devices_whose_lanes_differ():
    """A limit in an inner loop depends on a row, which varies over devices as lanes do, and on what varies anyway."""

    def f(w, n, lanes):
        inner = lambda i, x: lx.fori_loop(0, n + i, lambda _, x: jnp.sin(w * x) + 0.1, x, max_steps=8)
        return lx.fori_loop(0, n, inner, 0.5 + 0.0 * n.astype(float), max_steps=4, lanes=lanes)

    mesh, rows = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec("d")
    batch = jax.vmap(f, (None, 0, None))
    free, specs = lambda w, n: batch(w, n, "free"), (jax.sharding.PartitionSpec(), rows)
    spread = jax.shard_map(free, mesh=mesh, in_specs=specs, out_specs=rows)
    numbers = np.arange(4)
    of = lambda g: jax.jit(jax.value_and_grad(lambda w: (g(w, numbers) ** 2).sum()))(0.8)
    assert_close(of(spread), of(lambda w, n: batch(w, n, "lockstep")))
