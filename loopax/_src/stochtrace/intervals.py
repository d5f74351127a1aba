"""What samples say about the error of their mean: a standard error, and confidence intervals."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int
from scipy.special import ndtri, stdtrit

LEVEL = 0.95  # of the interval that a tolerance bounds
_TABULATED = 128  # degrees of freedom, beyond which a series for Student's quantiles is exact to 1e-6


class Moments(NamedTuple):
    """Of real samples: their mean, the sum of the squared deviations d from it, and sum(d^3) / sum(d^2)."""

    mean: Float[Array, ""]
    squares: Float[Array, ""]
    tilt: Float[Array, ""]  # cubes would leave the range of float32 sooner than squares do

    @staticmethod
    def of(samples: Float[Array, " m"], is_counted: Bool[Array, " m"]) -> "Moments":
        """Those of the samples that are counted, which is one at least."""
        mean = jnp.where(is_counted, samples, 0).sum() / is_counted.sum().astype(samples.dtype)
        away = jnp.where(is_counted, samples - mean, 0)
        squares = (away**2).sum()
        return Moments(mean, squares, (away * (away**2 / or_one(squares))).sum())

    def merged(self, number: Int[Array, ""], other: "Moments", others: Int[Array, ""]) -> "Moments":
        """The moments of these `number` samples and of `others` more (Chan, Golub & LeVeque 1983; Pébay 2008)."""
        these, those = number.astype(self.mean.dtype), others.astype(self.mean.dtype)
        ahead, share, rest = other.mean - self.mean, those / (these + those), these / (these + those)
        between = ahead**2 * these * share
        squares = self.squares + other.squares + between
        own, of_other, of_between = (x / or_one(squares) for x in (self.squares, other.squares, between))
        tilt = self.tilt * own + other.tilt * of_other
        tilt += ahead * ((rest - share) * of_between + 3 * (rest * of_other - share * own))
        return Moments(self.mean + ahead * share, squares, tilt)


class Estimate(NamedTuple):
    """What an estimator has found: a mean of samples, and what is known about its error."""

    value: Inexact[Array, ""]
    std_error: Float[Array, ""]  # of `value`; infinite for one sample
    skewness: Float[Array, ""]  # of the samples, or of their real parts
    num_samples: Int[Array, ""]


def parts(numbers: Inexact[Array, "..."]) -> list[Float[Array, "..."]]:
    """Real numbers as they are, complex ones as their real and imaginary parts."""
    return [numbers.real, numbers.imag] if jnp.iscomplexobj(numbers) else [numbers]


def variance_of_mean(moments: list[Moments], num_samples: Int[Array, ""]) -> Float[Array, ""]:
    """That of independent samples' mean; `moments` are those of each part."""
    count = num_samples.astype(moments[0].mean.dtype)
    return _squares(moments) / jnp.maximum(count * (count - 1), 1)


def estimate_of(
    moments: list[Moments], num_samples: Int[Array, ""], variance: Float[Array, ""], rounding: Any = 0.0
) -> Estimate:
    """The mean of samples, which has this variance, and a standard error of rounding; a number's own is added."""
    means, count = [part.mean for part in moments], num_samples.astype(moments[0].mean.dtype)
    value = means[0] if len(means) == 1 else jax.lax.complex(*means)
    own = float(jnp.finfo(count.dtype).eps) ** 2 * jnp.stack([mean**2 for mean in means]).sum()
    of_rounding = rounding**2 + own
    std_error = jnp.where(num_samples > 1, safe_sqrt(variance + of_rounding), jnp.inf)
    # Rounding errors are not skewed.
    squares = _squares(moments) + count * (count - 1) * of_rounding
    return Estimate(value, std_error, _skewness(moments[0], squares, count), num_samples)


def _squares(moments: list[Moments]) -> Float[Array, ""]:
    return jnp.stack([part.squares for part in moments]).sum()


def _skewness(moments: Moments, squares: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """That of a population, from the moments of a sample; zero where two or fewer say nothing about it."""
    deviation = safe_sqrt(squares / count)
    of_sample = moments.tilt * (moments.squares / or_one(squares)) / or_one(deviation)
    unbiased = safe_sqrt(count * (count - 1)) / jnp.maximum(count - 2, 1)  # for normal samples (Joanes & Gill 1998)
    return jnp.where(count > 2, unbiased * of_sample, 0)


def or_one(x: Float[Array, ""]) -> Float[Array, ""]:
    """The number, or one in place of zero: a divisor."""
    return jnp.where(x == 0, 1, x)


def safe_sqrt(x: Float[Array, ""]) -> Float[Array, ""]:
    """The square root, with the derivative zero at zero, and zero for what is negative."""
    is_zero = x <= 0  # not where it is NaN
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def half_length(estimate: Estimate) -> Float[Array, ""]:
    """Half of the length of the 95 % interval, divided by what it is for normal errors: 1.96 standard errors."""
    below, above = ends_in_errors(LEVEL, estimate.num_samples, estimate.skewness)
    return estimate.std_error * ((below + above) / (2 * _normal_quantile(LEVEL)))


def ends_in_errors(
    level: float, num_samples: Int[Array, "..."], skewness: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """How many standard errors below and above a mean of samples its confidence interval ends.

    Student's quantiles for few samples, through the cubic transformation that removes the first effect of the samples'
    skewness (Hall 1992, "On the removal of skewness by transformation").
    """
    count = jnp.maximum(num_samples, 1).astype(skewness.dtype)
    quantile, tilt = _student_quantile(level, num_samples).astype(skewness.dtype), skewness / jnp.sqrt(count)
    return _untransformed(quantile, tilt), -_untransformed(-quantile, tilt)


def _untransformed(y: Float[Array, "..."], tilt: Float[Array, "..."]) -> Float[Array, "..."]:
    """The t with t + tilt t^2 / 3 + tilt^2 t^3 / 27 + tilt / 6 = y."""
    rest = y - tilt / 6
    root = jnp.cbrt(1 + tilt * rest)
    return 3 * rest / (root**2 + root + 1)  # 3 (root - 1) / tilt, without a division by zero


def _normal_quantile(level: float) -> float:
    """How many standard errors to either side a normal number is with this probability."""
    return float(ndtri((1 + level) / 2))


def _student_quantile(level: float, num_samples: Int[Array, "..."]) -> Float[Array, "..."]:
    """How many standard errors to either side Student's interval ends, for a mean of so many normal samples."""
    table = jnp.asarray(stdtrit(np.arange(1.0, _TABULATED + 1), (1 + level) / 2))
    freedom = jnp.maximum(num_samples - 1, 1)
    z, x = _normal_quantile(level), 1 / freedom.astype(table.dtype)
    # Abramowitz & Stegun 1964, 26.7.5
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    series = z + x * (first + x * (second + x * third))
    return jnp.where(freedom > _TABULATED, series, table[jnp.minimum(freedom, _TABULATED) - 1])
