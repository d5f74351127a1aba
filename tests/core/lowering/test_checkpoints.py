"""Budgets of checkpoints, and loops without a bound: evaluations, memory, and every transformation."""

from functools import cache, partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from benchmarks.counter import Counter
from loopax import schedule
from tests.core.lowering.test_memory import STATE, carries, temporary
from tests.support.problem import BOUND, XS, H, W, below_half, mixed, scan_step, while_body
from tests.support.reference import scan_reference, while_reference

STEPS = 1000


# ---- evaluations


def count_evaluations(loop, *args):
    counter = Counter()
    return counter.of(jax.jit(jax.grad(partial(loop, counter))), 1.0, *args)


def known(counter, x, n, checkpoints, bound=None):
    kind = lx.Checkpointed(checkpoints)
    return lx.fori_loop(0, n, lambda i, x: counter(x) * 0.9, x, kind=kind, max_steps=bound)


def unknown(counter, x, n, checkpoints, bound=None):
    body = lambda c: (counter(c[0]) * 0.9, c[1] + 1)
    return lx.while_loop(lambda c: c[1] < n, body, (x, 0), kind=lx.Checkpointed(checkpoints), max_steps=bound)[0]


def online_evaluations(n, slots):
    *_, stored = islice(schedule.online(slots), n)
    return schedule.evaluations_from(stored, n, slots)


@pytest.mark.parametrize("checkpoints", [3, 10, 20, 44])
def test_as_many_evaluations_as_the_schedule_says(checkpoints):
    """The optimum for a known length, also a static one and with a bound; the online schedule for an unknown one."""
    best = schedule.evaluations(STEPS, checkpoints)
    c = checkpoints
    assert count_evaluations(lambda count, x, n: known(count, x, n, c), STEPS) == best
    assert count_evaluations(lambda count, x: known(count, x, STEPS, c)) == best
    assert count_evaluations(lambda count, x, n: known(count, x, n, c, bound=1500), STEPS) == best
    evaluated = count_evaluations(lambda count, x, n: unknown(count, x, n, c), STEPS)
    assert evaluated == online_evaluations(STEPS, c) <= 1.5 * best


@pytest.mark.parametrize("checkpoints", [1, 2, 5, 30])
def test_any_number_of_steps(checkpoints):
    counter = Counter()
    with_known = jax.jit(jax.grad(lambda x, n: known(counter, x, n, checkpoints)))
    with_unknown = jax.jit(jax.grad(lambda x, n: unknown(counter, x, n, checkpoints)))
    for n in (0, 1, 2, 3, 29, 30, 31, 32, 100):
        assert counter.of(with_known, 1.0, n) == schedule.evaluations(n, checkpoints)
        assert counter.of(with_unknown, 1.0, n) == (online_evaluations(n, checkpoints) if n else 0)


def test_two_levels_where_the_checkpoints_allow_for_them():
    """64 checkpoints for 1000 steps: 32 blocks of 32 steps, within 2 % of the optimum."""
    evaluated = count_evaluations(lambda count, x: known(count, x, 1000, 64))
    assert schedule.evaluations(1000, 64) < evaluated <= 1.02 * schedule.evaluations(1000, 64)


@pytest.mark.parametrize("n", [50, 100, 1000])
def test_but_not_where_the_bound_may_be_far_above_the_steps_that_are_taken(n):
    best = schedule.evaluations(n, 64)
    assert count_evaluations(lambda count, x, n: known(count, x, n, 64, bound=1000), n) == best
    assert count_evaluations(lambda count, x, n: unknown(count, x, n, 64, bound=1000), n) == best


@pytest.mark.parametrize("steps", [7, 8])
def test_more_checkpoints_than_steps(steps):
    """No step is evaluated again but for its derivative, and no more is stored than there are steps."""
    assert count_evaluations(lambda count, x, n: known(count, x, n, 8, bound=8), steps) == 2 * steps
    assert carries(lx.Checkpointed(10**6), 100) == carries(lx.Bounded(), 100)


# ---- memory


