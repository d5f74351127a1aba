"""`Compact`: finished lanes leave the batch. All that is of each lane stays so; costs fall."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import loopax as lx
from tests.core.batching.counting import LaneCounter
from tests.core.batching.logistic import COMPACT, A, N, X, logistic, logistic_expected
from tests.support.compiled import temporary
from tests.support.reference import assert_close

EACH_FORM = pytest.mark.parametrize("unknown", [False, True], ids=["groups", "stages"])


@EACH_FORM
def test_a_second_vmap_joins_the_batch(unknown):
    f = logistic(COMPACT, unknown=unknown)
    a, n = np.stack([A] * 3, 1), np.stack([N, N + 1, N + 2], 1) % 7
    twice = jax.jit(jax.vmap(jax.vmap(jax.value_and_grad(f, (0, 1))), (0, None, 0)))
    values, slopes, _ = logistic_expected(a, np.stack([X[:3]] * 7), n)
    assert_close(twice(a, X[:3], n), (values, slopes))
    sizes = [eqn.params["axis"].size for eqn in batches(jax.make_jaxpr(twice)(a, X[:3], n).jaxpr)]
    assert sizes
    assert set(sizes) == {21}


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

    models, x = np.stack([np.eye(60)] * 3), np.ones((7, 60))
    twice = jax.vmap(jax.vmap(f, (None, 0, 0)), (0, None, None))
    sizes = {eqn.params["axis"].size for eqn in batches(jax.make_jaxpr(twice)(models, x, N).jaxpr)}
    assert 21 not in sizes
    one = 60 * np.array([ft.reduce(lambda x, _: np.tanh(x), range(n), 1.0) for n in N])
    assert_close(jax.jit(twice)(models, x, N), np.stack([one] * 3))


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 6), min_size=7, max_size=7), unknown=st.booleans())
def test_any_counts(counts, unknown):
    values, (slopes, _), _ = logistic_expected(A, X, counts)
    assert_close(ANY[unknown](A, X, np.array(counts)), (values, slopes))


ANY = {unknown: jax.jit(jax.vmap(jax.value_and_grad(logistic(COMPACT, unknown=unknown)))) for unknown in (False, True)}


SIZES = [(1, 2, 1), (7, 2.5, 3), (20, 2, 3)]
SIZES += [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2, 1), (13, 4, 1))]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("lanes", "shrink", "min_lanes"), SIZES)
def test_any_sizes(lanes, shrink, min_lanes, reverse):
    """Rows that are read and written, in the order of the lanes."""
    rows = np.arange(lanes * 4.0).reshape(lanes, 4)

    def run(counts, stops):
        def f(xs, n):
            stop = (lambda c, _: c[1] >= n - 1) if stops else None
            length = jnp.where(n > 0, 4, 0) if stops else n
            step = lambda c, x: ((c[0] + x, c[1] + 1), c[0] * x)
            options = {"lanes": lx.Compact(shrink, min_lanes), "stop": stop, "reverse": reverse}
            return lx.scan(step, (0.0, 0), xs, length=length, **options)

        return jax.vmap(f)(rows, counts)

    def wanted(counts, stops):
        """The sum of the rows that are taken, their number, and each row times the sum before it."""
        first = np.where(counts > 0, 4 - counts, 0) if reverse and stops else 0 * counts
        is_taken = (first[:, None] <= np.arange(4)) & (np.arange(4) < (first + counts)[:, None])
        taken = np.where(is_taken, rows, 0.0)
        before = np.cumsum(taken[:, ::-1], 1)[:, ::-1] if reverse else np.cumsum(taken, 1)
        return (taken.sum(1), counts), taken * (before - taken)

    found = jax.jit(lambda counts: (run(counts, stops=False), run(counts, stops=True)))
    for seed in range(5):
        counts = np.random.RandomState(seed).randint(0, 5, lanes)
        one_at_least = np.where(counts > 0, np.maximum(counts - 1, 1), 0)
        assert_close(found(counts), (wanted(counts, False), wanted(one_at_least, True)))


# ---- costs


@EACH_FORM
def test_what_is_evaluated_is_what_the_report_says(unknown):
    counter, counts = LaneCounter(), np.random.RandomState(0).geometric(0.1, 50)
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


@EACH_FORM
@pytest.mark.parametrize("inside", [True, False], ids=["vmap_of_grad", "grad_of_vmap"])
def test_gradients_gain_as_values_do(unknown, inside):
    counter, counts = LaneCounter(), np.random.RandomState(0).geometric(0.1, 50)
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
    _, found = counter.of(jax.jit(inner if inside else outer), np.ones(50), counts)
    report = lx.lane_report(counts, lanes=compact)
    stretches = report.stages if unknown and not inside else report.groups
    steps = sum(s.lane_steps for s in stretches)
    # Forward and two replays; a batch of gradients walks forward once more, in groups (its values may be in stages).
    forward = sum(s.lane_steps for s in report.stages) if unknown else steps
    assert found <= (forward + 3 * steps if inside else 3 * steps)


def test_memory_of_a_gradient():
    """Groups store what lockstep does, but the states of a block for one group only; stages a third more."""
    y, n = np.ones((1024, 16)), np.arange(1024) % 100

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
        return temporary(jax.jit(gradient).lower(y).compile())

    assert memory("compact", unknown=False) < 0.75 * memory("lockstep", unknown=False)
    assert memory("compact", unknown=True) < 1.35 * memory("lockstep", unknown=True)


@EACH_FORM
def test_auto_shares_its_memory_among_the_parts(unknown):
    """So all of them together store no more than one loop would."""
    f = logistic(COMPACT, lx.Auto(memory=7 * 8 * 6), unknown)
    gradient = jax.jit(jax.grad(lambda x: jax.vmap(f)(A, x, N).sum()))
    assert_close(gradient(X), logistic_expected(A, X, N)[1][1])
    small = logistic(COMPACT, lx.Auto(memory=8), unknown)
    with pytest.raises(ValueError, match=r"Auto\(memory=8\).*at least one carry"):
        jax.make_jaxpr(jax.grad(lambda x: jax.vmap(small)(A, x, N).sum()))(X)


def test_a_loop_that_is_not_batched_is_as_it_is_without():
    f, g = logistic(COMPACT), logistic("lockstep")
    same = [str(jax.make_jaxpr(jax.grad(h))(2.0, 0.3, 4)).replace(repr(COMPACT), repr(lx.Lockstep())) for h in (f, g)]
    assert same[0] == same[1]


# ---- effects


@EACH_FORM
def test_a_finished_lane_leaves_its_domain_in_nobodys_sight(unknown):
    """sqrt(x - 0.5) after the end, and an error where the body is evaluated there."""
    starts = np.array([1.5, 10.2, 0.2, 5.5, 1.9])

    def f(x):
        n = jnp.where(x > 1.0, jnp.ceil(x - 1.0), 0).astype(int)

        def body(x):
            x = eqx.error_if(x, x < 0.5, "evaluated after the end")
            return x - 1.0 + 0.0 * jnp.sqrt(x - 0.5)

        if unknown:
            return lx.while_loop(lambda x: x > 1.0, body, x, max_steps=20, lanes=lx.Compact(2, 1))
        return lx.fori_loop(0, n, lambda _, x: body(x), x, max_steps=20, lanes=lx.Compact(2, 1))

    with jax.debug_nans(True):
        both = eqx.filter_jit(lambda x: (jax.vmap(jax.grad(f))(x), jax.grad(lambda x: jax.vmap(f)(x).sum())(x)))
        assert_close(both(starts), (np.ones(5), np.ones(5)))


def test_info_and_limits_are_those_of_each_lane():
    def f(n):
        loop = lambda lanes: lx.while_loop(
            lambda i: i < n, lambda i: i + 1, 0, max_steps=5, throw=False, info=True, lanes=lanes
        )
        return loop(COMPACT), loop("lockstep")

    compact, lockstep = jax.jit(jax.vmap(f))(np.array([3, 9, 0, 5, 6]))
    assert jax.tree.map(lambda x: x.tolist(), compact) == jax.tree.map(lambda x: x.tolist(), lockstep)
    stopped = lambda n: lx.while_loop(lambda i: i < n, lambda i: i + 1, 0, max_steps=5, lanes=COMPACT)
    with pytest.raises(eqx.EquinoxRuntimeError, match="max_steps=5 stopped"):
        jax.block_until_ready(eqx.filter_jit(jax.vmap(stopped))(np.array([3, 9, 0])))


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


# ---- in another program


STARTS = jnp.array([1.0, 2.0, 0.1])


def while_loop(s, x, lanes):
    return lx.while_loop(
        lambda s: jnp.abs(s) > 0.4, lambda s: 0.7 * s * jnp.cos(x), s, lanes=lanes, max_steps=8, throw=False
    )


def fori_loop(s, x, lanes):
    return lx.fori_loop(0, (4 * jnp.abs(x)).astype(int), lambda i, s: 0.9 * s * jnp.cos(x), s, lanes=lanes)


def branch(s, x, lanes):
    return lx.cond(s > x, lambda s: jnp.sin(s) * x, lambda s: s * x * x, s, lanes=lanes)


LOOPS = [while_loop, fori_loop, branch]
AROUND = {
    "checkpoint": jax.checkpoint,
    "a policy": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "scan": lambda f: lambda s, x: lax.scan(lambda s, _: (f(s, x), None), s, None, length=2)[0],
    "cond": lambda f: lambda s, x: lax.cond(x > 100.0, lambda s, x: s, f, s, x),
    "jit": jax.jit,
}


def value(loop, around, lanes):
    """Of a loop whose body has the other loop, in another program. `s` and `x` have derivatives."""
    once = AROUND[around](lambda s, x: loop(jnp.sin(2.0 * s) + 0.5, x, lanes))

    def lane(t):
        return lx.scan(lambda s, x: (once(s, x), None), t, jnp.array([0.5, 1.1]) * t)[0]

    return jax.jit(lambda ts: jax.vmap(lane)(ts).sum())


SLOW = [name for name in AROUND if name not in ("a policy", "cond")]


@pytest.mark.parametrize("around", [pytest.param(a, marks=pytest.mark.slow) if a in SLOW else a for a in AROUND])
@pytest.mark.parametrize("loop", LOOPS)
def test_derivatives_of_compact_lanes_in_another_program(loop, around):
    got, expected = value(loop, around, "compact"), value(loop, around, "lockstep")
    for derivative in (jax.grad, lambda f: lambda t: jax.jvp(jax.grad(f), (t,), (t,))):
        np.testing.assert_allclose(
            jax.tree.leaves(derivative(got)(STARTS)), jax.tree.leaves(derivative(expected)(STARTS)), rtol=1e-6
        )


BRANCHES = {
    "cond": lambda s, x: lax.cond(s > 0.7, lambda s: s * jnp.cos(x), lambda s: 0.8 * jnp.sqrt(s) * s, s),
    "jitted cond": jax.jit(lambda s, x: lax.cond(s > 0.7, lambda s: s * jnp.cos(x), lambda s: 0.6 * s, s)),
    "switch": lambda s, x: lax.switch((3 * s).astype(int), [jnp.sin, lambda s: s * x / 2, lambda s: 0.6 * s], s),
}


@pytest.mark.parametrize("body", [*BRANCHES])
def test_branches_in_compact_lanes_in_a_checkpoint(body):
    """Where lanes take different branches, JAX hands tangents through `stop_gradient`, and cannot transpose that."""

    def f(xs, lanes):
        while_loop = lambda x: lx.while_loop(
            lambda s: s > 0.2, lambda s: BRANCHES[body](s, x), x + 0.5, max_steps=6, throw=False, lanes=lanes
        )
        return jax.checkpoint(lambda xs: (jax.vmap(while_loop)(xs) ** 2).sum())(xs)

    xs = jnp.array([0.9, 0.1, 1.5, 0.4])
    for derivative in (jax.grad, jax.hessian):
        found, expected = (jax.jit(derivative(lambda xs, how=how: f(xs, how)))(xs) for how in (COMPACT, "lockstep"))
        assert_close(found, expected)
    with pytest.raises(NotImplementedError):  # JAX's table of rules is as it was
        jax.linear_transpose(lax.stop_gradient, xs)(xs)


def with_rule(rule):
    function = jax.custom_jvp(jnp.sin)
    function.defjvp(lambda p, t: (jnp.sin(p[0]), rule(p[0], t[0])))
    return function


def test_a_tangent_that_is_stopped_has_no_reverse_mode():
    """As with `jax.lax.scan`: forward and reverse mode would differ."""
    function = with_rule(lambda x, t: 2.0 * lax.stop_gradient(t))
    f = lambda x: lx.scan(lambda c, _: (function(c), None), x, None, length=3)[0]
    assert_close(jax.jvp(f, (1.0,), (1.0,))[1], jnp.asarray(8.0))
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(f)(1.0)


def test_second_derivatives_are_those_of_a_rule():
    """Of a function that is the derivative of no other one."""
    function = with_rule(lambda x, t: 3.0 * t * jnp.cos(x))
    counts, xs = np.array([3, 2, 1, 4]), np.linspace(0.2, 0.7, 4)

    def f(xs, lanes):
        body = lambda c: (function(c[0]), c[1] + 1)
        lane = lambda x, n: lx.while_loop(lambda c: c[1] < n, body, (x, 0), lanes=lanes, max_steps=8)[0]
        return (jax.vmap(lane)(xs, counts) ** 2).sum()

    found, expected = (jax.jit(jax.hessian(lambda xs, how=how: f(xs, how)))(xs) for how in (COMPACT, "lockstep"))
    assert_close(found, expected)
