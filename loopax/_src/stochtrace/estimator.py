"""What all estimators have in common: how many samples they take, and when they end."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jaxtyping import Array, Bool, Float, Inexact, Int
from scipy.special import ndtri, stdtrit

from loopax._src.loops import fori_loop, while_loop
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Why, positive_float, refuse_tracers
from loopax._src.stochtrace.operators import Operator, Probes, Products

_LEVEL = Why("Student's quantiles", "compute an interval for each of the levels in question")
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


class TraceEstimate(NamedTuple):
    """An estimate of a trace, with its error.

    Attributes
    ----------
    value
        The estimate, in the dtype of the operator, but at least float32.
    std_error
        The standard error of `value` (for complex operators, of the complex value). Infinite if the samples do not
        determine it, as for a single sample. If a tolerance has ended the estimate, `std_error` is raised by at most
        half.
    num_matvecs : int32[]
        The number of matrix-vector products.
    converged : bool[]
        Whether the interval is as short as the tolerance asks. True if there is no tolerance.
    num_samples : int32[]
        The number of samples. `value` is their mean; a sample takes one, two or three products.
    skewness
        The skewness of the samples (of their real parts). Zero if there are at most two samples.

    """

    value: Inexact[Array, ""]
    std_error: Float[Array, ""]
    num_matvecs: Int[Array, ""]
    converged: Bool[Array, ""]
    num_samples: Int[Array, ""]
    skewness: Float[Array, ""]

    def interval(self, level: float = 0.95) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return a confidence interval: for the share `level` of random keys, the interval contains the trace.

        The meaning, with Student's quantile q for `num_samples - 1` degrees of freedom::

            low, high = value - q * std_error, value + q * std_error     # where skewness is zero

        With a positive skewness, the upper part of the interval is longer and the lower part is shorter. For estimates
        of several lanes, each lane has an interval. For a complex trace, the interval is one for its real part.

        Parameters
        ----------
        level
            The confidence level: a Python float between 0 and 1. The default is 0.95.

        Returns
        -------
        low, high
            The ends of the interval, real.

        Raises
        ------
        TypeError
            `level` is traced, or is not a number.
        ValueError
            `level` is not between 0 and 1.

        Notes
        -----
        The interval assumes at least six samples, or eleven with sign probes. docs/traces.md has the measured coverage,
        also for fewer samples.

        Sources: Student's quantiles; Hall's transformation (1992) for the skewness. See docs/references.md.

        """
        what = "TraceEstimate.interval(level=...)"
        refuse_tracers(what, level, "a Python float", _LEVEL)
        probability = positive_float(what, level)
        if probability >= 1:
            raise ValueError(f"{what}: got {level}, expected a probability between 0 and 1, such as 0.95.")
        below, above = ends_in_errors(probability, self.num_samples, self.skewness)
        is_known = jnp.isfinite(self.std_error)  # an infinite one has no derivative
        std_error = jnp.where(is_known, self.std_error, 1)
        low, high = self.value.real - below * std_error, self.value.real + above * std_error
        beyond = jnp.where(jnp.isnan(self.std_error), jnp.nan, jnp.inf)
        return jnp.where(is_known, low, -beyond), jnp.where(is_known, high, beyond)


def parts(numbers: Inexact[Array, "..."]) -> list[Float[Array, "..."]]:
    """Real numbers as they are, complex ones as their real and imaginary parts."""
    return [numbers.real, numbers.imag] if jnp.iscomplexobj(numbers) else [numbers]


def variance_of_mean(moments: list[Moments], num_samples: Int[Array, ""]) -> Float[Array, ""]:
    """That of independent samples' mean; `moments` are those of each part."""
    count = num_samples.astype(moments[0].mean.dtype)
    return jnp.stack([part.squares for part in moments]).sum() / jnp.maximum(count * (count - 1), 1)


