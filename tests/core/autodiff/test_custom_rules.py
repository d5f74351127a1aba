"""Bodies with `custom_jvp` and `custom_vjp` functions, also with a backward function that is not linear."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.problem import KINDS, H, W, name_of
from tests.support.reference import assert_close
from tests.support.versions import maps_custom_vjp

STARTS = np.stack([H, -np.asarray(H)])


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


sine.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def sine_backward(x):
    return jnp.sin(x)


sine_backward.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, g: (cosine * g,))


@jax.custom_vjp
def soft_clip(x):
    """The identity, whose cotangent is squashed: as people clip gradients in recurrent networks."""
    return x


soft_clip.defvjp(lambda x: (x, x), lambda x, g: (jnp.tanh(g) * jnp.cos(x),))

FUNCTIONS = {
    "custom_jvp": sine,
    "custom_vjp": sine_backward,
    "jit of custom_vjp": jax.jit(sine_backward),
    "relu": jax.nn.relu,
    "not linear backward": lambda x: jnp.sin(soft_clip(x)),
}

# The rule for a call in a call is the same for all kinds but one, which stores what a derivative needs; `relu` is a
# `custom_jvp` function in a `jit`.
IN_CALLS = ("jit of custom_vjp", "relu")
CASES = [
    pytest.param(name, kind, marks=pytest.mark.slow if k in (1, 2) and name != "not linear backward" else ())
    for name in FUNCTIONS
    for k, kind in enumerate(KINDS)
    if name not in IN_CALLS or k in (0, 3)
]


def program(name, kind):
    return lambda h: lx.fori_loop(0, 6, lambda i, h: FUNCTIONS[name](W @ h) + 0.5 * h, h, kind=kind)[0]


def plain(name):
    return lambda h: jax.lax.scan(lambda h, _: (FUNCTIONS[name](W @ h) + 0.5 * h, None), h, None, length=6)[0][0]


@cache
def expected(name):
    """Gradients and Hessians at both starts."""
    f = plain(name)
    of_start = lambda h: (jax.grad(f)(h), jax.jacrev(jax.grad(f))(h))
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(of_start))(STARTS))


@pytest.mark.parametrize(("name", "kind"), CASES, ids=name_of)
def test_derivatives(name, kind):
    """First ones, in `jax.checkpoint` and in lanes, and second ones: a `jax.custom_jvp` has them in both modes."""
    f = program(name, kind)

    @jax.jit
    def found(starts):
        second = [jax.jacrev(jax.grad(f)), *([jax.hessian(f)] if name == "custom_jvp" else [])]
        gradients = jax.grad(f)(starts[0]), jax.grad(jax.checkpoint(f))(starts[0]), jax.vmap(jax.grad(f))(starts)
        return gradients, [of_start(starts[0]) for of_start in second]

    gradients, hessians = expected(name)
    number = 2 if name == "custom_jvp" else 1
    assert_close(found(STARTS), ((gradients[0], gradients[0], gradients), [hessians[0]] * number))


def test_reverse_over_reverse_without_a_bound():
    """The second derivative of a backward function that is not linear needs its cotangents of all steps."""
    step = lambda h: jnp.sin(soft_clip(W @ h)) + 0.5 * h
    loop = lambda h: lx.while_loop(lambda c: c[0] < 6, lambda c: (c[0] + 1, step(c[1])), (0, h))[1][0]
    with pytest.raises(ValueError, match="reverse mode is taken twice through a loop that has no bound"):
        jax.jacrev(jax.grad(loop))(STARTS[0])
    assert_close(jax.jit(jax.jacfwd(jax.grad(loop)))(STARTS[0]), expected("not linear backward")[1][0])


COMPACT = lx.Compact(min_lanes=1, shrink=2)
WEIGHTS = np.array([1.0, -2.0, 0.5])
IN_STAGES = {
    "of each lane": lambda f: lambda x: jax.vmap(jax.grad(lambda x, w: f(x) * w))(x, WEIGHTS),
    "of a batch": lambda f: jax.grad(lambda x: jax.vmap(f)(x) @ WEIGHTS),
    "of a batch in a checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: jax.vmap(f)(x) @ WEIGHTS)),
    "of a batch of checkpoints": lambda f: jax.grad(lambda x: jax.vmap(jax.checkpoint(f))(x) @ WEIGHTS),
    "of a batch of batches": lambda f: jax.grad(lambda x: jax.vmap(jax.vmap(f))(x[None])[0] @ WEIGHTS),
}
OF_A_BATCH = [name for name in IN_STAGES if name != "of each lane"]


@pytest.mark.parametrize("gradient", ["of each lane", *(pytest.param(g, marks=maps_custom_vjp) for g in OF_A_BATCH)])
@pytest.mark.parametrize(("name", "bound"), [("custom_vjp", None), ("not linear backward", 6)])
def test_lanes_in_stages(name, gradient, bound):
    """Finished lanes leave the batch. A `jax.custom_vjp` has no forward mode, and its tangents cannot be mapped."""
    step = lambda x: FUNCTIONS[name](x) + 1.2 * x
    loop = lambda x: lx.while_loop(lambda x: x < 2.0, step, x, max_steps=bound, lanes=COMPACT)

    def unrolled(x):
        for _ in range(6):
            x = jnp.where(x < 2.0, step(x), x)
        return x

    starts = np.array([0.5, 0.7, 0.2])
    expected = jax.vmap(jax.grad(lambda x, w: unrolled(x) * w))(starts, WEIGHTS)
    assert_close(jax.jit(IN_STAGES[gradient](loop))(starts), expected)


@pytest.mark.parametrize("gradient", IN_STAGES)
def test_a_rule_that_is_the_derivative_of_lanes_in_groups(gradient):
    """JAX wants to know the results of a `jax.custom_jvp` before its tangents, also where one loop computes both."""
    length = lambda x: (5 * x).astype(int)
    loop = lambda x: lx.fori_loop(0, length(x), lambda i, x: jnp.sin(x) * 1.1, x, max_steps=4, lanes=COMPACT)
    with_rule = jax.custom_jvp(loop)
    with_rule.defjvp(lambda primals, tangents: jax.jvp(loop, primals, tangents))
    starts = np.array([0.5, 0.1, 0.9])
    assert_close(*(jax.jit(IN_STAGES[gradient](f))(starts) for f in (with_rule, loop)))
