"""`jax.checkpoint` around loops, inside their bodies, with and without a policy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.derivatives import H, W, derivatives
from tests.support.problem import KINDS, LOOPS, XS, name_of
from tests.support.reference import assert_close
from tests.support.slow import each_kind

POLICIES = [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable]
CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS
N = np.int32(6)

# Each kind with each policy, each loop with each of both.
CASES = [
    (loop, kind, POLICIES[(i + j) % 3])
    for i, loop in enumerate(("scan", "reverse_stop", "while"))
    for j, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("loop", "kind", "policy"), CASES, ids=name_of)
def test_gradient(loop, kind, policy):
    f = jax.checkpoint(LOOPS[loop][0](kind), policy=policy)
    assert_close(jax.jit(jax.grad(f, (0, 1, 2)))(W, H, XS, N), derivatives(loop, 6).gradient)


ORDERS = {"forward over reverse": jax.hessian, "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f))}
FAST = [("forward over reverse", CHECKPOINTED), ("reverse over reverse", SLOTS), ("forward over reverse", BOUNDED)]
FAST += [("reverse over reverse", RESIDUALS)]
HESSIANS = [
    pytest.param(order, kind, marks=[] if (order, kind) in FAST else [pytest.mark.slow])
    for order in ORDERS
    for kind in KINDS
]


@pytest.mark.parametrize(("order", "kind"), HESSIANS, ids=name_of)
def test_hessian(order, kind):
    f = jax.checkpoint(lambda h: LOOPS["scan"][0](kind)(W, h, XS, N))
    assert_close(jax.jit(ORDERS[order](f))(H), derivatives("scan", 6).hessian)


@pytest.mark.parametrize("kind", each_kind(SLOTS, RESIDUALS), ids=name_of)
def test_gradient_of_a_checkpointed_gradient(kind):
    """The reverse sweep itself under `jax.checkpoint`."""
    f = lambda h: LOOPS["scan"][0](kind)(W, h, XS, N)
    inner = jax.checkpoint(lambda h: jax.grad(f)(h) @ jnp.cos(h))
    found = derivatives("scan", 6)
    assert_close(jax.jit(jax.grad(inner))(H), found.hessian @ np.cos(H) - found.of_start * np.sin(H))


@cache
def expected_of_sines():
    plain = lambda h: jax.lax.fori_loop(0, 6, lambda i, h: jnp.sin(W @ h), h).sum()
    return jax.jit(jax.grad(plain))(H)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_checkpointed_body(kind):
    body = jax.checkpoint(lambda i, h: jnp.sin(W @ h))
    f = lambda h: lx.fori_loop(0, 6, body, h, kind=kind).sum()
    assert_close(jax.jit(jax.grad(f))(H), expected_of_sines())


@pytest.mark.parametrize("kind", each_kind(CHECKPOINTED, BOUNDED), ids=name_of)
def test_vmap_of_checkpoint(kind):
    counts = np.array([2, 0, 9])
    f = jax.checkpoint(lambda h, n: LOOPS["while"][0](kind)(W, h, XS, n))
    wanted = np.stack([derivatives("while", n).of_start for n in counts])
    assert_close(jax.jit(jax.vmap(jax.grad(f), (None, 0)))(H, counts), wanted)


@pytest.mark.parametrize("lanes", [lx.Lockstep(), lx.Compact(min_lanes=1, shrink=2)], ids=["lockstep", "compact"])
@pytest.mark.parametrize("loop", ["fori", "while"])
def test_batches_that_depend_on_no_tangent(loop, lanes):
    """JAX asks in `jax.checkpoint` for the known part of a batch that is known, too."""
    step = lambda h: jnp.sin(h) + 1.2 * h

    def run(n, h):
        if loop == "fori":
            return lx.fori_loop(0, n, lambda _, h: step(h), h, max_steps=5, lanes=lanes)
        return lx.while_loop(lambda h: h < 2.0, step, h, max_steps=5, lanes=lanes)

    starts, counts = np.array([0.5, 0.7, 0.2]), np.array([1, 4, 2])
    batch = lambda scale, h: jnp.sin(scale * jax.vmap(run)(counts, h)).sum()
    found = [jax.jit(jax.grad(f, (0, 1)))(2.0, starts) for f in (batch, jax.checkpoint(batch))]
    assert_close(found[0], found[1])
    assert_close(jax.jit(jax.grad(jax.checkpoint(batch)))(2.0, starts), found[0][0])
    second = [jax.jit(jax.grad(jax.grad(f), 1))(2.0, starts) for f in (batch, jax.checkpoint(batch))]
    assert_close(second[0], second[1])
