"""What follows from constants alone is computed once before a loop, where the compiler does not do so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.lowering.rows import computed_before
from tests.support.reference import assert_close

W, H = np.linspace(-1.0, 1.0, 12).reshape(4, 3), np.linspace(0.1, 0.4, 4)


def body_of(function):
    """A body (row, w, h) -> results."""
    return jax.make_jaxpr(function)(np.int32(0), W, H)


def names(program):
    return [eqn.primitive.name for eqn in program.eqns]


def test_reductions_and_products_go_before_the_loop():
    found = computed_before(body_of(lambda _, w, h: h * jnp.max(2.0 * w) + (w.T @ w).sum()), 1)
    assert found is not None
    assert names(found.program).count("reduce_max") == names(found.program).count("dot_general") == 1
    assert not {"reduce_max", "dot_general", "reduce_sum"} & set(names(found.body))
    assert [aval.shape for aval in found.program.out_avals] == [(), ()]  # not the product, of which a sum is left


@pytest.mark.parametrize(
    "stays",
    [
        lambda _, w, h: h + jnp.sin(w).sum(1) * h,  # a sum that is used goes
        lambda row, w, h: h + (w * row.astype(w.dtype)).sum(),
        lambda _, w, h: h + jnp.sin(w)[:, 0],
        lambda _, w, h: h + (w[:, :1] @ w[:, :1].T)[0],
        lambda _, w, h: (w.sum(), h)[1],
    ],
    ids=["taken out", "of the row", "elementwise", "larger than its operands", "not used"],
)
def test_what_stays(stays, request):
    found = computed_before(body_of(stays), 1)
    assert (found is not None) == ("taken out" in request.node.name)


def test_loops_and_callbacks_stay():
    """They may not end, and they may be for steps that are taken alone."""
    endless = lambda w: jax.lax.while_loop(lambda s: s.max() < 0, lambda s: s + w.sum(), w)
    called = lambda w: jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct(w.shape, w.dtype), w)
    for of_constants in (endless, called):
        assert computed_before(body_of(lambda _, w, h, of=of_constants: h * of(w)[:, 0]), 1) is None


@pytest.mark.parametrize("kind", [lx.Checkpointed(2), lx.Residuals()], ids=repr)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_values_and_gradients(kind, steps):
    def loss(w, h):
        step = lambda _, h: jnp.sin(h) * jnp.linalg.norm(w) + (w @ (w.T @ jnp.ones_like(h)))
        return lx.fori_loop(0, steps, step, h, kind=kind).sum()

    expected = jax.value_and_grad(loss, (0, 1))(W, H)
    with lx.configure(calibration="h100"):
        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(W, H)
        lanes = jax.vmap(jax.grad(loss), (0, None))(np.stack([W, 0.5 * W]), H)
    assert_close(found, expected)
    assert_close(lanes[0], expected[1][0])
