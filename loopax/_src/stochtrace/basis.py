"""What estimators with a basis have in common."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from loopax._src.stochtrace.estimator import Budget, Estimate, Estimator, abs2, safe_sqrt, standard_error
from loopax._src.stochtrace.growth import Growth
from loopax._src.stochtrace.products import Products, with_derivative
from loopax._src.stochtrace.sketch import Counted


@dataclass(frozen=True)
class BasisEstimator(Estimator):
    """An estimator that keeps a basis, which it knows how to make an estimate from."""

    has_images: ClassVar[bool] = True
    has_others: ClassVar[bool] = False

    def most_samples(self, size: int) -> int | None:
        """A basis has at most `size` directions."""
        return size

    @abstractmethod
    def samples(self, counted: Counted) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"] | None]:
        """An estimate of the trace from each row; and, where rows share a basis, from each row i without row j."""

    def run(self, products: Products, key: Array, budget: Budget) -> Estimate:
        """See `Estimator.run`."""
        growth = Growth(products, budget, self.probes, self.has_images, self.has_others, self.estimate)
        grow = with_derivative(growth.run, growth.derivative)
        sketch, num_rows = grow(products.parameters, (key, budget.limit, budget.tolerance))
        value, std_error = self.estimate(Counted(sketch, num_rows))
        return Estimate(value, std_error, num_rows)

    def estimate(self, counted: Counted) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        """The mean of the samples and its standard error.

        Samples that share a basis are correlated. Of a term of the estimate in which d probes meet, their spread shows
        1/d of the variance, and the jackknife d times (Efron & Stein 1981): the geometric mean of both is right for
        every d, and too large where terms are mixed.
        """
        samples, without = self.samples(counted)
        count = counted.num_rows.astype(samples.real.dtype)
        mean, squares = _mean_and_squares(samples, counted.is_counted)
        if without is None:
            return mean, standard_error(squares, count)
        others = counted.is_counted[:, None] & ~jnp.eye(samples.shape[0], dtype=bool)
        means = jnp.where(others, without, 0).sum(0) / jnp.maximum(count - 1, 1).astype(samples.dtype)
        _, of_jackknife = _mean_and_squares(means, counted.is_counted)
        return mean, standard_error(safe_sqrt(squares) * safe_sqrt(of_jackknife) * (count - 1), count)


def _mean_and_squares(
    values: Inexact[Array, " m"], is_counted: Bool[Array, " m"]
) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
    """The mean, and the sum of the squared deviations from it."""
    mean = jnp.where(is_counted, values, 0).sum() / is_counted.sum().astype(values.dtype)
    return mean, abs2(jnp.where(is_counted, values - mean, 0)).sum()
