"""Debug prints and callbacks: once per step, not in replays, not for finished lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import loopax as lx
from tests.core.effects.log import INNER, Log
from tests.support.problem import KINDS, WITH_LAX, name_of
from tests.support.slow import each_kind

STARTS, COUNTS = np.array([0.0, 10.0, 20.0]), np.array([2, 3, 0])
CALLED = [0.0, 1.0, 10.0, 11.0, 12.0]


@pytest.mark.parametrize("kind", WITH_LAX, ids=name_of)
def test_once_for_each_step_of_a_lane(kind):
    """Not again in replays, and not for finished lanes."""
    log = Log()
    body = lambda i, x: log(x) + 1.0 + 0.0 * jnp.sin(x)
    f = lambda x, n: lx.fori_loop(0, n, body, x, max_steps=9, kind=kind)
    assert log.of(jax.jit(f), 0.0, 5) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert log.of(jax.jit(jax.vmap(f)), STARTS, COUNTS) == CALLED
    if kind != lx.Lax():
        assert log.of(jax.jit(jax.grad(f)), 0.0, 5) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert log.of(jax.jit(jax.vmap(jax.grad(f))), STARTS, COUNTS) == CALLED
        assert log.of(jax.jit(jax.grad(lambda x: jax.vmap(f)(x, COUNTS).sum())), STARTS) == CALLED


@pytest.mark.parametrize("inner", INNER)
def test_inside_other_constructs(inner):
    """Of an effect without a result, and of one with, of which JAX has no batch in its `cond`."""
    log = Log()
    asked = lambda x: io_callback(log.append_and_return, jax.ShapeDtypeStruct((), float), x)
    for step in (log, asked)[: 1 if inner == "cond" else 2]:
        body = lambda i, x, step=step: INNER[inner](step, x) + 1.0
        f = lambda x, n, body=body: lx.fori_loop(0, n, body, x, max_steps=9)
        assert log.of(jax.jit(jax.vmap(f)), STARTS, COUNTS) == CALLED
        assert jax.jit(jax.vmap(f))(STARTS, COUNTS).tolist() == [2.0, 13.0, 20.0]


# JAX does not say what of a `lax.while_loop` its effects use: of that in sequential lanes, each lane has the effects.
SHARED = [(inner, how) for inner in (*INNER, "branch") for how in ("lockstep", "compact", "sequential")]
SHARED.remove(("while", "sequential"))


@pytest.mark.parametrize(("inner", "lanes"), SHARED)
def test_once_where_tangents_alone_are_batched(inner, lanes):
    """No result depends on what an effect gets, so a batch of tangents leaves values without lanes."""
    log, silent = Log(), lambda x: x
    of = INNER | {"branch": lambda f, x: lx.cond(x > 0, f, jnp.sin, x)}

    def loop_of(f):
        body = lambda i, c: of[inner](lambda c: jnp.sin(f(c)) + 1.0, c)
        return lambda x: lx.fori_loop(0, 3, body, x.sum(), lanes=lanes)

    x = jnp.array([0.3, 0.4])
    forward = log.of(jax.jit(loop_of(log)), x)
    assert len(forward) >= 3
    assert log.of(jax.jit(jax.jacfwd(loop_of(log))), x) == forward
    assert np.allclose(jax.jit(jax.jacfwd(loop_of(log)))(x), jax.jit(jax.jacfwd(loop_of(silent)))(x))


# ---- effects inside of equations in which some operands are perturbed, and others not

PARTLY = {
    "cond": lambda f: lambda x: jax.lax.cond(x > -9.0, f, lambda x: x, x),
    "switch": lambda f: lambda x: jax.lax.switch(1, [lambda x: x, f], x),
    "scan": lambda f: lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, length=2)[0],
    "loop": lambda f: lambda x: lx.fori_loop(0, 2, lambda i, x: f(x), x),
    "jit": jax.jit,
}


# A kind that stores residuals splits what an effect is in, and one that replays steps drops the effects of a replay.
CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS
CASES = [*((how, RESIDUALS) for how in PARTLY), ("cond", CHECKPOINTED), ("loop", SLOTS), ("jit", BOUNDED)]
MORE = [*((how, CHECKPOINTED) for how in PARTLY if how != "cond"), ("cond", SLOTS), ("scan", BOUNDED)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("how", "kind"), CASES, ids=name_of)
def test_once_inside_of_other_equations(how, kind):
    """And the gradient is the one without effects."""
    log = Log()

    def loop_of(f):
        step = PARTLY[how](lambda x: jnp.sin(f(x)))
        return lambda x, n: lx.fori_loop(0, n, lambda i, x: step(x), x, max_steps=9, kind=kind)

    f = loop_of(log)
    forward = log.of(jax.jit(f), 1.0, 4)
    assert len(forward) >= 4
    gradients = jax.jit(lambda *args: (jax.grad(f)(*args), jax.grad(loop_of(lambda x: x))(*args)))
    assert log.of(gradients, 1.0, 4) == forward
    with_effects, without = gradients(1.0, 4)
    assert with_effects == without
    assert log.of(jax.jit(lambda x, n: jax.linearize(lambda x: f(x, n), x)[1](1.0)), 1.0, 4) == forward


# ---- effects of what returns its operand as it came, in which nothing of a derivative is left but the effect


def tripled_gradient(x):
    marked = jax.custom_jvp(lambda x: x)
    marked.defjvp(lambda primals, dots: (primals[0], 3.0 * dots[0]))
    return marked(x)


UNCHANGED = {
    "cond": lambda log, x: lx.cond(x > 0, log, lambda x: x, x),
    "loop": lambda log, x: lx.fori_loop(0, 1, lambda i, x: log(x), x),
    "traced length": lambda log, x: lx.fori_loop(0, jnp.int32(x > 0), lambda i, x: log(x), x),
    "loop in a loop": lambda log, x: lx.fori_loop(0, 1, lambda i, x: lx.fori_loop(0, 1, lambda i, x: log(x), x), x),
    "empty carry": lambda log, x: (lx.fori_loop(0, 1, lambda i, c: (log(x), c)[1], ()), x)[1],
    "other derivative": lambda log, x: lx.fori_loop(0, 1, lambda i, x: tripled_gradient(log(x)), x),
}


@pytest.mark.parametrize("how", UNCHANGED)
@pytest.mark.parametrize("kind", each_kind(SLOTS, RESIDUALS), ids=name_of)
def test_where_the_operand_is_returned_unchanged(kind, how):
    log = Log()
    f = lambda x, n: lx.fori_loop(0, n, lambda i, x: 2.0 * UNCHANGED[how](log, x), x, max_steps=4, kind=kind)
    both = jax.jit(jax.value_and_grad(f))
    assert log.of(both, 1.0, 3) == [1.0, 2.0, 4.0]
    assert both(1.0, 3) == (8.0, 216.0 if how == "other derivative" else 8.0)
    assert log.of(jax.jit(jax.vmap(jax.grad(f))), np.array([1.0, 10.0]), np.array([1, 2])) == [1.0, 10.0, 20.0]


# ---- kinds with another derivative, which evaluate steps once more


def test_steps_that_truncated_takes_again():
    log = Log()
    f = lambda x, n: lx.fori_loop(0, n, lambda i, x: 2.0 * log(x), x, max_steps=9, derivative=lx.Truncated(last=2))
    assert log.of(jax.jit(jax.grad(f)), 1.0, 4) == [1.0, 2.0, 4.0, 8.0]
    assert log.of(jax.jit(jax.vmap(jax.grad(f))), np.array([1.0, 10.0]), np.array([1, 3])) == [1.0, 10.0, 20.0, 40.0]


def test_the_step_at_a_fixed_point():
    log = Log()
    body = lambda a: lambda x: jnp.cos(log(x)) * a
    f = lambda a: lx.while_loop(lambda x: jnp.abs(jnp.cos(x) * a - x) > 1e-3, body(a), 1.0, derivative=lx.Implicit())
    forward = log.of(jax.jit(f), 0.5)
    assert len(forward) == 5
    assert log.of(jax.jit(jax.grad(f)), 0.5) == forward
    assert log.of(jax.jit(lambda a: jax.jvp(f, (a,), (1.0,))), 0.5) == forward