def unbounded(checkpoints, loop=lx.fori_loop):
    """Temporary memory of the gradient of a loop without a bound, in carries."""
    if loop is lx.fori_loop:
        f = lambda h, n: lx.fori_loop(0, n, lambda i, h: jnp.tanh(1.1 * h), h, kind=lx.Checkpointed(checkpoints)).sum()
    else:
        body = lambda c: (jnp.tanh(1.1 * c[0]), c[1] + 1)
        f = lambda h, n: lx.while_loop(lambda c: c[1] < n, body, (h, 0), kind=lx.Checkpointed(checkpoints))[0].sum()
    return temporary(jax.grad(f), STATE, jnp.int32(9)) / STATE.nbytes


@pytest.mark.parametrize("loop", [lx.fori_loop, lx.while_loop])
def test_memory_is_the_number_of_checkpoints(loop):
    """Beside what does not depend on them: the current carry, its cotangent, and copies of both."""
    working = unbounded(2, loop) - 2
    assert working <= 6
    for checkpoints in (1, 3, 10, 20, 100):
        # A slot also has the number of its step, and more for the online schedule: up to 28 bytes beside 512.
        assert unbounded(checkpoints, loop) - working <= 1.06 * checkpoints


@pytest.mark.parametrize("steps", [100, 400, 2500])
@pytest.mark.parametrize("checkpoints", [1, 5, 20, 50, 100])
def test_memory_with_a_bound(steps, checkpoints):
    """Also where two levels are used: those inside a replayed block count."""
    assert carries(lx.Checkpointed(checkpoints), steps) <= 1.06 * checkpoints + 5


def test_default_slots_of_a_loop_without_a_bound():
    assert unbounded(None) == unbounded(64)
    assert unbounded(None, lx.while_loop) == unbounded(64, lx.while_loop)


def energy(h, n, checkpoints=10):
    return lx.fori_loop(0, n, lambda i, h: jnp.tanh(1.1 * h), h, kind=lx.Checkpointed(checkpoints)).sum()


def test_second_derivatives_do_not_store_slots_squared():
    n = jnp.int32(STEPS)
    first = temporary(jax.grad(energy), STATE, n)
    forward_over_reverse = temporary(lambda h, n: jax.jvp(lambda h: jax.grad(energy)(h, n), (h,), (h,))[1], STATE, n)
    reverse_over_reverse = temporary(jax.grad(lambda h, n: jax.grad(energy)(h, n) @ h), STATE, n)
    assert forward_over_reverse <= 4 * first
    assert reverse_over_reverse <= 4 * first


# ---- values and derivatives of loops without a bound


def fori(kind, w, h, xs, n):
    return mixed(lx.fori_loop(0, n, lambda i, h: while_body(w, xs)((h, i))[0], h, kind=kind))


def while_(kind, w, h, xs, n):
    return mixed(lx.while_loop(lambda c: c[1] < n, while_body(w, xs), (h, 0), kind=kind)[0])


def scan(kind, w, h, xs, n):
    step = lambda c, _: (while_body(w, xs)(c), None)
    return mixed(lx.scan(step, (h, 0), length=n, kind=kind)[0][0])


def stop(kind, w, h, xs, n):
    step = lambda c, _: (while_body(w, xs)(c), None)
    last = lambda c, _: c[1] >= n
    return mixed(lx.scan(step, (h, 0), stop=last, kind=kind)[0][0])


def expected(w, h, xs, n):
    (h, _), _ = while_reference(lambda c: c[1] < n, while_body(w, xs), (h, 0))
    return mixed(h)


UNBOUNDED = [fori, while_, scan, stop]
EACH_LOOP = pytest.mark.parametrize("loop", UNBOUNDED, ids=lambda f: f.__name__)
EACH_SCHEDULE = pytest.mark.parametrize("loop", [fori, while_], ids=lambda f: f.__name__)  # binomial, online
EACH_KIND = pytest.mark.parametrize("kind", [lx.Checkpointed(1), lx.Checkpointed(3), lx.Checkpointed(), lx.Auto()])
COUNTS = jnp.array([4, 1, 11, 7])
STARTS = jnp.stack([H, H + 0.1, H - 0.2, 2 * H])