def estimate_of(
    moments: list[Moments], num_samples: Int[Array, ""], variance: Any = None, rounding: Any = 0.0
) -> TraceEstimate:
    """The mean of samples (independent ones, or with this variance), and its error; `rounding` is a standard error."""
    variance = variance_of_mean(moments, num_samples) if variance is None else variance
    means, count = [part.mean for part in moments], num_samples.astype(moments[0].mean.dtype)
    value = means[0] if len(means) == 1 else jax.lax.complex(*means)
    own = float(jnp.finfo(count.dtype).eps) ** 2 * jnp.stack([mean**2 for mean in means]).sum()
    of_rounding = rounding**2 + own
    std_error = jnp.where(num_samples > 1, safe_sqrt(variance + of_rounding), jnp.inf)
    # The skewness of a population, from the moments of a sample. Rounding errors are not skewed.
    squares = jnp.stack([part.squares for part in moments]).sum() + count * (count - 1) * of_rounding
    deviation = safe_sqrt(squares / count)
    of_sample = moments[0].tilt * (moments[0].squares / or_one(squares)) / or_one(deviation)
    unbiased = safe_sqrt(count * (count - 1)) / jnp.maximum(count - 2, 1)  # for normal samples (Joanes & Gill 1998)
    skewness = jnp.where(count > 2, unbiased * of_sample, 0)  # two samples, or one, say nothing about it
    # As if each sample took one product, and no tolerance was asked for: `estimate_trace` knows.
    return TraceEstimate(value, std_error, num_samples, jnp.ones((), bool), num_samples, skewness)


def or_one(x: Float[Array, ""]) -> Float[Array, ""]:
    """The number, or one in place of zero: a divisor."""
    return jnp.where(x == 0, 1, x)


