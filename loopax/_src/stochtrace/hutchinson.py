"""The mean of quadratic forms: products are used as they come, and none is kept."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int

from loopax._src.jax_internals import api_boundary
from loopax._src.kinds import Checkpointed
from loopax._src.loops import fori_loop
from loopax._src.stochtrace.estimator import Budget, Estimator, Moments, TraceEstimate, estimate_of, or_one, parts
from loopax._src.stochtrace.operators import Along, Parameters, Products, draw, with_derivative

# Fewer equal samples from signs say nothing about what has not been seen. A polynomial of degree two in signs that is
# not constant has each of its values for at most 3/4 of them (O'Donnell 2014, lemma 3.5). So m samples are equal by
# chance in at most (3/4)^m + (1/4)^m of cases: in less than 5 % from this m on.
LEAST_EQUAL_SAMPLES = 11


@api_boundary
@dataclass(frozen=True)
class Hutchinson(Estimator):
    """Estimate the trace by the mean of w^H A w over random probes w (Girard 1989, Hutchinson 1990).

    A sample takes one product. The error falls with the square root of the number of products.

    Parameters
    ----------
    probes
        The distribution of the probes:

        - `"rademacher"` (the default): random signs; for complex operators, random numbers of modulus one.
        - `"normal"`: standard normal numbers.
        - `"sphere"`: random directions.

    Raises
    ------
    ValueError
        `probes` is unknown.

    Notes
    -----
    Cost: one product per sample. Memory does not grow with the number of products. A gradient draws the probes again,
    evaluates every product once more, and stores nothing.

    Variance of a sample, for a real symmetric A: 2 (||A||_F^2 - sum of A_ii^2) with Rademacher probes, and 2 ||A||_F^2
    with normal probes, so never less with normal probes. Sphere probes have a smaller variance than both if the
    eigenvalues are nearly equal.

    """

    def _run(self, products: Products, key: Array, budget: Budget) -> TraceEstimate:
        """See `Estimator.run`."""

        def samples_of(parameters: Parameters, key: Array, start: Any) -> tuple[Inexact[Array, " b"], Int[Array, " b"]]:
            """The quadratic forms of a batch of probes, and their numbers."""
            numbers = start + jnp.arange(budget.batch, dtype=jnp.int32)
            probes = draw(self.probes, key, numbers, products.size, products.dtype)
            return (probes.conj() * products(parameters, probes)).sum(1), numbers

        def sample(parameters: Parameters, others: tuple[Array, Budget]) -> tuple[list[Moments], Int[Array, ""]]:
            """The moments of the samples' parts, and the number of samples."""
            key, budget = others

            def with_batch(moments: list[Moments], start: Int[Array, ""], target: Int[Array, ""]) -> list[Moments]:
                samples, numbers = samples_of(parameters, key, start)
                is_counted = numbers < target
                of_batch = [Moments.of(part, is_counted) for part in parts(samples)]
                more = is_counted.sum(dtype=jnp.int32)
                return [old.merged(start, new, more) for old, new in zip(moments, of_batch, strict=True)]

            zeros = parts(jnp.zeros((), products.dtype))
            return budget.spend([Moments(zero, zero, zero) for zero in zeros], with_batch, estimate_of)

        def derivative(others: tuple[Array, Budget], out: tuple[list[Moments], Any], along: Along) -> list[Moments]:
            (key, _), (moments, count) = others, out

            def step(i: Any, sums: list[Moments]) -> list[Moments]:
                """Add the sums of a batch's rates, of them times d and times d^2 / squares, for deviations d."""
                (samples, numbers), (rates, _) = along(partial(samples_of, key=key, start=i * budget.batch))
                rates = parts(jnp.where(numbers < count, rates, 0))
                new = []
                for sum_, part, sample, rate in zip(sums, moments, parts(samples), rates, strict=True):
                    away = sample - part.mean
                    of_tilt = (away * (away / or_one(part.squares)) * rate).sum()
                    new.append(Moments(sum_.mean + rate.sum(), sum_.squares + (away * rate).sum(), sum_.tilt + of_tilt))
                return new

            zeros = [Moments(*(jnp.zeros_like(moment) for moment in part)) for part in moments]
            if budget.is_single_batch:
                sums = step(0, zeros)
            else:
                number, most = map(budget.num_batches, (count, budget.capacity))
                sums = fori_loop(0, number, step, zeros, max_steps=most, kind=Checkpointed(), throw=False)
            rates = []
            for part, sum_ in zip(moments, sums, strict=True):
                mean, squares = sum_.mean / count.astype(sum_.mean.dtype), 2 * sum_.squares
                tilt = 3 * (sum_.tilt - mean) - part.tilt * squares / or_one(part.squares)
                rates.append(Moments(mean, squares, jnp.where(part.squares == 0, 0, tilt)))
            return rates

        moments, count = with_derivative(sample, derivative)(products.parameters, (key, budget))
        estimate = estimate_of(moments, count)
        are_signs = self.probes == "rademacher" and not jnp.iscomplexobj(estimate.value) and products.size > 1
        if not are_signs:
            return estimate
        # Before: the standard error of the samples. After: infinity where few are equal but for rounding errors.
        rounding = jnp.finfo(estimate.value.dtype).eps * jnp.abs(estimate.value)
        are_equal = moments[0].squares <= count.astype(rounding.dtype) * rounding**2
        says_nothing = are_equal & (count < LEAST_EQUAL_SAMPLES)
        return estimate._replace(std_error=jnp.where(says_nothing, jnp.inf, estimate.std_error))
