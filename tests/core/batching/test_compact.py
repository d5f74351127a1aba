"""`Compact`: finished lanes leave the batch, and nothing else changes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import loopax as lx
from tests.core.batching.counting import LaneCounter, alone
from tests.core.lowering.test_memory import temporary
from tests.support.problem import BOUND, KINDS, LOOPS, W, name_of
from tests.support.reference import assert_close

LANES = 9
COMPACT = lx.Compact(
    shrink=2, min_lanes=2
)  # 9 lanes: groups of 2, 3, 3 and 3 (two places are left), or stages of 9, 5, 3 and 2
RANDOM = np.random.RandomState(3)
COUNTS = jnp.array([3, 0, BOUND, 1, 5, BOUND, 2, 7, 4])
OWN = (
    jnp.asarray(RANDOM.randn(LANES, 3, 3)) * 0.4,
    jnp.asarray(RANDOM.randn(LANES, 3)),
    jnp.asarray(RANDOM.randn(LANES, BOUND, 3)),
    COUNTS,
)
SHARED_WEIGHTS = (None, 0, 0, 0)
# Groups ("scan", "fori", "reverse") and stages (the others) do not depend on what is stored, and kinds do not depend
# on how lanes run: each loop with one kind, each kind in groups and in stages.
CASES = [
    ("scan", KINDS[0]),
    ("fori", KINDS[1]),
    ("reverse", KINDS[3]),
    ("scan", KINDS[2]),
    ("while", KINDS[0]),
    ("stop", KINDS[1]),
    ("reverse_stop", KINDS[2]),
    ("while", KINDS[3]),
]


def spread_over_lanes(program):
    """A program of shared weights as one of equal weights of all lanes, whose gradients are those of each lane."""
    weights = jnp.arange(1.0, LANES + 1)
    return lambda w, h, xs, n: weights @ jax.vmap(program, SHARED_WEIGHTS)(w, h, xs, n)


@pytest.mark.parametrize(("loop", "kind"), CASES, ids=name_of)
def test_values_and_gradients_are_those_of_each_lane(loop, kind):
    program = LOOPS[loop][0]
    value_and_grad = jax.value_and_grad(program(kind, lanes=COMPACT), (0, 1, 2))
    wanted = alone(jax.value_and_grad(program(kind), (0, 1, 2)), *OWN)
    assert_close(jax.jit(jax.vmap(value_and_grad))(*OWN), wanted)

    outside = jax.grad(lambda w, h, xs: jax.vmap(program(kind, lanes=COMPACT))(w, h, xs, COUNTS).sum(), (0, 1, 2))
    assert_close(jax.jit(outside)(*OWN[:3]), wanted[1])


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_gradient_of_shared_weights(loop):
    program = LOOPS[loop][0]
    gradient = jax.jit(jax.grad(spread_over_lanes(program(lx.Checkpointed(), lanes=COMPACT)), (0, 1, 2)))
    lanes = alone(lambda h, xs, n: jax.grad(program(lx.Checkpointed()), (0, 1, 2))(W, h, xs, n), *OWN[1:])
    weights = jnp.arange(1.0, LANES + 1)
    w, h, xs = (weights.reshape(-1, *(1,) * (g.ndim - 1)) * g for g in lanes)
    assert_close(gradient(W, *OWN[1:]), (w.sum(0), h, xs))


def logistic(lanes, kind=None, unknown=False):
    """A small loop for many derivatives: `n` steps of x <- a x (1 - x)."""
    kind = lx.Checkpointed() if kind is None else kind

    def f(a, x, n):
        body = lambda x: a * x * (1.0 - x)
        if unknown:
            far = lambda c: c[1] < n
            return lx.while_loop(far, lambda c: (body(c[0]), c[1] + 1), (x, 0), max_steps=6, kind=kind, lanes=lanes)[0]
        return lx.fori_loop(0, n, lambda _, x: body(x), x, max_steps=6, kind=kind, lanes=lanes)

    return f


A, X, N = jnp.linspace(1.1, 3.5, 7), jnp.linspace(0.2, 0.7, 7), jnp.array([2, 6, 0, 1, 3, 1, 5])


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
def test_higher_derivatives_in_any_order(unknown):
    f, g = logistic(COMPACT, unknown=unknown), logistic("lockstep", unknown=unknown)
    hessian = alone(jax.hessian(g, (0, 1)), A, X, N)
    assert_close(jax.jit(jax.vmap(jax.hessian(f, (0, 1))))(A, X, N), hessian)
    assert_close(jax.jit(jax.vmap(jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1))))(A, X, N), hessian)
    total = lambda a, x: jax.vmap(f)(a, x, N).sum()
    outer = jax.jit(jax.hessian(total, (0, 1)))(A, X)
    assert_close(jax.tree.map(jnp.diagonal, outer), hessian)
    tangents = jax.jit(lambda a, x: jax.jvp(lambda a, x: jax.vmap(f)(a, x, N), (a, x), (a, x))[1])(A, X)
    first = alone(jax.grad(g, (0, 1)), A, X, N)
    assert_close(tangents, first[0] * A + first[1] * X)
    _, linear = jax.linearize(lambda a, x: jax.vmap(f)(a, x, N), A, X)
    assert_close(linear(A, X), tangents)
    again = jax.jit(jax.grad(jax.checkpoint(total), (0, 1)))(A, X)
    assert_close(again, first)
    of_grads = jax.grad(lambda a: jax.vmap(jax.grad(f, 1))(a, X, N).sum())
    assert_close(jax.jit(of_grads)(A), hessian[0][1])


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
def test_a_batch_in_the_body_of_a_loop(unknown):
    """Its steps are known to the outer loop's division, though they stand in an equation with what is not."""

    def total(lanes):
        f = logistic(lanes, unknown=unknown)
        step = lambda _, x: jnp.tanh(jax.vmap(f)(A, x, N))
        return lambda x: lx.fori_loop(0, 2, step, x, kind=lx.Residuals()).sum()

    assert_close(jax.jit(jax.grad(total(COMPACT)))(X), jax.jit(jax.grad(total("lockstep")))(X))


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
def test_a_second_vmap_joins_the_batch(unknown):
    f, g = logistic(COMPACT, unknown=unknown), logistic("lockstep", unknown=unknown)
    a, n = jnp.stack([A] * 3, 1), jnp.stack([N, N + 1, N + 2], 1) % 7
    twice = jax.vmap(jax.vmap(jax.value_and_grad(f, (0, 1))), (0, None, 0))
    wanted = alone(lambda a, n: alone_rows(jax.value_and_grad(g, (0, 1)), a, X[:3], n), a, n)
    assert_close(jax.jit(twice)(a, X[:3], n), wanted)
    sizes = [eqn.params["axis"].size for eqn in batches(jax.make_jaxpr(twice)(a, X[:3], n).jaxpr)]
    assert sizes
    assert set(sizes) == {21}


