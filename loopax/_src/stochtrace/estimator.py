"""What all estimators have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from loopax._src.stochtrace.operators import Operator
from loopax._src.stochtrace.probes import Probes, check_probes
from loopax._src.stochtrace.products import Products


class Tolerance(NamedTuple):
    """The error that is allowed: atol + rtol |value|."""

    rtol: Float[Array, ""]
    atol: Float[Array, ""]

    def allows(self, value: Inexact[Array, ""], std_error: Float[Array, ""]) -> Bool[Array, ""]:
        """Whether an estimate is exact enough."""
        allowed = self.atol + self.rtol * jnp.abs(value).astype(self.rtol.dtype)
        return std_error.astype(allowed.dtype) <= allowed


class Budget(NamedTuple):
    """How many samples an estimator may take, of as many products as it needs for one."""

    capacity: int  # static: there are at most so many
    limit: Int[Array, ""]  # at run time
    minimum: int  # that a tolerance is asked from on
    batch: int  # that are evaluated together
    tolerance: Tolerance | None


class Estimate(NamedTuple):
    """What an estimator has found."""

    value: Inexact[Array, ""]
    std_error: Float[Array, ""]
    num_samples: Int[Array, ""]


@dataclass(frozen=True)
class Estimator(ABC):
    """A way to estimate a trace. Choose one of its subclasses."""

    probes: Probes = "rademacher"

    products_per_sample: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the options."""
        check_probes(f"{type(self).__name__}(probes=...)", self.probes)

    def most_samples(self, size: int) -> int | None:
        """How many samples make sense for an operator of this size; None: any number."""
        del size

    def check(self, operator: Operator) -> None:
        """Refuse an operator whose trace this does not estimate."""
        del operator

    @abstractmethod
    def run(self, products: Products, key: Array, budget: Budget) -> Estimate:
        """Estimate the trace."""


def standard_error(squares: Float[Array, ""], count: Float[Array, ""]) -> Float[Array, ""]:
    """That of a mean of `count` samples, from the sum of their squared deviations; infinite for one sample."""
    variance = squares / jnp.maximum(count * (count - 1), 1)
    return jnp.where(count > 1, safe_sqrt(variance), jnp.inf)


def safe_sqrt(x: Float[Array, ""]) -> Float[Array, ""]:
    """The square root, with the derivative zero at zero."""
    is_positive = x > 0
    return jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, x, 1)), 0)


def abs2(x: Inexact[Array, "..."]) -> Float[Array, "..."]:
    """The squared modulus."""
    return x.real**2 + x.imag**2
