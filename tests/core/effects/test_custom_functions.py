"""Effects inside of `jax.checkpoint`, functions with derivatives of their own, and solvers: not for finished lanes.

Each function doubles its operand. `p` is what its values print, `d` what a derivative prints.
"""

import equinox as eqx
import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from tests.core.effects.log import FORMS, Log
from tests.support.problem import KINDS, name_of
from tests.support.versions import maps_custom_vjp

X, N = np.array([1.0, 10.0, 100.0]), np.array([1, 3, 0])
CALLED = [1.0, 10.0, 20.0, 40.0]
BACK = [1.0, 1.0, 2.0, 4.0]  # cotangents


def checkpoint(log, _):
    return jax.checkpoint(lambda x: 2.0 * log(x))


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


FUNCTIONS = [checkpoint, custom_jvp, custom_vjp, filter_custom_vjp, custom_root]
FUNCTIONS += [custom_linear_solve, shard_map, in_jit, in_branch]
IN_RULE = {custom_jvp: CALLED}  # what the rule for a gradient prints; others print cotangents
IN_RULE |= dict.fromkeys([custom_vjp, filter_custom_vjp, custom_linear_solve, in_jit, in_branch], BACK)
NO_FORWARD_MODE = (custom_vjp, filter_custom_vjp, in_jit, in_branch)
PRINTS_ONCE = (custom_jvp,)  # the rule computes the values


def loop_of(double, **options):
    return lambda x, n: lx.fori_loop(0, n, lambda i, x: double(x), x, max_steps=4, **options)


def sum_of(f):
    return lambda x, n: jax.vmap(f)(x, n).sum()


# Which loop it is, how lanes run and what the body calls meet in no rule: each function with a loop and lanes.
TRIED = [(function, "fori_loop", ("lockstep", "compact")[i % 2]) for i, function in enumerate(FUNCTIONS)]
TRIED += [(f, ("while_loop", "scan")[i % 2], ("sequential", "lockstep")[i // 2 % 2]) for i, f in enumerate(FUNCTIONS)]


@pytest.mark.parametrize(("function", "form", "lanes"), TRIED)
def test_values(function, form, lanes):
    log, in_rule = Log(), Log()
    double = function(log, in_rule)
    f = jax.jit(jax.vmap(lambda x, n: FORMS[form](double, x, n, lanes=lanes)))
    assert log.of(f, X, N) == CALLED
    assert f(X, N).tolist() == [2.0, 80.0, 100.0]
    assert in_rule.values == []


# A gradient for each lane, and the gradient of a batch.
GRADIENTS = {"of each lane": lambda f: jax.vmap(jax.grad(f)), "of the batch": lambda f: jax.grad(sum_of(f))}


@maps_custom_vjp
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", [KINDS[1], pytest.param(KINDS[3], marks=pytest.mark.slow)], ids=name_of)
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