def safe_sqrt(x: Float[Array, ""]) -> Float[Array, ""]:
    """The square root, with the derivative zero at zero, and zero for what is negative."""
    is_zero = x <= 0  # not where it is NaN
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def ends_in_errors(
    level: float, num_samples: Int[Array, "..."], skewness: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """How many standard errors below and above a mean of samples its confidence interval ends.

    Student's quantiles for few samples, through the cubic transformation that removes the first effect of the samples'
    skewness (Hall 1992, "On the removal of skewness by transformation").
    """
    # Student's quantile: from a table, or, for many samples, from a series (Abramowitz & Stegun 1964, 26.7.5).
    table = jnp.asarray(stdtrit(np.arange(1.0, _TABULATED + 1), (1 + level) / 2))
    freedom = jnp.maximum(num_samples - 1, 1)
    z, x = float(ndtri((1 + level) / 2)), 1 / freedom.astype(table.dtype)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    series = z + x * (first + x * (second + x * third))
    student = jnp.where(freedom > _TABULATED, series, table[jnp.minimum(freedom, _TABULATED) - 1])
    count = jnp.maximum(num_samples, 1).astype(skewness.dtype)
    quantile, tilt = student.astype(skewness.dtype), skewness / jnp.sqrt(count)

    def untransformed(y: Float[Array, "..."]) -> Float[Array, "..."]:
        """The t with t + tilt t^2 / 3 + tilt^2 t^3 / 27 + tilt / 6 = y."""
        rest = y - tilt / 6
        root = jnp.cbrt(1 + tilt * rest)
        return 3 * rest / (root**2 + root + 1)  # 3 (root - 1) / tilt, without a division by zero

    return untransformed(quantile), -untransformed(-quantile)


# A tolerance is looked at when there are so many times as many samples as at the last look. Each look is a chance to
# stop too early, as an error is estimated too small; and looks of estimators with a basis are costly.
GROWTH = 1.1
# How much the standard error of an estimate that a tolerance has ended may be raised.
MOST_RAISED = 1.5

Sampled = Any  # what an estimator keeps of its samples


class Tolerance(NamedTuple):
    """The error that is allowed: atol + rtol |value|."""

    rtol: Float[Array, ""]
    atol: Float[Array, ""]

    def allows(self, estimate: TraceEstimate) -> Bool[Array, ""]:
        """Whether the interval of an estimate is as short as that of a normal error of the allowed size."""
        half, allowed = self._compared(estimate)
        return half <= allowed

    def raised(self, estimate: TraceEstimate) -> TraceEstimate:
        """An estimate that this has ended, with a standard error that is not too small for it.

        It ended as soon as its samples agreed, which they also do by chance. So it is taken to be no more exact than it
        was asked to be, in so far as that is plausible.
        """
        is_known = (estimate.std_error > 0) & jnp.isfinite(estimate.std_error)
        known = estimate._replace(std_error=jnp.where(is_known, estimate.std_error, 1))
        half, allowed = self._compared(known)
        is_most = half * MOST_RAISED <= allowed
        is_between = (half < allowed) & ~is_most
        ratio = jnp.where(is_between, allowed, 1) / jnp.where(is_between, half, 1)
        raised = known.std_error * jnp.where(is_most, MOST_RAISED, ratio).astype(known.std_error.dtype)
        return estimate._replace(std_error=jnp.where(is_known, raised, estimate.std_error))

    def _compared(self, estimate: TraceEstimate) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Half of the length of the 95 % interval, divided by 1.96; and the most that it may be."""
        quantile = float(ndtri((1 + LEVEL) / 2))
        below, above = ends_in_errors(LEVEL, estimate.num_samples, estimate.skewness)
        half = estimate.std_error * ((below + above) / (2 * quantile))
        return half.astype(self.rtol.dtype), self.atol + self.rtol * jnp.abs(estimate.value).astype(self.rtol.dtype)


@partial(register_dataclass, data_fields=["limit", "tolerance"], meta_fields=["capacity", "batch", "minimum"])
@dataclass(frozen=True)
class Budget:
    """How many samples an estimator may take, of as many products as it needs for one, and when it ends."""

    limit: Int[Array, ""]  # it ends at so many samples, or earlier at a tolerance, which is decided at run time
    tolerance: Tolerance | None
    capacity: int  # static: there are at most so many
    batch: int  # that are evaluated together
    minimum: int  # that a tolerance is asked from on

    @property
    def is_single_batch(self) -> bool:
        """Then there is nothing to decide, and XLA fuses more of what is in no loop."""
        return self.capacity == self.batch

    def num_batches(self, count: Any) -> Any:
        """How many batches so many samples take, the last of which may not be full."""
        return -(-count // self.batch)

    def spend(
        self,
        sampled: Sampled,
        with_batch: Callable[[Sampled, Int[Array, ""], Int[Array, ""]], Sampled],
        estimate: Callable[[Sampled, Int[Array, ""]], TraceEstimate],
    ) -> tuple[Sampled, Int[Array, ""]]:
        """Take samples until it is time to stop: what there is of them, and their number.

        `with_batch(sampled, start, target)` adds those from number `start` on, a batch of them or as many as there are
        before `target`. `estimate(sampled, number)` is made for a tolerance, now and then.
        """
        none, tolerance = jnp.int32(0), self.tolerance

        def grown(sampled: Sampled, number: Int[Array, ""], target: Int[Array, ""]) -> Sampled:
            if self.is_single_batch:
                return with_batch(sampled, number, target)
            batches = self.num_batches(target - number)
            return fori_loop(0, batches, lambda i, old: with_batch(old, number + i * self.batch, target), sampled)

        if tolerance is None or self.is_single_batch:
            return grown(sampled, none, self.limit), self.limit

        def more(state: tuple[Sampled, Int[Array, ""], Any]) -> tuple[Sampled, Int[Array, ""], Any]:
            sampled, number, _ = state
            target = jnp.ceil(number.astype(jnp.float32) * GROWTH).astype(jnp.int32)
            target = jnp.minimum(self.num_batches(jnp.maximum(target, self.minimum)) * self.batch, self.limit)
            sampled = grown(sampled, number, target)
            return sampled, target, tolerance.allows(estimate(sampled, target))

        # [samples, their number, whether the tolerance is reached]
        start = sampled, none, jnp.zeros((), bool)
        return while_loop(lambda state: (state[1] < self.limit) & ~state[2], more, start)[:2]


@dataclass(frozen=True)
class Estimator(ABC):
    """A way to estimate a trace. Use one of the subclasses."""

    probes: Probes = "rademacher"

    products_per_sample: ClassVar[int] = 1
    _has_basis: ClassVar[bool] = False  # then no more samples are useful than the operator's vectors have elements

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.probes not in (choices := get_args(Probes)):
            name, named = type(self).__name__, ", ".join(map(repr, choices))
            raise ValueError(f"{name}(probes=...): got {describe(self.probes)}, expected one of {named}.")

    def _check(self, operator: Operator) -> None:
        """Raise an error if this estimator cannot estimate the trace of the operator."""
        del operator

    @abstractmethod
    def _run(self, products: Products, key: Array, budget: Budget) -> TraceEstimate:
        """Estimate the trace."""
