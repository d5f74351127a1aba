"""The mean of quadratic forms: products are used as they come, and none is kept."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from loopax._src.kinds import Checkpointed
from loopax._src.loops import fori_loop, while_loop
from loopax._src.stochtrace.estimator import Budget, Estimate, Estimator, abs2, standard_error
from loopax._src.stochtrace.probes import draw
from loopax._src.stochtrace.products import Along, Parameters, Products, with_derivative


@dataclass(frozen=True)
class Hutchinson(Estimator):
    """The mean of w^H A w over random probes w (Girard 1989, Hutchinson 1990).

    A sample is one product. Its variance is 2 (||A||_F^2 - sum of A_ii^2) for a real symmetric A and Rademacher
    probes, 2 ||A||_F^2 for normal ones, which are never better; sphere probes are better than both where the
    eigenvalues are nearly equal. The error falls with the square root of the number of products.

    Cost: one product a sample; memory does not grow with their number, also for derivatives, which draw the probes
    again: a gradient evaluates every product once more.

    Parameters
    ----------
    probes
        "rademacher" (signs; for complex operators numbers of modulus one), "normal" or "sphere".

    Raises
    ------
    ValueError
        Unknown `probes`.

    """

    def run(self, products: Products, key: Array, budget: Budget) -> Estimate:
        """See `Estimator.run`."""
        stream = _Stream(self, products, budget)
        estimate = with_derivative(stream.run, stream.derivative)
        (value, std_error), count = estimate(products.parameters, (key, budget.limit, budget.tolerance))
        return Estimate(value, std_error, count)


class _Moments(NamedTuple):
    """The mean of samples, and the sum of their squared deviations from it (Chan, Golub & LeVeque 1983)."""

    number: Int[Array, ""]
    mean: Inexact[Array, ""]
    squares: Float[Array, ""]

    def with_batch(self, samples: Inexact[Array, " b"], is_counted: Bool[Array, " b"]) -> "_Moments":
        """The moments with some more samples, of which at least one is counted."""
        more = is_counted.sum(dtype=self.number.dtype)
        count = self.number + more
        mean = jnp.where(is_counted, samples, 0).sum() / more.astype(samples.dtype)
        away = jnp.where(is_counted, samples - mean, 0)
        ahead, share = mean - self.mean, more.astype(samples.dtype) / count.astype(samples.dtype)
        between = abs2(ahead) * share.real * self.number.astype(self.squares.dtype)
        return _Moments(count, self.mean + ahead * share, self.squares + abs2(away).sum() + between)

    @property
    def std_error(self) -> Float[Array, ""]:
        """That of the mean."""
        return standard_error(self.squares, self.number.astype(self.squares.dtype))


@dataclass(frozen=True)
class _Stream:
    """Samples, a batch at a time."""

    estimator: Hutchinson
    products: Products
    budget: Budget

    def samples(self, parameters: Parameters, key: Array, start: Any) -> tuple[Inexact[Array, " b"], Int[Array, " b"]]:
        """The quadratic forms of a batch of probes, and their numbers."""
        numbers = start + jnp.arange(self.budget.batch, dtype=jnp.int32)
        probes = draw(self.estimator.probes, key, numbers, self.products.size, self.products.dtype)
        return (probes.conj() * self.products(parameters, probes)).sum(1), numbers

    def run(self, parameters: Parameters, others: Any) -> tuple[Any, Int[Array, ""]]:
        """Value and standard error, and the number of samples that they are from."""
        key, limit, tolerance = others

        def step(so_far: _Moments) -> _Moments:
            samples, numbers = self.samples(parameters, key, so_far.number)
            return so_far.with_batch(samples, numbers < limit)

        def goes_on(so_far: _Moments) -> Bool[Array, ""]:
            if tolerance is None:
                return so_far.number < limit
            is_enough = (so_far.number >= self.budget.minimum) & tolerance.allows(so_far.mean, so_far.std_error)
            return (so_far.number < limit) & ~is_enough

        dtype = self.products.dtype
        start = _Moments(jnp.int32(0), jnp.zeros((), dtype), jnp.zeros((), dtype).real)
        is_single = self.budget.capacity == self.budget.batch  # then there is nothing to decide, and XLA fuses more
        moments = step(start) if is_single else while_loop(goes_on, step, start)
        return (moments.mean, moments.std_error), moments.number

    def derivative(self, others: Any, out: Any, along: Along) -> tuple[Any, Any]:
        """That of the mean of as many samples, and of its standard error."""
        (mean, std_error), count = out
        key = others[0]

        def step(i: Any, sums: Any) -> Any:
            start = i * self.budget.batch
            (samples, numbers), (rates, _) = along(lambda parameters: self.samples(parameters, key, start))
            rates = jnp.where(numbers < count, rates, 0)
            return sums[0] + rates.sum(), sums[1] + ((samples - mean).conj() * rates).real.sum()

        sum_of_rates, products = fori_loop(
            0,
            -(-count // self.budget.batch),
            step,
            (jnp.zeros_like(mean), jnp.zeros_like(std_error)),
            max_steps=-(-self.budget.capacity // self.budget.batch),
            kind=Checkpointed(),
            throw=False,
        )
        number, is_uncertain = count.astype(std_error.dtype), (count > 1) & (std_error > 0)
        scale = jnp.where(is_uncertain, std_error * number * (number - 1), 1)
        return sum_of_rates / number.astype(mean.dtype), jnp.where(is_uncertain, products / scale, 0)
