"""After the loop, the end of each lane says where it was active: a gradient stores and evaluates no predicates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from loopax._src.core.masking import (
    fill_inactive,
    fill_inactive_p,
    filled_in_derivatives,
    filled_in_transposes,
    without_derivative,
    without_transpose,
)
from loopax._src.jax_internals import equations_in, jaxpr_as_fun
from tests.support.problem import name_of
from tests.support.reference import assert_close

LANES, WIDTH = 5, 3
STARTS = np.linspace(0.2, 1.0, LANES * WIDTH).reshape(LANES, WIDTH)
LENGTHS = np.array([3, 0, 7, 7, 1])
KINDS = [lx.Checkpointed(3), lx.Checkpointed(), lx.Bounded(), lx.Residuals()]


def total(kind, options):
    """Of lanes that count their steps, and ask a function that nothing else calls whether to go on."""

    def lane(h, length, w):
        goes_on = lambda c: jnp.cbrt(c[0]) < jnp.cbrt(length) - 1e-3
        return lx.while_loop(goes_on, lambda c: (c[0] + 1.0, jnp.sin(h * w) * c[1]), (0.0, h), kind=kind, **options)[1]

    return lambda h, w: jax.vmap(lane, (0, 0, None))(h, LENGTHS * 1.0, w).sum()


@pytest.fixture(params=KINDS, ids=name_of)
def gradient(request):
    options = {} if request.param == lx.Checkpointed(3) else {"max_steps": 9}
    return jax.make_jaxpr(jax.grad(total(request.param, options), (0, 1)))(STARTS, np.full(WIDTH, 0.9))


def test_only_what_a_derivative_reads_is_stored(gradient):
    """No predicate, no flag of an active lane and no counter."""
    loop = next(Loop(**eqn.params) for eqn in gradient.eqns if eqn.primitive is loop_p)
    stored = [*loop.saved_of(loop.output_avals.carry), *loop.output_avals.ys]
    assert stored
    assert all(aval.shape == (LANES, WIDTH) for aval in stored)


def test_no_predicate_is_evaluated_again(gradient):
    sweeps = [ReverseSweep(**eqn.params) for eqn in gradient.eqns if eqn.primitive is reverse_sweep_p]
    others = [eqn for eqn in gradient.eqns if eqn.primitive is loop_p][1:]
    bodies = [sweep.step for sweep in sweeps] or [Loop(**eqn.params).body for eqn in others]
    assert bodies
    assert not any(eqn.primitive.name == "cbrt" for body in bodies for eqn in equations_in(body))


def test_states_are_those_of_lanes_that_nothing_fills(gradient):
    """Lanes are filled where a derivative sums over them, and where residuals are made for it."""
    for eqn in gradient.eqns:
        if eqn.primitive is reverse_sweep_p:
            sweep = ReverseSweep(**eqn.params)
            assert not _filled(sweep.forward)
            assert _filled(sweep.backward)
        elif eqn.primitive is loop_p and Loop(**eqn.params).saving:
            assert not _filled(Loop(**eqn.params).body)


def _filled(body):
    whens = ("in_this_derivative", "in_transposes")
    return [eqn for eqn in body.eqns if eqn.primitive is fill_inactive_p and eqn.params["when"] in whens]


def test_what_is_filled_in_a_derivative_is_left_out_of_its_parts_alone():
    active, x = np.array([False, True]), np.arange(2.0)
    of = lambda when: jax.make_jaxpr(lambda active, x: fill_inactive(active, [x], [True], when)[0])(active, x)
    value = lambda program: jaxpr_as_fun(program)(active, x)[0]
    first = filled_in_derivatives(of("in_derivatives"))
    assert_close(value(first), np.ones(2))
    assert_close(value(without_derivative(first)), x)
    transposed = filled_in_transposes(first)
    assert_close(value(without_derivative(transposed)), np.ones(2))
    assert_close(value(without_transpose(transposed)), x)
    for summed in (first, transposed, of("always")):  # by an earlier derivative
        second = filled_in_derivatives(summed)
        assert_close(value(without_derivative(without_transpose(second))), np.ones(2))


def ends_in_its_domain(x, limit, kind):
    """The derivative of a step is not finite where a lane ends."""
    return lx.while_loop(lambda x: x < limit, lambda x: x + jnp.sqrt(limit + 1.0 - x), x, max_steps=9, kind=kind)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_shared_weight_gets_no_derivative_of_finished_lanes(kind):
    """Its cotangent sums over lanes, and those that have finished are outside of the domain."""
    starts, limits = jnp.zeros(4), jnp.array([3.0, -1.0, 6.0, 1.0])
    together = jax.grad(lambda w: jax.vmap(lambda x, m: ends_in_its_domain(x * w, m, kind))(starts + 0.5, limits).sum())
    alone = jax.grad(lambda w, x, m: ends_in_its_domain(x * w, m, kind))
    expected = sum(alone(1.0, 0.5, m) for m in limits)
    assert np.isfinite(expected)
    assert_close(jax.jit(together)(1.0), expected)
    second = jax.jit(jax.grad(together))(1.0)
    assert_close(second, sum(jax.grad(alone)(1.0, 0.5, m) for m in limits))


def reversed_rows(w, length, most, kind):
    """Lanes start at rows of their own, before which a step is outside of its domain, and stop by their carry."""
    step = lambda c, x: (c + w * jnp.sqrt(length.astype(float) + 0.5 - x), x * w)
    c, ys = lx.scan(step, 0.0, jnp.arange(1.0, 8.0), length, reverse=True, stop=lambda c, _: c > most, kind=kind)
    return c * ys.sum()


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_lanes_that_start_at_rows_of_their_own(kind):
    lengths, most = np.array([7, 2, 0, 5, 1]), np.array([4.0, 100.0, 5.0, -1.0, 0.5])
    of_lane = jax.grad(lambda w, n, m: reversed_rows(w, n, m, kind))
    together = jax.grad(lambda w: jax.vmap(lambda n, m: reversed_rows(w, n, m, kind))(lengths, most).sum())
    expected = sum(of_lane(1.3, n, m) for n, m in zip(lengths, most, strict=True))
    assert expected != 0
    assert_close(jax.jit(together)(1.3), expected)


def trained(kind, outer):
    """Steps of gradient descent over lanes that end where their derivative is not finite, as a function of the rate."""

    def lane(w, x, m):
        return lx.while_loop(lambda x: x < m, lambda x: x + w * jnp.sqrt(m - x) + 0.3, x, max_steps=9, kind=kind)

    starts, limits = jnp.array([0.5, 0.1, 0.9]), jnp.array([3.0, 6.0, 1.0])
    of_lanes = lambda w: jax.vmap(lambda x, m: lane(w, x, m))(starts, limits).sum()
    one_by_one = lambda w: sum(lane(w, x, m) for x, m in zip(starts, limits, strict=True))

    def result(rate, of):
        step = lambda w: w - rate * jax.grad(of)(w) * w
        if outer == "checkpoint":
            return jax.checkpoint(step)(jax.checkpoint(step)(1.1))
        return lx.fori_loop(0, 3, lambda _, w: step(w), 1.1, kind=outer)

    return lambda rate: result(rate, of_lanes), lambda rate: result(rate, one_by_one)


@pytest.mark.parametrize("outer", [lx.Bounded(), lx.Checkpointed(1), "checkpoint"], ids=repr)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[3]], ids=name_of)
def test_a_gradient_in_the_step_of_another(kind, outer):
    """What it sums over lanes stays filled, whoever runs it again."""
    of_lanes, one_by_one = trained(kind, outer)
    found, expected = (jax.jit(jax.value_and_grad(f))(0.01) for f in (of_lanes, one_by_one))
    assert np.isfinite(expected[1])
    assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_batch_of_a_derivative_that_is_transposed(kind):
    """The rule of a `jax.custom_jvp` differentiates a loop before it is batched; so does a truncated derivative."""

    def lane(w, x, m, **options):
        step = lambda x: x + w * jnp.sqrt(m - x) + 0.3
        return lx.while_loop(lambda x: x < m, step, x, max_steps=9, kind=kind, **options)

    custom = jax.custom_jvp(lane)
    custom.defjvp(lambda primals, tangents: jax.jvp(lane, primals, tangents))
    truncated = lambda *of: lane(*of, derivative=lx.Truncated(last=2))
    starts, limits = np.array([0.5, 0.1, 0.9]), np.array([3.0, 6.0, 1.0])
    for function in (custom, truncated):
        of_lanes = jax.vmap(function, (None, 0, 0))
        together = jax.grad(lambda w, of=of_lanes: of(w, starts, limits).sum())
        expected = sum(jax.grad(function)(1.1, x, m) for x, m in zip(starts, limits, strict=True))
        assert np.isfinite(expected)
        assert_close(jax.jit(together)(1.1), expected)
