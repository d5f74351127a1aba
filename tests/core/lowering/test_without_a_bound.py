"""Values and derivatives of loops without a bound, under every transformation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.derivatives import H, W, derivatives
from tests.support.op_by_op import op_by_op
from tests.support.problem import XS, mixed, name_of, while_body
from tests.support.reference import assert_close


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


expected = partial(derivatives, "while")

ONE, TWO, THREE, MANY = map(lx.Checkpointed, (1, 2, 3, None))
EACH_SCHEDULE = pytest.mark.parametrize("loop", [fori, while_], ids=name_of)  # binomial, online
COUNTS = np.array([4, 1, 11, 7])
STARTS = np.stack([H, H + 0.1, H - 0.2, 2 * H])
LANES = list(zip(STARTS, COUNTS.tolist(), strict=True))

# Every loop, both schedules with every kind; `Auto()` takes the default number of checkpoints.
GRADIENTS = [*((loop, kind) for loop in (fori, while_) for kind in (ONE, THREE, MANY)), (scan, THREE), (stop, THREE)]
GRADIENTS += [(scan, lx.Auto()), pytest.param(stop, lx.Auto(), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("loop", "kind"), GRADIENTS, ids=name_of)
def test_gradient_without_a_bound(loop, kind):
    gradient = jax.jit(jax.grad(partial(loop, kind), (0, 1, 2)))
    for n in (1, 2, 3, 4, 8, 11):
        assert_close(gradient(W, H, XS, n), expected(n).gradient)


SLOW = pytest.mark.slow
COMPOSITIONS = [(jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacrev)]
COMPOSITIONS += [pytest.param(outer, jax.jacfwd, marks=SLOW) for outer in (jax.jacfwd, jax.jacrev)]


@EACH_SCHEDULE
@pytest.mark.parametrize(("outer", "inner"), COMPOSITIONS)
def test_hessian_without_a_bound(loop, outer, inner):
    hessian = jax.jit(outer(inner(partial(loop, THREE), 1), 1))
    for n in (1, 9):
        assert_close(hessian(W, H, XS, n), expected(n).hessian)


LANE = (None, 0, None, 0)


@pytest.mark.parametrize("loop", [fori, while_, pytest.param(scan, marks=SLOW), stop], ids=name_of)
def test_lanes_without_a_bound(loop):
    """Per-lane lengths: all lanes share the slots of the batch."""
    gradient = jax.vmap(jax.grad(partial(loop, THREE), 1), LANE)
    assert_close(jax.jit(gradient)(W, STARTS, XS, COUNTS), np.stack([expected(n, h=h).of_start for h, n in LANES]))


@pytest.mark.parametrize("loop", [fori, while_, scan, pytest.param(stop, marks=SLOW)], ids=name_of)
def test_gradient_of_lanes_without_a_bound(loop):
    lanes = jax.vmap(partial(loop, THREE), LANE)
    gradient = jax.grad(lambda *args: lanes(*args).sum(), 1)
    assert_close(jax.jit(gradient)(W, STARTS, XS, COUNTS), np.stack([expected(n, h=h).of_start for h, n in LANES]))


@SLOW
@EACH_SCHEDULE
def test_lanes_of_hessians_without_a_bound(loop):
    f = partial(loop, TWO)
    outside = lambda starts: jax.vmap(f, LANE)(W, starts, XS, COUNTS).sum()
    twice = jax.grad(lambda s: jnp.vdot(jax.grad(outside)(s), jnp.sin(s)))
    together = jax.jit(lambda s: (jax.vmap(jax.hessian(f, 1), LANE)(W, s, XS, COUNTS), twice(s)))
    found = [expected(n, h=h) for h, n in LANES]
    products = [d.hessian @ np.sin(s) + d.of_start * np.cos(s) for d, s in zip(found, STARTS, strict=True)]
    assert_close(together(STARTS), (np.stack([d.hessian for d in found]), np.stack(products)))


@pytest.mark.parametrize(
    ("loop", "policy"), [(fori, None), (while_, jax.checkpoint_policies.everything_saveable)], ids=name_of
)
def test_jax_checkpoint_without_a_bound(loop, policy):
    f = jax.checkpoint(partial(loop, THREE), policy=policy)
    assert_close(jax.jit(jax.grad(f, (0, 1)))(W, H, XS, 9), expected(9).gradient[:2])


@EACH_SCHEDULE
def test_linearize_without_a_bound(loop):
    @jax.jit
    def linearized(h):
        value, tangent_map = jax.linearize(lambda h: loop(THREE, W, h, XS, 9), h)
        return value, jax.vmap(tangent_map)(jnp.eye(3)), jax.linear_transpose(tangent_map, h)(1.0)[0]

    gradient = expected(9).of_start
    assert_close(linearized(H), (expected(9).value, gradient, gradient))


@EACH_SCHEDULE
def test_linearized_gradient_without_a_bound(loop):
    """The linear rest of a loop that saves, and of its sweep, run as they are and transposed."""

    @jax.jit
    def linearized(h):
        _, product = jax.linearize(jax.grad(lambda h: loop(TWO, W, h, XS, 9)), h)
        transposed = lambda v: jax.linear_transpose(product, h)(v)[0]
        return jax.vmap(product)(jnp.eye(3)), jax.vmap(transposed)(jnp.eye(3))

    assert_close(linearized(H), (expected(9).hessian,) * 2)


@SLOW
def test_linearize_without_jit():
    value, tangent_map = jax.linearize(lambda h: while_(THREE, W, h, XS, 9), H)
    assert_close((value, tangent_map(H)), (expected(9).value, np.vdot(expected(9).of_start, H)))


@SLOW
@EACH_SCHEDULE
def test_without_jit(loop):
    """With a bound, `test_disable_jit.py` has both schedules."""
    actual = op_by_op(jax.grad(partial(loop, TWO), 1))(W, H, XS, 5)
    assert_close(actual, expected(5).of_start)


def nested(loop, h, n):
    """A loop without a bound in a loop without a bound."""
    body = lambda i, h: h * 0.5 + 0.1 * loop(TWO, W, h, XS, i)
    return lx.fori_loop(0, n, body, h, kind=TWO).sum()


def expected_nested(h, n):
    """Its derivative, step by step."""
    slopes = np.eye(3)
    for i in range(n):
        inner = expected(i, h=h)
        h, slopes = h * 0.5 + 0.1 * inner.value, (np.eye(3) * 0.5 + 0.1 * inner.of_start) @ slopes
    return slopes.sum(0)


# In lanes, with the derivative of both.
NESTED = [(fori, "vmap of grad"), (while_, "grad of vmap")]
NESTED += [pytest.param(while_, "vmap of grad", marks=SLOW), pytest.param(fori, "grad of vmap", marks=SLOW)]


@pytest.mark.parametrize(("loop", "order"), NESTED, ids=name_of)
def test_nested_without_a_bound(loop, order):
    program = partial(nested, loop)
    if order == "vmap of grad":
        gradient = jax.vmap(jax.grad(program))
    else:
        gradient = jax.grad(lambda starts, counts: jax.vmap(program)(starts, counts).sum())
    assert_close(jax.jit(gradient)(STARTS, COUNTS), np.stack([expected_nested(h, n) for h, n in LANES]))


def test_inside_a_scan_of_jax():
    """`lax.scan` finds what does not change by partial evaluation, with unknown primals."""

    def program(h, n):
        gradient = jax.grad(partial(while_, TWO), 1)
        step = lambda h, _: (h * 0.5 + 0.1 * gradient(W, h, XS, n), None)
        return lax.scan(step, h, None, 3)[0].sum()

    h, slopes = H, np.eye(3)
    for _ in range(3):
        found = expected(9, h=h)
        h, slopes = h * 0.5 + 0.1 * found.of_start, (np.eye(3) * 0.5 + 0.1 * found.hessian) @ slopes
    assert_close(jax.jit(jax.grad(program))(H, 9), slopes.sum(0))
