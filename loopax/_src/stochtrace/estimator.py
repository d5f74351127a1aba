"""What all estimators have in common: how many samples they take, and when they end."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from loopax._src.loops import fori_loop, while_loop
from loopax._src.stochtrace.intervals import Estimate, half_length
from loopax._src.stochtrace.operators import Operator
from loopax._src.stochtrace.products import Probes, Products, check_probes

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

    def allows(self, estimate: Estimate) -> Bool[Array, ""]:
        """Whether the interval of an estimate is as short as that of a normal error of the allowed size."""
        return half_length(estimate).astype(self.rtol.dtype) <= self._allowed(estimate)

    def raised(self, estimate: Estimate) -> Estimate:
        """An estimate that this has ended, with a standard error that is not too small for it.

        It ended as soon as its samples agreed, which they also do by chance. So it is taken to be no more exact than it
        was asked to be, in so far as that is plausible.
        """
        is_known = (estimate.std_error > 0) & jnp.isfinite(estimate.std_error)
        known = estimate._replace(std_error=jnp.where(is_known, estimate.std_error, 1))
        half, allowed = half_length(known).astype(self.rtol.dtype), self._allowed(known)
        is_most = half * MOST_RAISED <= allowed
        is_between = (half < allowed) & ~is_most
        ratio = jnp.where(is_between, allowed, 1) / jnp.where(is_between, half, 1)
        raised = known.std_error * jnp.where(is_most, MOST_RAISED, ratio).astype(known.std_error.dtype)
        return estimate._replace(std_error=jnp.where(is_known, raised, estimate.std_error))

    def _allowed(self, estimate: Estimate) -> Float[Array, ""]:
        return self.atol + self.rtol * jnp.abs(estimate.value).astype(self.rtol.dtype)


class Stop(NamedTuple):
    """When an estimate ends, which is decided at run time: at a number of samples, or earlier at a tolerance."""

    limit: Int[Array, ""]
    tolerance: Tolerance | None


class Budget(NamedTuple):
    """How many samples an estimator may take, of as many products as it needs for one."""

    capacity: int  # static: there are at most so many
    batch: int  # that are evaluated together
    minimum: int  # that a tolerance is asked from on
    stop: Stop

    @property
    def is_single_batch(self) -> bool:
        """Then there is nothing to decide, and XLA fuses more of what is in no loop."""
        return self.capacity == self.batch

    def num_batches(self, count: Any) -> Any:
        """How many batches so many samples take, the last of which may not be full."""
        return -(-count // self.batch)

    def whole_batches(self, count: Any) -> Any:
        """The least number of samples in whole batches that is not less than `count`."""
        return self.num_batches(count) * self.batch

    def spend(
        self,
        stop: Stop,
        sampled: Sampled,
        with_batch: Callable[[Sampled, Int[Array, ""], Int[Array, ""]], Sampled],
        estimate: Callable[[Sampled, Int[Array, ""]], Estimate],
    ) -> tuple[Sampled, Int[Array, ""]]:
        """Take samples until it is time to stop: what there is of them, and their number.

        `with_batch(sampled, start, target)` adds those from number `start` on, a batch of them or as many as there are
        before `target`. `estimate(sampled, number)` is made for a tolerance, now and then. `stop` is that of this
        budget, as an argument because a function with a rule for its derivative closes over no traced values.
        """
        none, tolerance = jnp.int32(0), stop.tolerance

        def grown(sampled: Sampled, number: Int[Array, ""], target: Int[Array, ""]) -> Sampled:
            if self.is_single_batch:
                return with_batch(sampled, number, target)
            batches = self.num_batches(target - number)
            return fori_loop(0, batches, lambda i, old: with_batch(old, number + i * self.batch, target), sampled)

        if tolerance is None or self.is_single_batch:
            return grown(sampled, none, stop.limit), stop.limit

        def goes_on(state: tuple[Sampled, Int[Array, ""], Any]) -> Bool[Array, ""]:
            _, number, is_exact = state
            return (number < stop.limit) & ~is_exact

        def more(state: tuple[Sampled, Int[Array, ""], Any]) -> tuple[Sampled, Int[Array, ""], Any]:
            sampled, number, _ = state
            target = jnp.ceil(number.astype(jnp.float32) * GROWTH).astype(jnp.int32)
            target = jnp.minimum(self.whole_batches(jnp.maximum(target, self.minimum)), stop.limit)
            sampled = grown(sampled, number, target)
            return sampled, target, tolerance.allows(estimate(sampled, target))

        return while_loop(goes_on, more, (sampled, none, jnp.zeros((), bool)))[:2]


@dataclass(frozen=True)
class Estimator(ABC):
    """A way to estimate a trace. Use one of the subclasses."""

    probes: Probes = "rademacher"

    products_per_sample: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_probes(f"{type(self).__name__}(probes=...)", self.probes)

    def most_samples(self, size: int) -> int | None:
        """Return the most samples that are useful for an operator of this size; None: any number."""
        del size

    def check(self, operator: Operator) -> None:
        """Raise an error if this estimator cannot estimate the trace of the operator."""
        del operator

    @abstractmethod
    def run(self, products: Products, key: Array, budget: Budget) -> Estimate:
        """Estimate the trace."""
