"""What estimators with a basis have in common."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from loopax.stochtrace.estimator import Budget, Estimate, Estimator, abs2, standard_error
from loopax.stochtrace.growth import Growth
from loopax.stochtrace.products import Products, with_derivative
from loopax.stochtrace.sketch import Counted


@dataclass(frozen=True)
class BasisEstimator(Estimator):
    """An estimator that keeps a basis, which it knows how to make an estimate from."""

    has_images: ClassVar[bool] = True
    has_others: ClassVar[bool] = False

    def most_samples(self, size: int) -> int | None:
        """A basis has at most `size` directions."""
        return size

    @abstractmethod
    def samples(self, counted: Counted) -> Inexact[Array, " m"]:
        """An estimate of the trace from each row."""

    def run(self, products: Products, key: Array, budget: Budget) -> Estimate:
        """See `Estimator.run`."""
        growth = Growth(products, budget, self.probes, self.has_images, self.has_others, self.estimate)
        grow = with_derivative(growth.run, growth.derivative)
        sketch, num_rows = grow(products.parameters, (key, budget.limit, budget.tolerance))
        value, std_error = self.estimate(Counted(sketch, num_rows))
        return Estimate(value, std_error, num_rows)

    def estimate(self, counted: Counted) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        """The mean of the samples and its standard error."""
        samples = jnp.where(counted.is_counted, self.samples(counted), 0)
        count = counted.num_rows.astype(samples.real.dtype)
        mean = samples.sum() / count.astype(samples.dtype)
        away = jnp.where(counted.is_counted, samples - mean, 0)
        return mean, standard_error(abs2(away).sum(), count)
