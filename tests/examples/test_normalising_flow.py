"""The flow's log-densities and their gradients, with exact or estimated traces, are those of Python loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax import stochtrace
from tests.support.example_files import load_example, precision_of_a_user

pytestmark = pytest.mark.slow

pytest.importorskip("sklearn")  # it has the data

KEY = jax.random.key(5)
POINT = jnp.array([0.3, -1.2, 0.5])


@pytest.fixture
def example():
    """In three dimensions."""
    module = load_example("normalising_flow")
    vars(module).update(DIMENSIONS=3, HIDDEN=8)
    return module


@pytest.fixture
def weights(example):
    """Of a flow that moves points, far from the identity."""
    return moving(example)


def moving(example):
    zeros = example.initial(jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), len(zeros))
    return [
        (matrix + 0.5 * jax.random.normal(key, matrix.shape), shift + 0.1)
        for key, (matrix, shift) in zip(keys, zeros, strict=True)
    ]


def points(example, number, seed=3):
    return jax.random.normal(jax.random.key(seed), (number, example.DIMENSIONS))


def second_moment(key, num_matvecs, size):
    """The mean of v v^T over the probes of a key, as operators disclose it that have a single one among zeros."""
    units = jnp.eye(size * size).reshape(size, size, size, size)
    trace = lambda unit: stochtrace.estimate_trace(unit, key, num_matvecs=num_matvecs).value
    return jax.jit(jax.vmap(jax.vmap(trace)))(units).T


def python_log_density(example, weights, x, moment):
    """Loops in Python, with the trace of the Jacobian times `moment`."""
    h, gain = 1 / example.STEPS, 0.0

    def slopes(t, x):
        field = lambda x: example.velocity(weights, jnp.asarray(t), x)
        return field(x), (jax.jacfwd(field)(x) * moment.T).sum()

    for i in range(example.STEPS):
        a, p = slopes(i * h, x)
        b, q = slopes((i + 0.5) * h, x + h / 2 * a)
        c, r = slopes((i + 0.5) * h, x + h / 2 * b)
        d, s = slopes((i + 1) * h, x + h * c)
        x = x + h / 6 * (a + 2 * b + 2 * c + d)
        gain = gain + h / 6 * (p + 2 * q + 2 * r + s)
    return jax.scipy.stats.norm.logpdf(x).sum() + gain


def assert_close(ours, theirs, rtol=1e-10):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("num_matvecs", [None, 1, 3])
def test_values_and_gradients_are_those_of_a_python_loop(example, weights, num_matvecs):
    """With the same probes at every time."""
    estimated = partial(example.estimated, num_matvecs=num_matvecs)
    trace = example.exact if num_matvecs is None else estimated
    moment = jnp.eye(3) if num_matvecs is None else second_moment(KEY, num_matvecs, 3)
    ours = lambda weights, x: example.log_density(weights, x, KEY, trace).value
    theirs = lambda weights, x: python_log_density(example, weights, x, moment)
    with_gradients = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(weights, POINT)
    assert_close(with_gradients(ours), with_gradients(theirs))


def test_densities_integrate_to_one(example):
    vars(example).update(DIMENSIONS=2, STEPS=8)
    weights = moving(example)
    axis = jnp.linspace(-12.0, 12.0, 121)
    grid = jnp.stack(jnp.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    density = jnp.exp(example.exactly(weights, grid, KEY).value)
    normal = jnp.exp(example.normal_log_density(grid))
    assert jnp.abs(density - normal).max() > 0.5 * normal.max()
    np.testing.assert_allclose(density.sum() * (axis[1] - axis[0]) ** 2, 1.0, rtol=1e-3)


def test_a_flow_begins_as_the_normal_distribution(example):
    xs = points(example, 5)
    normal = jax.scipy.stats.norm.logpdf(xs).sum(axis=1)
    one_product = partial(example.estimated, num_matvecs=1)
    for trace in (example.exact, one_product):
        assert_close(example.log_densities(example.initial(KEY), xs, KEY, trace).value, normal)


def temporary(example, trace):
    """Memory of a gradient through the solver."""
    weights, xs = moving(example), points(example, 32)
    gradient = jax.jit(jax.grad(partial(example.loss, trace=trace)))
    analysis = gradient.lower(weights, xs, KEY).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_memory_does_not_grow_with_the_number_of_products(example):
    vars(example).update(DIMENSIONS=16, HIDDEN=32)
    one, some, many = (temporary(example, partial(example.estimated, num_matvecs=n)) for n in (1, 16, 64))
    assert one < some == many  # a single product needs no loop
    assert temporary(example, example.exact) > many  # of as many products at once as there are dimensions


def test_each_point_takes_the_products_that_it_needs(example, weights):
    """As many as alone; another tolerance is no other program."""
    xs = points(example, 64)
    errors, keys = {}, jax.random.split(KEY, len(xs))

    @jax.jit
    def alone(x, key, atol):
        trace = partial(example.estimated, atol=atol, max_matvecs=example.MOST_PRODUCTS, batch=16)
        return example.log_density(weights, x, key, trace)

    for atol in (0.5, 0.1):
        found = example.within(weights, xs, KEY, atol)
        errors[atol] = found.value - example.exactly(weights, xs, KEY).value
        assert len(set(found.products.tolist())) > 10
        for lane in (0, 1, 2):
            assert_close(alone(xs[lane], keys[lane], atol), jax.tree.map(lambda x, lane=lane: x[lane], found))
        assert jnp.sqrt((errors[atol] ** 2).mean()) < example.ERROR * atol
    assert jnp.abs(errors[0.1]).mean() < jnp.abs(errors[0.5]).mean()
    assert example.within._cache_size() == 1


def test_tighter_tolerances_take_more_products(example, weights):
    products = [example.within(weights, points(example, 16), KEY, atol).products for atol in (1e3, 0.2, 0.1)]
    assert (products[0] == 16).all()
    assert (products[2] >= products[1]).all()
    assert products[2].mean() > 2 * products[1].mean()


def test_the_data(example):
    data = example.load()
    np.testing.assert_allclose(data.train.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(data.train.T @ data.train / len(data.train), np.eye(3), atol=1e-5)
    assert len(data.unknown) == 181
    assert len(data.train) + len(data.test) + len(data.unknown) == 1797


def test_separation(example):
    assert example.separation(np.array([3.0, 1.0]), np.array([0.0, 2.0])) == 0.75


@pytest.fixture(scope="module")
def trained():
    """A short training in four dimensions: with exact traces and with estimates from one product."""
    example = load_example("normalising_flow")
    vars(example).update(DIMENSIONS=4, HIDDEN=32, UPDATES=150, UPDATES_PER_TEST=50)
    with precision_of_a_user():
        traces = {"exact": example.exact, "estimated": partial(example.estimated, num_matvecs=1)}
        programs = {name: example.compile_gradient(trace) for name, trace in traces.items()}
        data = example.load()
        return example, data, programs, {name: example.train(program, data) for name, program in programs.items()}


def test_training_with_estimates_is_as_good(trained):
    example, data, _, found = trained
    normal = example.normal_log_density(data.test).mean()
    exact, estimated = (curve for _, curve in found.values())
    assert exact.shape == estimated.shape == (3,)
    assert estimated[-1] > normal + 0.5
    assert abs(estimated[-1] - exact[-1]) < 0.3


def test_the_tables_and_the_figure(trained, capsys, tmp_path):
    example, data, programs, found = trained
    weights, curves = found["estimated"][0], {name: curve for name, (_, curve) in found.items()}
    with precision_of_a_user():
        evaluations = {atol: example.evaluate(weights, data, atol) for atol in (None, 1.0, 0.5)}
        example.print_training(programs, curves, -5.0)
        example.print_evaluations(evaluations)
        example.draw(curves, evaluations, weights, data).savefig(tmp_path / "figure.png")
    assert evaluations[None].error == 0
    assert 0 < evaluations[0.5].error < 0.6
    assert "estimated" in capsys.readouterr().out
