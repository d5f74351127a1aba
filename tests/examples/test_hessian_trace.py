"""The example computes what it says: products with the Hessian, its trace and their derivatives are the dense ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

from tests.support.example_files import assert_nearly, load_example, precision_of_a_user

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]

pytest.importorskip("sklearn")

TOLERANCE = 1e-5  # the example is in float32


@pytest.fixture(scope="module")
def example():
    """With a smaller network, which learns for a shorter time."""
    module = load_example("hessian_trace")
    small = {"HIDDEN": 4, "EPOCH": 5, "EPOCHS": 6, "LOOKS": (0, 2, 6), "NETWORKS": 2, "STRENGTHS": (0.0, 1e-2)}
    vars(module).update(small, BUDGETS=(24, 96), REPEATS=8)
    return module


@pytest.fixture
def digits(example):
    return jax.tree.map(lambda rows: rows[:80], example.load()[0])


@pytest.fixture
def model(example):
    return example.Classifier(jax.random.key(1))


def dense(product, model):
    """The matrix of a product with vectors that are like the model."""
    flat, unravel = ravel_pytree(model)
    return jax.jit(jax.vmap(lambda v: ravel_pytree(product(unravel(v)))[0], out_axes=1))(jnp.eye(flat.size))


def test_data(example):
    train, test = example.load()
    assert train.images.shape == (898, 64)
    assert test.images.shape == (899, 64)
    assert (train.images.min(), train.images.max()) == (0, 1)
    assert np.abs(np.bincount(train.labels) - np.bincount(test.labels)).max() <= 1


def test_products_and_exact_trace_are_those_of_the_dense_hessian(example, model, digits):
    flat, unravel = ravel_pytree(model)
    hessian = jax.jit(jax.hessian(lambda flat: example.loss(unravel(flat), digits)))(flat)
    product = example.hessian(model, digits)
    assert_nearly(dense(product, model), hessian, TOLERANCE)
    assert_nearly(example.exact_trace(product, model), jnp.trace(hessian), TOLERANCE)


def test_gauss_newton(example, model, digits):
    """J^T H J, with the Jacobian of the network and the Hessian of the loss for the logits; positive semidefinite."""
    flat, unravel = ravel_pytree(model)
    jacobian = jax.jacobian(lambda flat: unravel(flat)(digits.images))(flat)
    chances = jax.nn.softmax(model(digits.images))
    curvatures = chances[:, :, None] * jnp.eye(10) - chances[:, :, None] * chances[:, None]
    expected = jnp.einsum("nip,nij,njq->pq", jacobian, curvatures, jacobian) / len(digits.labels)
    matrix = dense(example.gauss_newton(model, digits), model)
    assert_nearly(matrix, expected, TOLERANCE)
    values = jnp.linalg.eigvalsh(matrix)
    assert values[0] > -1e-5 * values[-1]


@pytest.mark.parametrize("name", ["Hessian", "Gauss-Newton"])
def test_gradient_of_the_penalty_is_that_of_its_value(example, model, digits, name):
    """The probes are the same in both."""
    with jax.enable_x64(True):
        model, digits = (
            jax.tree.map(lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
            for tree in (model, digits)
        )
        options = {"digits": digits, "key": jax.random.key(3), "strength": 0.1, "curvature": example.PENALTIES[name]}
        check_grads(jax.jit(partial(example.penalized_loss, **options)), (model,), order=1, modes=("fwd", "rev"))


def test_models_are_those_after_each_epoch(example, monkeypatch, digits):
    models = example.train(digits, jax.random.key(4), example.plain_loss)
    monkeypatch.setattr(example, "EPOCHS", example.EPOCH * example.EPOCHS)
    monkeypatch.setattr(example, "EPOCH", 1)
    steps = example.train(digits, jax.random.key(4), example.plain_loss)
    assert_nearly(models, jax.tree.map(lambda b: b[::5], steps), TOLERANCE)
    assert example.loss(example.after(6, models), digits) < example.loss(example.after(0, models), digits)


@pytest.fixture(scope="module")
def results(example):
    with precision_of_a_user():
        train, test = example.load()
        models = example.train(train, jax.random.key(5), example.plain_loss)
        looks = example.follow({epoch: example.after(epoch, models) for epoch in example.LOOKS}, train, test)
        model = example.after(example.EPOCHS, models)
        errors = {name: example.compare(*pair, model, train) for name, pair in example.ESTIMATORS.items()}
        flattened = {name: example.flatten(curvature, train, test) for name, curvature in example.PENALTIES.items()}
        return looks, errors, flattened


def test_estimates_are_as_exact_as_asked_for(example, results):
    looks = results[0]
    for look in looks:
        assert look.estimate.converged
        assert look.estimate.std_error <= example.RTOL * abs(look.estimate.value)
    assert len({int(look.estimate.num_matvecs) for look in looks}) > 1
    example.check(looks, {})


def test_one_compilation_for_all_epochs(example, monkeypatch, digits):
    traces = []
    accuracy = example.accuracy
    monkeypatch.setattr(example, "accuracy", lambda *args: traces.append(1) or accuracy(*args))
    models = {epoch: example.Classifier(jax.random.key(epoch)) for epoch in range(3)}
    assert len(example.follow(models, digits, digits)) == 3
    assert len(traces) == 1


def test_a_penalty_makes_the_trace_smaller(example, results):
    example.check([], results[2])
    for found in results[2].values():
        assert (found.trace[1] < found.trace[0]).all()


def test_the_penalty_on_the_hessian_has_no_lower_bound(example, model, digits):
    """Unlike that on the Gauss-Newton matrix: networks that are surely wrong have a negative trace."""
    worst = jax.tree.map(lambda x: 20 * x, model)
    traces = [example.exact_trace(curvature(worst, digits), worst) for curvature in example.PENALTIES.values()]
    assert traces[0] < -1
    assert traces[1] >= 0


def test_a_wrong_estimate_is_an_error(example, results):
    look = results[0][0]
    wrong = look.estimate._replace(value=look.exact + 6, std_error=0.5)
    with pytest.raises(SystemExit, match=f"epoch {look.epoch}: the exact trace is outside of"):
        example.check([look._replace(estimate=wrong)], {})