def alone_rows(function, *rows):
    return jax.tree.map(lambda *v: jnp.stack(v), *[function(*row) for row in zip(*rows, strict=True)])


def batches(jaxpr):
    """The batches of a program, wherever they are."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "compact_vmap":
            yield eqn
        else:
            for value in eqn.params.values():
                yield from batches(value.jaxpr) if hasattr(value, "jaxpr") else ()


def test_large_weights_are_not_repeated_to_join_a_batch():
    """An ensemble of large models over a batch: each model has lanes of its own."""

    def f(w, x, n):
        return lx.fori_loop(0, n, lambda _, x: jnp.tanh(w @ x), x, max_steps=6, lanes=COMPACT).sum()

    models, x = jnp.stack([jnp.eye(60)] * 3), jnp.ones((7, 60))
    twice = jax.vmap(jax.vmap(f, (None, 0, 0)), (0, None, None))
    sizes = {eqn.params["axis"].size for eqn in batches(jax.make_jaxpr(twice)(models, x, N).jaxpr)}
    assert 21 not in sizes
    assert_close(jax.jit(twice)(models, x, N)[1], jax.jit(jax.vmap(f, (None, 0, 0)))(jnp.eye(60), x, N))


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 6), min_size=7, max_size=7), unknown=st.booleans())
def test_any_counts(counts, unknown):
    n = jnp.array(counts)
    assert_close(ANY[unknown, COMPACT](A, X, n), ANY[unknown, "lockstep"](A, X, n))


ANY = {
    (unknown, lanes): jax.jit(jax.vmap(jax.value_and_grad(logistic(lanes, unknown=unknown))))
    for unknown in (False, True)
    for lanes in (COMPACT, "lockstep")
}


@pytest.mark.parametrize(("lanes", "shrink", "min_lanes"), [(1, 2, 1), (2, 2, 1), (7, 2.5, 3), (13, 4, 1), (20, 2, 3)])
def test_any_sizes(lanes, shrink, min_lanes):
    """Rows that are read and written, in the order of the lanes."""
    rows = jnp.arange(lanes * 4.0).reshape(lanes, 4)

    def run(counts, compact, stops):
        def f(xs, n):
            stop = (lambda c, _: c[1] >= n - 1) if stops else None
            length = jnp.where(n > 0, 4, 0) if stops else n
            step = lambda c, x: ((c[0] + x, c[1] + 1), c[0] * x)
            return lx.scan(step, (0.0, 0), xs, length=length, lanes=compact, stop=stop)

        return jax.vmap(f)(rows, counts)

    compiled = {
        (compact, stops): jax.jit(partial(run, compact=compact, stops=stops))
        for compact in (lx.Compact(shrink, min_lanes), "lockstep")
        for stops in (False, True)
    }
    for seed in range(5):
        counts = jnp.asarray(np.random.RandomState(seed).randint(0, 5, lanes))
        for stops in (False, True):
            assert_close(*(f(counts) for (_, chosen), f in compiled.items() if chosen == stops))


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
def test_what_is_evaluated_is_what_the_report_says(unknown):
    counter, counts = LaneCounter(), jnp.asarray(np.random.RandomState(0).geometric(0.1, 50))
    compact = lx.Compact(2, 4)

    def f(n):
        step = lambda x: counter(x) + 1.0
        if unknown:
            return lx.while_loop(lambda x: x < n.astype(float), step, 0.0, lanes=compact)
        return lx.fori_loop(0, n, lambda _, x: step(x), 0.0, lanes=compact)

    report = lx.lane_report(counts, lanes=compact)
    stretches = report.stages if unknown else report.groups
    wanted = sum(len(s.active) for s in stretches), sum(s.lane_steps for s in stretches)
    assert counter.of(jax.jit(jax.vmap(f)), counts) == wanted
    assert wanted[1] < 0.6 * sum(s.lane_steps for s in report.lockstep)


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
@pytest.mark.parametrize("inside", [True, False], ids=["vmap_of_grad", "grad_of_vmap"])
def test_gradients_gain_as_values_do(unknown, inside):
    counter, counts = LaneCounter(), jnp.asarray(np.random.RandomState(0).geometric(0.1, 50))
    compact = lx.Compact(2, 4)

    def f(x, n):
        step = lambda x: jnp.sin(x) + counter(x)
        if unknown:
            body = lambda c: (step(c[0]), c[1] + 1)
            return lx.while_loop(
                lambda c: c[1] < n, body, (x, 0), max_steps=100, kind=lx.Checkpointed(), lanes=compact
            )[0]
        return lx.fori_loop(0, n, lambda _, x: step(x), x, max_steps=100, kind=lx.Checkpointed(), lanes=compact)

    inner = jax.vmap(jax.grad(f))
    outer = jax.grad(lambda x, n: jax.vmap(f)(x, n).sum())
    _, found = counter.of(jax.jit(inner if inside else outer), jnp.ones(50), counts)
    report = lx.lane_report(counts, lanes=compact)
    stretches = report.stages if unknown and not inside else report.groups
    steps = sum(s.lane_steps for s in stretches)
    # Forward and two replays; a batch of gradients walks forward once more, in groups (its values may be in stages).
    forward = sum(s.lane_steps for s in report.stages) if unknown else steps
    assert found <= (forward + 3 * steps if inside else 3 * steps)


def test_memory_of_a_gradient():
    """Groups store what lockstep does, but the states of a block for one group only; stages a third more."""
    y, n = jnp.ones((1024, 16)), jnp.arange(1024) % 100

    def memory(lanes, unknown):
        def f(y, n):
            body = lambda c: (jnp.tanh(c[0]), c[1] + 1)
            goes_on = lambda c: c[1] < n
            kind = lx.Checkpointed()
            if unknown:
                return lx.while_loop(goes_on, body, (y, 0), max_steps=400, throw=False, kind=kind, lanes=lanes)[0].sum()
            step = lambda _, y: jnp.tanh(y)
            return lx.fori_loop(0, n, step, y, max_steps=400, throw=False, kind=kind, lanes=lanes).sum()

        gradient = jax.grad(lambda y: jax.vmap(f)(y, n).sum())
        return temporary(gradient, y)

    assert memory("compact", unknown=False) < 0.75 * memory("lockstep", unknown=False)
    assert memory("compact", unknown=True) < 1.35 * memory("lockstep", unknown=True)


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
def test_auto_shares_its_memory_among_the_parts(unknown):
    """So all of them together store no more than one loop would."""
    f = logistic(COMPACT, lx.Auto(memory=7 * 8 * 6), unknown)
    gradient = jax.jit(jax.grad(lambda x: jax.vmap(f)(A, x, N).sum()))
    assert_close(gradient(X), alone(jax.grad(logistic("lockstep"), 1), A, X, N))
    small = logistic(COMPACT, lx.Auto(memory=8), unknown)
    with pytest.raises(ValueError, match=r"Auto\(memory=8\).*at least one carry"):
        jax.make_jaxpr(jax.grad(lambda x: jax.vmap(small)(A, x, N).sum()))(X)


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
def test_a_finished_lane_leaves_its_domain_in_nobodys_sight(unknown):
    """sqrt(x - 0.5) after the end, and an error where the body is evaluated there."""
    starts = jnp.array([1.5, 10.2, 0.2, 5.5, 1.9])

    def f(x):
        n = jnp.where(x > 1.0, jnp.ceil(x - 1.0), 0).astype(int)

        def body(x):
            x = eqx.error_if(x, x < 0.5, "evaluated after the end")
            return x - 1.0 + 0.0 * jnp.sqrt(x - 0.5)

        if unknown:
            return lx.while_loop(lambda x: x > 1.0, body, x, max_steps=20, lanes=lx.Compact(2, 1))
        return lx.fori_loop(0, n, lambda _, x: body(x), x, max_steps=20, lanes=lx.Compact(2, 1))

    with jax.debug_nans(True):
        assert_close(eqx.filter_jit(jax.vmap(jax.grad(f)))(starts), jnp.ones(5))
        assert_close(eqx.filter_jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(starts), jnp.ones(5))


def test_effects_of_lanes_happen_once(capfd):
    def f(n):
        def body(i, x):
            jax.debug.print("lane {n} step {i}", n=n, i=i)
            return x + 1.0

        return lx.fori_loop(0, n, body, 0.0, max_steps=4, lanes=lx.Compact(2, 1))

    jax.block_until_ready(jax.jit(jax.vmap(f))(jnp.array([2, 0, 1])))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == ["lane 1 step 0", "lane 2 step 0", "lane 2 step 1"]


def test_keys_are_those_of_the_steps():
    def f(key, n, lanes):
        draw = lambda x, key: x + jax.random.normal(key)
        return lx.while_loop(lambda x: jnp.abs(x) < n, draw, 0.0, key=key, max_steps=30, throw=False, lanes=lanes)

    keys, n = jax.random.split(jax.random.key(0), 6), jnp.array([1.0, 0.1, 3.0, 0.0, 2.0, 1.5])
    compact, lockstep = (jax.vmap(lambda k, n, lanes=lanes: f(k, n, lanes))(keys, n) for lanes in (COMPACT, "lockstep"))
    assert compact.tolist() == lockstep.tolist()


def test_info_and_limits_are_those_of_each_lane():
    def f(n):
        loop = lambda lanes: lx.while_loop(
            lambda i: i < n, lambda i: i + 1, 0, max_steps=5, throw=False, info=True, lanes=lanes
        )
        return loop(COMPACT), loop("lockstep")

    compact, lockstep = jax.vmap(f)(jnp.array([3, 9, 0, 5, 6]))
    assert jax.tree.map(lambda x: x.tolist(), compact) == jax.tree.map(lambda x: x.tolist(), lockstep)
    stopped = lambda n: lx.while_loop(lambda i: i < n, lambda i: i + 1, 0, max_steps=5, lanes=COMPACT)
    with pytest.raises(eqx.EquinoxRuntimeError, match="max_steps=5 stopped"):
        jax.block_until_ready(eqx.filter_jit(jax.vmap(stopped))(jnp.array([3, 9, 0])))


def test_a_loop_that_is_not_batched_is_as_it_is_without():
    f, g = logistic(COMPACT), logistic("lockstep")
    same = [str(jax.make_jaxpr(jax.grad(h))(2.0, 0.3, 4)).replace(repr(COMPACT.stages), "None") for h in (f, g)]
    assert same[0] == same[1]


def test_without_jit():
    f, g = logistic(COMPACT), logistic("lockstep")
    with jax.disable_jit():
        assert_close(jax.vmap(jax.grad(f))(A, X, N), jax.vmap(jax.grad(g))(A, X, N))


@pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])
def test_lanes_over_devices(unknown):
    """Each device has a batch of its own."""
    mesh = jax.make_mesh((2,), ("lanes",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("lanes")
    f = jax.vmap(logistic(COMPACT, unknown=unknown))
    # With `check_vma`, JAX refuses batches whose lengths vary over devices, in lockstep too.
    over_devices = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    a, x, n = (jnp.concatenate([v, v[:3]]) for v in (A, X, N))
    assert_close(jax.jit(over_devices)(a, x, n), jax.jit(f)(a, x, n))


def test_collectives_over_the_lanes_are_refused():
    f = lambda n: lx.fori_loop(0, n, lambda _, x: x + jax.lax.psum(x, "lanes"), 0.0, lanes=COMPACT)
    with pytest.raises(NotImplementedError, match="communicates over the mapped axis 'lanes'"):
        jax.vmap(f, axis_name="lanes")(N)


def test_collectives_over_the_lanes_of_a_second_vmap_are_refused():
    f = lambda n: lx.fori_loop(0, n, lambda _, x: x + jax.lax.psum(x, "outer"), 0.0, lanes=COMPACT)
    with pytest.raises(NotImplementedError, match="communicates over the mapped axis 'outer'"):
        jax.vmap(jax.vmap(f), axis_name="outer")(N[:, None])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shrink": 1.5}, ValueError, "Compact(shrink=...): got 1.5, expected at least 2"),
        ({"shrink": float("nan")}, ValueError, "expected at least 2"),
        ({"shrink": "2"}, TypeError, "expected a number from 2 on"),
        ({"shrink": True}, TypeError, "expected a number from 2 on"),
        ({"min_lanes": 0}, ValueError, "Compact(min_lanes=...): got 0, expected at least 1"),
        ({"min_lanes": 2.5}, TypeError, "expected an int, the number of lanes"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error) as raised:
        lx.Compact(**options)
    assert message in str(raised.value)


def test_no_lanes():
    f = lambda x, n: lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, max_steps=3, lanes="compact")
    assert jax.vmap(jax.grad(f))(jnp.zeros(0), jnp.zeros(0, int)).shape == (0,)


def test_a_symbolic_batch_is_refused():
    (b,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b,), dtype) for dtype in (A.dtype, X.dtype, N.dtype)]
    with pytest.raises(NotImplementedError, match="the batch has b lanes, a symbolic dimension"):
        export.export(jax.jit(jax.vmap(logistic(COMPACT))))(*shapes)
