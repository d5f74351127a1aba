"""What estimators with a basis have in common: a sketch of the operator, how it grows, and the estimate from it.

All matrices are stored by rows, `(capacity, n)`, with zeros from the number of rows on.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from loopax._src.jax_internals import api_boundary
from loopax._src.stochtrace.estimator import (
    Budget,
    Estimator,
    Moments,
    TraceEstimate,
    estimate_of,
    parts,
    safe_sqrt,
    variance_of_mean,
)
from loopax._src.stochtrace.factorizations import lane_by_lane, product, pseudo_inverse
from loopax._src.stochtrace.operators import Along, Parameters, Products, draw, with_derivative

# The probes that are added to images make an error in the trace: as measured, this many times the rounding error of a
# number as large as the operator's norm.
ROUNDING = 8.0
LEAST_OF_GEOMETRIC_MEAN = 0.5  # as simulated: 0.4 to 0.7 cover as often, and more costs products

Rows = Inexact[Array, "m n"]
Square = Inexact[Array, "m m"]


class Sketch(NamedTuple):
    """Products of an operator A with random probes, and a basis of them. Each row belongs to a sample.

    A sample has a probe w, a direction q of the basis, and so on.
    """

    probes: Rows
    basis: Rows
    coordinates: Square  # R[i, j]: A w_j = sum of R[i, j] q_i
    images: Rows | None = None  # A q
    others: tuple[Rows, Rows] | None = None  # further probes g, and A g

    def is_counted(self, num_rows: Int[Array, ""]) -> Bool[Array, " m"]:
        """Which rows there are, of which there are so many."""
        return jnp.arange(self.probes.shape[0], dtype=jnp.int32) < num_rows


@dataclass(frozen=True)
class SketchEstimator(Estimator):
    """An estimator that makes a sample from each row of a sketch."""

    _has_basis: ClassVar[bool] = True
    _has_images: ClassVar[bool] = True
    _has_others: ClassVar[bool] = False
    _rounding_per_sample: ClassVar[float] = 0.0  # what each sample adds to `ROUNDING`

    @abstractmethod
    def _samples(self, sketch: Sketch, num_rows: Any) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"] | None]:
        """An estimate of the trace from each row; and, where rows share a basis, from each row i without row j."""

    def _run(self, products: Products, key: Array, budget: Budget) -> TraceEstimate:
        """See `Estimator.run`."""
        capacity = budget.num_batches(budget.capacity) * budget.batch  # rows of a sketch: whole batches

        def with_batch(
            parameters: Parameters, key: Array, sketch: Sketch, start: Int[Array, ""], target: Int[Array, ""]
        ) -> Sketch:
            """A batch of rows more, of which those from `target` on are zero."""
            numbers = start + jnp.arange(budget.batch, dtype=jnp.int32)
            is_new = numbers < target

            def with_rows(old: Rows, new: Rows) -> Rows:
                return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(is_new[:, None], new, 0), start, 0)

            # Before: rows up to `start`. After: those of this batch, too: in the basis, orthonormal to all before them.
            sample = partial(draw, self.probes, key, size=products.size, dtype=products.dtype)
            probes = sample(numbers)
            others = sample(-1 - numbers) if self._has_others else probes[:0]
            images, of_others = jnp.split(products(parameters, jnp.concatenate([probes, others])), [len(probes)])
            directions = _orthonormal(sketch.basis, images, probes, has_basis=capacity > budget.batch)
            basis = with_rows(sketch.basis, directions)
            columns = jnp.where(is_new[None], product(basis.conj(), images.T), 0)
            sketch = sketch._replace(
                probes=with_rows(sketch.probes, probes),
                basis=basis,
                coordinates=jax.lax.dynamic_update_slice_in_dim(sketch.coordinates, columns, start, 1),
            )
            if sketch.images is not None:
                sketch = sketch._replace(images=with_rows(sketch.images, products(parameters, directions)))
            if sketch.others is not None:
                pairs = zip(sketch.others, (others, of_others), strict=True)
                sketch = sketch._replace(others=tuple(with_rows(old, new) for old, new in pairs))
            return sketch

        def grown(parameters: Parameters, others: tuple[Array, Budget]) -> tuple[Sketch, Int[Array, ""]]:
            """The sketch, and the number of its rows."""
            key, budget = others
            none = partial(jnp.zeros, (capacity, products.size), products.dtype)
            images, further = none() if self._has_images else None, (none(), none()) if self._has_others else None
            empty = Sketch(none(), none(), jnp.zeros((capacity, capacity), products.dtype), images, further)
            return budget.spend(empty, partial(with_batch, parameters, key), self._estimate)

        def derivative(_: Any, out: Any, along: Along) -> Sketch:
            """That of a sketch of as many rows with the same probes.

            A basis can be turned without a change to its span. This is the derivative of the one that turns least.
            """
            sketch, count = out

            def products_of(rows: Rows, rates: Rows | None = None) -> Rows:
                moving = () if rates is None else ((rows,), (rates,))
                return along(lambda parameters, rows=rows: products.of_rows(parameters, rows, count), *moving)[1]

            rates = products_of(sketch.probes)
            coordinates = product(sketch.basis.conj(), rates.T)
            known = pseudo_inverse(filled(sketch.coordinates, sketch.is_counted(count)))
            basis = product(known.T, rates - product(coordinates.T, sketch.basis))
            images = None if sketch.images is None else products_of(sketch.basis, basis)
            others = sketch.others and (jnp.zeros_like(sketch.others[0]), products_of(sketch.others[0]))
            return Sketch(jnp.zeros_like(sketch.probes), basis, coordinates, images, others)

        return self._estimate(*with_derivative(grown, derivative)(products.parameters, (key, budget)))

    def _estimate(self, sketch: Sketch, num_rows: Int[Array, ""]) -> TraceEstimate:
        """The mean of the samples, and its error."""
        is_counted = sketch.is_counted(num_rows)
        samples, without = self._samples(sketch, num_rows)
        moments = [Moments.of(part, is_counted) for part in parts(samples)]
        variance = variance_of_mean(moments, num_rows)
        if without is not None:
            variance = _variance_with_shared_rows(samples, without, is_counted, variance)
        # Rounding errors are those of n numbers of the size of the Frobenius norm, whose square is the mean of |A w|^2.
        dtype = sketch.probes.real.dtype
        count = num_rows.astype(dtype)
        squared_norm = abs2(jnp.where(is_counted[None], sketch.coordinates, 0)).sum() / count
        number = sketch.probes.shape[1] ** 0.5 + ROUNDING + self._rounding_per_sample * count
        rounding = float(jnp.finfo(dtype).eps) * number * safe_sqrt(squared_norm)
        return estimate_of(moments, num_rows, variance, rounding)


def _variance_with_shared_rows(
    samples: Inexact[Array, " m"],
    without: Inexact[Array, "m m"],
    is_counted: Bool[Array, " m"],
    if_independent: Float[Array, ""],
) -> Float[Array, ""]:
    """The variance of the mean of samples that share a basis.

    Let t_ij be the sample t_i without the probe j. Given all probes but the i-th, both have the trace T as their mean.
    So the covariance E[(t_i - T) (t_j - T)] is the mean of (t_i - t_ij) (t_j - t_ji): all other terms of this product
    have the mean zero. The variance of the mean is this covariance, and what the spread of the samples shows.

    Where eigenvalues fall very quickly, it is mostly noise. So the variance is at least half of the geometric mean of
    what the spread and the jackknife say, of which the first is too small and the other too large (Efron & Stein 1981).
    """
    count = is_counted.sum().astype(if_independent.dtype)
    are_pairs = is_counted[:, None] & is_counted[None] & ~jnp.eye(samples.shape[0], dtype=bool)
    by_other = jnp.where(are_pairs, samples[:, None] - without, 0)
    covariance = (by_other * by_other.conj().T).real.sum() / jnp.maximum(count * (count - 1), 1)
    means = jnp.where(are_pairs, without, 0).sum(0) / jnp.maximum(count - 1, 1).astype(without.dtype)
    squares = sum(Moments.of(part, is_counted).squares for part in parts(means))
    jackknife = squares * (count - 1) / count
    least = LEAST_OF_GEOMETRIC_MEAN * safe_sqrt(if_independent) * safe_sqrt(jackknife)
    return jnp.maximum(if_independent + jnp.maximum(covariance, 0), least)


def _orthonormal(basis: Rows, images: Rows, probes: Rows, has_basis: bool) -> Rows:
    """Directions that are orthogonal to the basis and to each other, and span what the images add to it.

    What images of rounding errors' size leave undecided, probes of that size decide: so an operator of low rank has a
    basis too. Less of the probes would be lost in the rounding of this sum.
    """
    norm = jnp.linalg.norm(images, axis=1).max()
    part = jnp.finfo(images.dtype).eps / probes.shape[1] ** 0.5
    new = images + jnp.where(norm > 0, part * norm, 1).astype(images.dtype) * probes
    if has_basis:
        # Twice is enough (Giraud, Langou & Rozloznik 2005), but for rounding errors that have become directions.
        new = _normalized(_orthogonal_to(basis, _orthogonal_to(basis, new)))
        new = _orthogonal_to(basis, new)
    return _normalized(new)


def _normalized(rows: Rows) -> Rows:
    """Orthonormal rows of the same span."""
    # The barrier keeps XLA from moving the transpose into products, for which it has slow programs only.
    return jax.lax.optimization_barrier(lane_by_lane(lambda rows: jnp.linalg.qr(rows.T)[0].T)(rows))


def _orthogonal_to(basis: Rows, rows: Rows) -> Rows:
    return rows - product(rows, basis.conj().T, basis)


def filled(square: Square, is_counted: Bool[Array, " m"]) -> Square:
    """The matrix with its rows and columns that do not count replaced by those of an identity of its scale."""
    scale = jax.lax.stop_gradient(jnp.abs(square).max())
    identity = jnp.eye(square.shape[0], dtype=square.dtype) * jnp.where(scale > 0, scale, 1).astype(square.dtype)
    return jnp.where(is_counted[:, None] & is_counted[None], square, identity)


def at_least_rounding(x: Square) -> Square:
    """What is not a rounding error of one; one where it is."""
    return jnp.where(x > x.shape[0] * jnp.finfo(x.dtype).eps, x, 1)


def dots(a: Inexact[Array, "m k"], b: Inexact[Array, "m k"]) -> Inexact[Array, " k"]:
    """The inner product a^H b of each pair of columns."""
    return (a.conj() * b).sum(0)


def abs2(x: Inexact[Array, "..."]) -> Float[Array, "..."]:
    """The squared modulus."""
    return x.real**2 + x.imag**2


@api_boundary
@dataclass(frozen=True)
class HutchPlusPlus(SketchEstimator):
    """Take the trace exactly on a basis, and estimate the rest by Hutchinson's method.

    A sample takes three products: one for the basis, one on the basis, one for the rest. For positive semidefinite
    operators, the error falls with the number of products, not only with its square root. The standard error is that of
    the rest, for the given basis. Source: Meyer, Musco, Musco & Woodruff (2021).

    Parameters
    ----------
    probes
        The distribution of the probes: `"rademacher"` (the default), `"normal"` or `"sphere"`.

    Raises
    ------
    ValueError
        `probes` is unknown.

    Notes
    -----
    Cost: an orthogonalization of `max_matvecs / 3` vectors. Memory for 5/3 n `max_matvecs` numbers, and a few times as
    many for derivatives.

    """

    products_per_sample: ClassVar[int] = 3
    _has_others: ClassVar[bool] = True

    def _samples(self, sketch: Sketch, num_rows: Any) -> tuple[Inexact[Array, " m"], None]:
        """See `SketchEstimator._samples`."""
        del num_rows
        assert sketch.images is not None
        assert sketch.others is not None
        others, of_others = sketch.others
        projected = product(sketch.basis.conj(), sketch.images.T)  # Q^H A Q
        seen = product(sketch.basis.conj(), others.T)  # Q^H g, a column for each g
        rest = (others.conj() * of_others).sum(1) + dots(seen, product(projected, seen))
        mixed = dots(product(sketch.images.conj(), others.T), seen)
        rest -= mixed + dots(seen, product(sketch.basis.conj(), of_others.T))
        return jnp.trace(projected) + rest, None
