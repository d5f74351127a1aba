"""The example computes what it says: products with the Hessian, and its trace, are the dense ones."""

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

from tests.support.example_files import assert_nearly

pytestmark = pytest.mark.slow

pytest.importorskip("sklearn")

TOLERANCE = 1e-5  # the example is in float32


@pytest.fixture
def example(example):
    """With a smaller network, which learns for a shorter time."""
    small = {"HIDDEN": 4, "EPOCH": 5, "EPOCHS": 6, "LOOKS": (0, 2, 6), "NETWORKS": 2, "STRENGTHS": (0.0, 1e-2)}
    vars(example).update(small, BUDGETS=(24, 96), REPEATS=8)
    return example


def test_products_and_exact_trace_are_those_of_the_dense_hessian(example):
    digits, model = jax.tree.map(lambda rows: rows[:80], example.load()[0]), example.Classifier(jax.random.key(1))
    flat, unravel = ravel_pytree(model)
    hessian = jax.jit(jax.hessian(lambda flat: example.loss(unravel(flat), digits)))(flat)
    product = example.hessian(model, digits)
    columns = jax.jit(jax.vmap(lambda v: ravel_pytree(product(unravel(v)))[0], out_axes=1))(jnp.eye(flat.size))
    assert_nearly(columns, hessian, TOLERANCE)
    assert_nearly(example.exact_trace(product, model), jnp.trace(hessian), TOLERANCE)


def test_estimates_are_as_exact_as_asked_for_and_a_penalty_makes_the_trace_smaller(example):
    train, test = example.load()
    models = example.train(train, jax.random.key(5), example.plain_loss)
    looks = example.follow({epoch: example.after(epoch, models) for epoch in example.LOOKS}, train, test)
    flattened = {name: example.flatten(curvature, train, test) for name, curvature in example.PENALTIES.items()}
    for look in looks:
        assert look.estimate.converged
        assert look.estimate.std_error <= example.RTOL * abs(look.estimate.value)
    assert len({int(look.estimate.num_matvecs) for look in looks}) > 1
    example.check(looks, flattened)
    for found in flattened.values():
        assert (found.trace[1] < found.trace[0]).all()