def close(actual, wanted):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), actual, wanted)


@cache
def expected_gradient(n):
    """With respect to weights, start and rows, the same for all loops and kinds."""
    return jax.grad(expected, (0, 1, 2))(W, H, XS, n)


@cache
def expected_hessian(n):
    return jax.hessian(expected, 1)(W, H, XS, n)


@cache
def expected_lanes():
    """The gradient of each start with its number of steps."""
    return jnp.stack([jax.grad(expected, 1)(W, h, XS, int(n)) for h, n in zip(STARTS, COUNTS, strict=True)])


@cache
def expected_hessians():
    return jnp.stack([jax.hessian(expected, 1)(W, h, XS, int(n)) for h, n in zip(STARTS, COUNTS, strict=True)])


@EACH_KIND
@EACH_LOOP
def test_gradient_without_a_bound(loop, kind):
    gradient = jax.jit(jax.grad(partial(loop, kind), (0, 1, 2)))
    for n in (1, 2, 3, 4, 8, 11):
        close(gradient(W, H, XS, n), expected_gradient(n))


@EACH_SCHEDULE
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_hessian_without_a_bound(loop, outer, inner):
    hessian = jax.jit(outer(inner(partial(loop, lx.Checkpointed(3)), 1), 1))
    for n in (1, 9):
        close(hessian(W, H, XS, n), expected_hessian(n))


@EACH_LOOP
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_lanes_without_a_bound(loop, order):
    """Per-lane lengths: all lanes share the slots of the batch."""
    f = partial(loop, lx.Checkpointed(3))
    if order == "vmap of grad":
        gradient = jax.vmap(jax.grad(f, 1), (None, 0, None, 0))
    else:
        gradient = jax.grad(lambda *args: jax.vmap(f, (None, 0, None, 0))(*args).sum(), 1)
    close(jax.jit(gradient)(W, STARTS, XS, COUNTS), expected_lanes())


@EACH_SCHEDULE
def test_lanes_of_hessians_without_a_bound(loop):
    f = partial(loop, lx.Checkpointed(2))
    hessians = jax.jit(jax.vmap(jax.hessian(f, 1), (None, 0, None, 0)))(W, STARTS, XS, COUNTS)
    close(hessians, expected_hessians())
    outside = lambda starts: jax.vmap(f, (None, 0, None, 0))(W, starts, XS, COUNTS).sum()
    twice = jax.jit(jax.grad(lambda s: jnp.vdot(jax.grad(outside)(s), jnp.sin(s))))(STARTS)
    products = jnp.stack([h @ jnp.sin(s) for h, s in zip(expected_hessians(), STARTS, strict=True)])
    close(twice, products + expected_lanes() * jnp.cos(STARTS))


@EACH_SCHEDULE
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_jax_checkpoint_without_a_bound(loop, policy):
    f = jax.checkpoint(partial(loop, lx.Checkpointed(3)), policy=policy)
    close(jax.jit(jax.grad(f, (0, 1)))(W, H, XS, 9), expected_gradient(9)[:2])


@EACH_SCHEDULE
def test_linearize_without_a_bound(loop):
    value, tangent_map = jax.linearize(lambda h: loop(lx.Checkpointed(3), W, h, XS, 9), H)
    close(value, expected(W, H, XS, 9))
    _, gradient, _ = expected_gradient(9)
    close(jax.vmap(tangent_map)(jnp.eye(3)), gradient)
    close(jax.linear_transpose(tangent_map, H)(1.0)[0], gradient)


@EACH_SCHEDULE
def test_linearized_gradient_without_a_bound(loop):
    """The linear rest of a loop that saves, and of its sweep, run as they are and transposed."""
    _, product = jax.linearize(jax.grad(lambda h: loop(lx.Checkpointed(2), W, h, XS, 9)), H)
    hessian = expected_hessian(9)
    close(jax.vmap(product)(jnp.eye(3)), hessian)
    close(jax.vmap(lambda v: jax.linear_transpose(product, H)(v)[0])(jnp.eye(3)), hessian)


