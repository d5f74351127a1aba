"""Effects inside of `jax.checkpoint`, functions with derivatives of their own, and solvers: not for finished lanes.

Each function doubles its operand. `p` is what its values print, `d` what a derivative prints.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from tests.core.effects.log import Log
from tests.support.problem import KINDS, name_of
from tests.support.slow import each_kind
from tests.support.versions import maps_custom_vjp

X, N = np.array([1.0, 10.0, 100.0]), np.array([1, 3, 0])
CALLED = [1.0, 10.0, 20.0, 40.0]
BACK = [1.0, 1.0, 2.0, 4.0]  # cotangents


def checkpoint(log, _):
    return jax.checkpoint(lambda x: 2.0 * log(x))


def filter_checkpoint(log, _):
    return eqx.filter_checkpoint(lambda x: 2.0 * log(x))


def custom_jvp(log, in_rule):
    double = jax.custom_jvp(lambda x: 2.0 * log(x))
    double.defjvp(lambda xs, dots: (2.0 * in_rule(xs[0]), 2.0 * dots[0]))
    return double


def custom_vjp(log, in_rule):
    double = jax.custom_vjp(lambda x: 2.0 * log(x))
    double.defvjp(lambda x: (2.0 * log(x), x), lambda x, ct: (2.0 * in_rule(ct),))
    return double


def filter_custom_vjp(log, in_rule):
    """It is told what is perturbed, and which cotangents are zero."""

    @eqx.filter_custom_vjp
    def double(operands):
        x, factor = operands
        return factor * log(x), factor

    double.def_fwd(lambda perturbed, operands: ((operands[1] * log(operands[0]), operands[1]), None))

    @double.def_bwd
    def back(_, cts, perturbed, operands):
        assert perturbed == (True, False)
        return in_rule(cts[0]) * operands[1], None

    return lambda x: double((x, np.float64(2.0)))[0]


def filter_custom_jvp(log, in_rule):
    @eqx.filter_custom_jvp
    def double(x):
        return 2.0 * log(x)

    @double.def_jvp
    def rule(xs, dots):
        return 2.0 * in_rule(xs[0]), 2.0 * dots[0]

    return double


def custom_root(log, _):
    def double(x):
        solve = lambda f, start: 2.0 * log(x) + 0.0 * f(start)
        return lax.custom_root(lambda y: y - 2.0 * x, x, solve, lambda g, y: y / g(1.0))

    return double


def custom_linear_solve(log, in_rule):
    def double(x):
        solve = lambda _, b: 2.0 * log(b)
        back = lambda _, b: 2.0 * in_rule(b)
        return lax.custom_linear_solve(lambda y: y / 2.0, x, solve, transpose_solve=back)

    return double


def shard_map(log, _):
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(lambda x: 2.0 * log(x), mesh=mesh, in_specs=spec, out_specs=spec)


def in_jit(log, in_rule):
    return jax.jit(custom_vjp(log, in_rule))


def in_branch(log, in_rule):
    double = custom_vjp(log, in_rule)
    return lambda x: lax.cond(x > 0.0, double, lambda x: x, x)


FUNCTIONS = [checkpoint, filter_checkpoint, custom_jvp, custom_vjp, filter_custom_vjp, filter_custom_jvp, custom_root]
FUNCTIONS += [custom_linear_solve, shard_map, in_jit, in_branch]
IN_RULE = {
    custom_jvp: CALLED,
    filter_custom_jvp: CALLED,
}  # what the rule for a gradient prints; others print cotangents
IN_RULE |= dict.fromkeys([custom_vjp, filter_custom_vjp, custom_linear_solve, in_jit, in_branch], BACK)
NO_FORWARD_MODE = (custom_vjp, filter_custom_vjp, in_jit, in_branch)
PRINTS_ONCE = (custom_jvp, filter_custom_jvp)  # the rule computes the values


def loop_of(double, **options):
    return lambda x, n: lx.fori_loop(0, n, lambda i, x: double(x), x, max_steps=4, **options)


def sum_of(f):
    return lambda x, n: jax.vmap(f)(x, n).sum()


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values(function, lanes):
    log, in_rule = Log(), Log()
    f = jax.jit(jax.vmap(loop_of(function(log, in_rule), lanes=lanes)))
    assert log.of(f, X, N) == CALLED
    assert f(X, N).tolist() == [2.0, 80.0, 100.0]
    assert in_rule.values == []


OTHER_LOOPS = {
    "while_loop": lambda f, x, n, **options: lx.while_loop(
        lambda c: c[1] < n, lambda c: (f(c[0]), c[1] + 1), (x, 0), max_steps=4, **options
    )[0],
    "scan": lambda f, x, n, **options: lx.scan(lambda x, _: (f(x), None), x, length=n, max_steps=4, **options)[0],
}


@pytest.mark.parametrize("lanes", ["lockstep", "sequential"])
@pytest.mark.parametrize("loop", OTHER_LOOPS)
@pytest.mark.parametrize("function", [checkpoint, custom_jvp, custom_vjp, custom_root])
def test_values_in_other_loops(function, loop, lanes):
    log = Log()
    f = jax.jit(jax.vmap(lambda x, n: OTHER_LOOPS[loop](function(log, log), x, n, lanes=lanes)))
    assert log.of(f, X, N) == CALLED
    assert f(X, N).tolist() == [2.0, 80.0, 100.0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_branches(function):
    log = Log()
    f = jax.jit(jax.vmap(lambda x, n: lx.cond(n > 1, function(log, log), lambda x: x, x)))
    assert log.of(f, X, N) == [10.0]
    assert f(X, N).tolist() == [1.0, 20.0, 100.0]


# A gradient for each lane, and the gradient of a batch.
GRADIENTS = {"of each lane": lambda f: jax.vmap(jax.grad(f)), "of the batch": lambda f: jax.grad(sum_of(f))}


@maps_custom_vjp
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", each_kind(KINDS[1]), ids=name_of)
def test_gradients(kind, function, gradient):
    log, in_rule = Log(), Log()
    f = jax.jit(GRADIENTS[gradient](loop_of(function(log, in_rule), kind=kind)))
    called = log.of(f, X, N)
    assert called == ([] if function in PRINTS_ONCE else CALLED)
    assert sorted(in_rule.values) == IN_RULE.get(function, [])
    assert f(X, N).tolist() == [2.0, 8.0, 1.0]


def in_stages(double):
    """How many steps a lane takes is not known at the start."""

    def loop(x, n):
        body = lambda c: (c[0] + 1, double(c[1]))
        return lx.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=4, lanes=lx.Compact(2, 1))[1]

    return loop


@maps_custom_vjp
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_in_stages(function):
    """Stages have the effects, and the groups in which their steps are evaluated again have those of steps back."""
    log, in_rule = Log(), Log()
    f = jax.jit(GRADIENTS["of the batch"](in_stages(function(log, in_rule))))
    assert log.of(f, X, N) == ([] if function in PRINTS_ONCE else CALLED)
    assert sorted(in_rule.values) == IN_RULE.get(function, [])
    assert f(X, N).tolist() == [2.0, 8.0, 1.0]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", each_kind(KINDS[0]), ids=name_of)
def test_a_second_derivative_for_what_the_first_reads(kind, function):
    """The first derivative leaves the function as it is, and the second one asks for its rule."""
    log, in_rule = Log(), Log()
    double = function(log, in_rule)

    def f(x, y):
        return lx.fori_loop(0, 3, lambda i, c: (double(c[0]), c[1] * c[0]), (x, y), max_steps=4, kind=kind)[1]

    mixed = jax.jit(jax.grad(jax.grad(f, 1)))  # of 8 x**3 y
    values = [1.0, 2.0, 4.0]
    assert log.of(mixed, 1.0, 5.0) == ([] if function in PRINTS_ONCE else values)
    expected = values if function in PRINTS_ONCE else [0.0, 2.0, 8.0]  # cotangents
    assert sorted(in_rule.values) == (expected if function in IN_RULE else [])
    assert mixed(1.0, 5.0) == 24.0


@pytest.mark.parametrize("function", [custom_jvp, custom_vjp, custom_root])
def test_steps_that_a_derivative_takes_again(function):
    """Those have the effects of steps back alone."""
    log, in_rule = Log(), Log()
    double, truncated, implicit = function(log, in_rule), lx.Truncated(last=2), lx.Implicit()
    f = lambda x, n: lx.fori_loop(0, n, lambda i, x: double(x), x, max_steps=9, kind=truncated)
    assert log.of(jax.jit(jax.grad(f)), 1.0, 4) == [1.0, 2.0, 4.0, 8.0]
    assert sorted(in_rule.values) == ([1.0, 2.0] if function in NO_FORWARD_MODE else [])
    goes_on = lambda a: lambda x: jnp.abs(x / 2.0 + a - x) > 1e-3
    f = lambda a: lx.while_loop(goes_on(a), lambda x: double(x / 4.0) + a, 0.0, kind=implicit)
    forward = log.of(jax.jit(f), 1.0)
    assert len(forward) > 9
    assert log.of(jax.jit(jax.grad(f)), 1.0) == forward


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f not in NO_FORWARD_MODE])
def test_forward_mode_and_second_derivatives(function):
    log, in_rule = Log(), Log()
    f = sum_of(loop_of(function(log, in_rule)))
    along = jax.jit(lambda x, n: jax.jvp(lambda x: f(x, n), (x,), (x,)))
    called = log.of(along, X, N)
    assert (sorted(in_rule.values) if function in PRINTS_ONCE else sorted(set(called))) == CALLED
    assert along(X, N) == (182.0, 182.0)
    squared = jax.jit(jax.hessian(lambda x, n: f(x * x, n)))
    assert squared(X, N).tolist() == np.diag([4.0, 16.0, 2.0]).tolist()


@maps_custom_vjp
def test_reverse_over_reverse():
    log, in_rule = Log(), Log()
    f = sum_of(loop_of(custom_vjp(log, in_rule)))
    twice = jax.jit(jax.grad(lambda x, n: jax.grad(lambda x: f(x * x, n))(x).sum()))
    assert log.of(twice, X, N) == [1.0, 100.0, 200.0, 400.0]
    assert sorted(in_rule.values) == BACK
    assert twice(X, N).tolist() == [4.0, 16.0, 2.0]


def test_other_operands_and_results():
    """Integers have no tangents; a rule that reads them keeps them."""
    log = Log()

    def function(rule):
        scaled = jax.custom_vjp(lambda i, x: (i + 1, 2.0 * x))

        def back(i, cts):
            return None, 2.0 * rule(cts[1]) * (i.astype(float) + 1.0)

        scaled.defvjp(lambda i, x: ((i + 1, 2.0 * x), i), back)
        return scaled

    def f(rule, x, n):
        return lx.fori_loop(0, n, lambda _, c: function(rule)(*c), (0, x), max_steps=4)[1]

    gradient = lambda rule: jax.jit(jax.grad(lambda x, n: jax.vmap(partial(f, rule))(x, n).sum()))
    assert log.of(gradient(log), X, N) == [1.0, 1.0, 6.0, 24.0]
    assert gradient(log)(X, N).tolist() == gradient(lambda ct: ct)(X, N).tolist() == [2.0, 48.0, 1.0]


def test_a_rule_that_refuses_derivatives():
    """Is asked for none while there are none."""

    def refuse(*_):
        raise NotImplementedError("no derivative")

    double = jax.custom_jvp(lambda x: 2.0 * x)
    double.defjvp(refuse)
    f = jax.vmap(loop_of(double))
    assert f(X, N).tolist() == [2.0, 80.0, 100.0]
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: f(x, N).sum())(X)


def test_a_program_with_its_own_batching_rule():
    log = Log()
    double = jax.custom_batching.sequential_vmap(lambda x: 2.0 * log(x))
    f = jax.jit(jax.vmap(loop_of(double)))
    assert log.of(f, X, N) == CALLED
    assert f(X, N).tolist() == [2.0, 80.0, 100.0]
