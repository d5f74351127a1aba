"""The flow's log-densities and their gradients, with exact or estimated traces, are those of Python loops."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from loopax import stochtrace
from tests.support.reference import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double_precision")]

pytest.importorskip("sklearn")  # it has the data

KEY = jax.random.key(5)
POINT = jnp.array([0.3, -1.2, 0.5])


@pytest.fixture
def example(example):
    """In three dimensions."""
    vars(example).update(DIMENSIONS=3, HIDDEN=8)
    return example


@pytest.fixture
def weights(example):
    """Of a flow that moves points, far from the identity."""
    zeros = example.initial(jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), len(zeros))
    return [
        (matrix + 0.5 * jax.random.normal(key, matrix.shape), shift + 0.1)
        for key, (matrix, shift) in zip(keys, zeros, strict=True)
    ]


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


@pytest.mark.parametrize("num_matvecs", [None, 1, 3])
def test_values_and_gradients_are_those_of_a_python_loop(example, weights, num_matvecs):
    """With the same probes at every time."""
    estimated = partial(example.estimated, num_matvecs=num_matvecs)
    trace = example.exact if num_matvecs is None else estimated
    moment = jnp.eye(3) if num_matvecs is None else second_moment(KEY, num_matvecs, 3)
    ours = lambda weights, x: example.log_density(weights, x, KEY, trace).value
    theirs = lambda weights, x: python_log_density(example, weights, x, moment)
    with_gradients = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(weights, POINT)
    assert_close(with_gradients(ours), with_gradients(theirs), 1e-10)


def test_training_with_estimates_is_as_good_and_is_drawn(example, capsys, tmp_path):
    """A short training in four dimensions: with exact traces and with estimates from one product."""
    vars(example).update(DIMENSIONS=4, HIDDEN=32, UPDATES=150, UPDATES_PER_TEST=50)
    traces = {"exact": example.exact, "estimated": partial(example.estimated, num_matvecs=1)}
    with jax.enable_x64(False):
        data = example.load()
        programs = {name: example.compile_gradient(trace) for name, trace in traces.items()}
        found = {name: example.train(program, data) for name, program in programs.items()}
        weights, curves = found["estimated"][0], {name: curve for name, (_, curve) in found.items()}
        normal = example.normal_log_density(data.test).mean()
        evaluations = {atol: example.evaluate(weights, data, atol) for atol in (None, 1.0, 0.5)}
        example.print_training(programs, curves, -5.0)
        example.print_evaluations(evaluations)
        example.draw(curves, evaluations, weights, data).savefig(tmp_path / "figure.png")
    exact, estimated = curves.values()
    assert exact.shape == estimated.shape == (3,)
    assert estimated[-1] > normal + 0.5
    assert abs(estimated[-1] - exact[-1]) < 0.3
    assert evaluations[None].error == 0
    assert 0 < evaluations[0.5].error < 0.6
    assert "estimated" in capsys.readouterr().out
