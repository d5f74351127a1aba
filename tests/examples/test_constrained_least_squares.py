"""The constrained least squares of the examples: solutions and gradients, in lockstep and in free lanes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

pytestmark = pytest.mark.slow

PIXELS = 12


@pytest.fixture(autouse=True)
def _strict(_user_precision, double_precision):
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def unmixed(example):
    """Spectra, pixels, and what each way finds."""
    spectra, (pixels, _) = example.library(jnp.asarray(example.TRUE)), example.problem(PIXELS)
    of_lanes = {name: jax.jit(partial(example.unmix, lanes=name))(spectra, pixels) for name in ("lockstep", "free")}
    return np.asarray(spectra), np.asarray(pixels), of_lanes


def test_solutions_are_those_of_scipy_in_all_lanes(unmixed):
    spectra, pixels, of_lanes = unmixed
    expected = np.stack([scipy.optimize.nnls(spectra, pixel)[0] for pixel in pixels])
    for found in of_lanes.values():
        np.testing.assert_allclose(found.x, expected, rtol=0, atol=1e-11)
        np.testing.assert_array_equal(found.passive, expected > 0)
    np.testing.assert_allclose(of_lanes["free"].x, of_lanes["lockstep"].x, rtol=0, atol=1e-14)


def test_solutions_are_optimal(unmixed):
    """The conditions of Karush, Kuhn and Tucker."""
    spectra, pixels, of_lanes = unmixed
    for x, passive, _ in of_lanes.values():
        slopes = (pixels - x @ spectra.T) @ spectra
        assert (x >= 0).all()
        assert (x[~passive] == 0).all()
        assert (slopes[~passive] <= 1e-9).all()
        assert (abs(slopes[passive]) <= 1e-11).all()


def test_gradients_are_those_of_lockstep_of_one_more_solve_and_of_differences(example):
    pixels, parts = example.problem(PIXELS)
    value = partial(example.error, pixels=pixels, parts=parts)
    gradient = lambda **options: jax.jit(jax.grad(partial(value, **options)))(jnp.asarray(example.GUESS))
    free, lockstep, again = (
        gradient(lanes="free"),
        gradient(lanes="lockstep"),
        gradient(lanes="free", is_solved_again=True),
    )
    np.testing.assert_allclose(free, lockstep, rtol=1e-11)
    np.testing.assert_allclose(free, again, rtol=1e-11)
    at = jax.jit(partial(value, lanes="free"))
    differences = [(at(example.GUESS + 1e-6 * d) - at(example.GUESS - 1e-6 * d)) / 2e-6 for d in np.eye(2)]
    np.testing.assert_allclose(free, jnp.stack(differences), rtol=1e-6)


def test_counts_are_those_of_the_steps_taken(example):
    """A pixel that is one spectrum without noise takes one step of each loop; a pixel of zeros takes none."""
    spectra = example.library(jnp.asarray(example.TRUE))
    steps, inner = example.unmix(spectra, jnp.stack([spectra[:, 3], 0 * spectra[:, 0]]), "free", is_counted=True).counts
    np.testing.assert_array_equal(steps, [1, 0])
    np.testing.assert_array_equal(inner.sum(1), [1, 0])