@EACH_SCHEDULE
def test_without_jit(loop):
    with jax.disable_jit():
        actual = jax.grad(partial(loop, lx.Checkpointed(2)), 1)(W, H, XS, 5)
    close(actual, expected_gradient(5)[1])


@EACH_SCHEDULE
def test_nested_without_a_bound(loop):
    """A loop without a bound in a loop without a bound, in lanes, with the derivative of both."""

    def program(h, n):
        body = lambda i, h: h * 0.5 + 0.1 * loop(lx.Checkpointed(2), W, h, XS, i)
        return lx.fori_loop(0, n, body, h, kind=lx.Checkpointed(2)).sum()

    def reference(h, n):
        for i in range(n):
            h = h * 0.5 + 0.1 * expected(W, h, XS, i)
        return h.sum()

    wanted = [jax.grad(reference)(h, int(n)) for h, n in zip(STARTS, COUNTS, strict=True)]
    close(jax.jit(jax.vmap(jax.grad(program)))(STARTS, COUNTS), jnp.stack(wanted))
    outside = jax.grad(lambda starts: jax.vmap(program)(starts, COUNTS).sum())
    close(jax.jit(outside)(STARTS), jnp.stack(wanted))


def test_inside_a_scan_of_jax():
    """`lax.scan` finds what does not change by partial evaluation, with unknown primals."""

    def program(h, n):
        gradient = jax.grad(partial(while_, lx.Checkpointed(2)), 1)
        step = lambda h, _: (h * 0.5 + 0.1 * gradient(W, h, XS, n), None)
        return lax.scan(step, h, None, 3)[0].sum()

    def reference(h, n):
        for _ in range(3):
            h = h * 0.5 + 0.1 * jax.grad(expected, 1)(W, h, XS, n)
        return h.sum()

    close(jax.jit(jax.grad(program))(H, 9), jax.grad(reference)(H, 9))


# ---- rows, in both directions, with fewer checkpoints than two levels need


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("condition", [None, below_half])
@pytest.mark.parametrize("checkpoints", [1, 2, 4])
def test_scan_with_rows(reverse, condition, checkpoints):
    def program(w, h, xs, n):
        kind = lx.Checkpointed(checkpoints)
        (h, _), ys = lx.scan(scan_step(w), (h, 0), xs, n, reverse=reverse, stop=condition, kind=kind)
        return mixed((h, ys))

    def reference(w, h, xs, n):
        (h, _), ys, _ = scan_reference(scan_step(w), (h, 0), xs, n, reverse, condition)
        return mixed((h, ys))

    gradient = jax.jit(jax.grad(program, (0, 1, 2)))
    for n in (0, 1, 6, BOUND):
        close(gradient(W, H, XS, n), jax.grad(reference, (0, 1, 2))(W, H, XS, n))


@pytest.mark.parametrize("kind", [lx.Checkpointed(2), lx.Checkpointed()])
@pytest.mark.parametrize("reverse", [False, True])
def test_stacked_pullbacks(kind, reverse):
    """Loops that ran apart and are differentiated together have not saved before the same rows."""

    def program(h, n):
        (h, _), ys = lx.scan(scan_step(W), (h, 0), XS, n, reverse=reverse, kind=kind)
        return mixed((h, ys))

    pullbacks = lax.map(lambda args: jax.vjp(lambda h: program(h, args[1]), args[0])[1], (STARTS, COUNTS))
    actual = jax.vmap(lambda pullback: pullback(1.0)[0])(pullbacks)
    close(actual, lax.map(lambda args: jax.grad(program)(*args), (STARTS, COUNTS)))


@pytest.mark.slow
def test_more_steps_than_can_be_counted():
    """The value is right, since nothing else is needed for it; the derivative is not known, and NaN."""
    with jax.enable_x64(True):
        body = lambda c: (c[0] * 0.5 + 1.0, c[1] + 1)
        loop = lambda x: lx.while_loop(lambda c: c[1] < 2**31 + 5, body, (x, jnp.int64(0)))[0]
        value, tangent = jax.jit(lambda x: jax.jvp(loop, (x,), (1.0,)))(1.0)
    assert value == 2.0
    assert jnp.isnan(tangent)
