"""Estimators with a basis: probes, and an orthonormal basis of their images, as many as are asked for at run time.

All matrices are stored by rows, `(capacity, n)`, with zeros from `count` on.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from loopax.loops import fori_loop, while_loop
from loopax.stochtrace.estimator import Budget, Estimate, Estimator, Tolerance, abs2, standard_error
from loopax.stochtrace.inverses import pseudo_inverse
from loopax.stochtrace.lapack import lane_by_lane
from loopax.stochtrace.operators import Operator
from loopax.stochtrace.probes import draw
from loopax.stochtrace.products import Along, Parameters, Products, with_derivative

Rows = Inexact[Array, "m n"]
Square = Inexact[Array, "m m"]

GROWTH = 1.1  # a tolerance is asked again when there are so many times as many samples


class Sketch(NamedTuple):
    """What is known of an operator A. A row is a sample; its probe w, a direction q of the basis, and so on."""

    probes: Rows
    basis: Rows
    coordinates: Square  # R[i, j]: A w_j = sum of R[i, j] q_i
    images: Rows | None = None  # A q
    others: tuple[Rows, Rows] | None = None  # further probes g, and A g


class Counted(NamedTuple):
    """A sketch, and how many of its rows there are."""

    sketch: Sketch
    num_rows: Int[Array, ""]

    @property
    def is_counted(self) -> Bool[Array, " m"]:
        """Which rows there are."""
        return jnp.arange(self.sketch.probes.shape[0], dtype=jnp.int32) < self.num_rows


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

    def run(self, operator: Operator, products: Products, key: Array, budget: Budget) -> Estimate:
        """See `Estimator.run`."""
        del operator
        growth = _Growth(self, products, budget)
        grow = with_derivative(growth.run, growth.derivative)
        sketch, count = grow(products.parameters, (key, budget.limit, budget.tolerance))
        value, std_error = self.estimate(Counted(sketch, count))
        return Estimate(value, std_error, count)

    def estimate(self, counted: Counted) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        """The mean of the samples and its standard error."""
        samples = jnp.where(counted.is_counted, self.samples(counted), 0)
        count = counted.num_rows.astype(samples.real.dtype)
        mean = samples.sum() / count.astype(samples.dtype)
        away = jnp.where(counted.is_counted, samples - mean, 0)
        return mean, standard_error(abs2(away).sum(), count)


@dataclass(frozen=True)
class _Growth:
    """A sketch that grows, a batch at a time."""

    estimator: BasisEstimator
    products: Products
    budget: Budget

    @property
    def rows(self) -> int:
        """Of the sketch."""
        return self._whole_batches(self.budget.capacity)

    def _whole_batches(self, count: Any) -> Any:
        return -(-count // self.budget.batch) * self.budget.batch

    def run(self, parameters: Parameters, others: Any) -> tuple[Sketch, Int[Array, ""]]:
        """The sketch, and the number of its rows."""
        key, limit, tolerance = others
        if tolerance is None:
            sketch, num_rows = self._grown(parameters, key, self._start(), limit)
        else:
            sketch, num_rows = self._grown_until_exact(parameters, key, limit, tolerance)
        return sketch, num_rows

    def _start(self) -> Counted:
        def empty() -> Rows:
            return jnp.zeros((self.rows, self.products.size), self.products.dtype)

        square = jnp.zeros((self.rows, self.rows), self.products.dtype)
        images = empty() if self.estimator.has_images else None
        others = (empty(), empty()) if self.estimator.has_others else None
        return Counted(Sketch(empty(), empty(), square, images, others), jnp.int32(0))

    def _grown_until_exact(
        self, parameters: Parameters, key: Array, limit: Int[Array, ""], tolerance: Tolerance
    ) -> Counted:
        """Ask for the error now and then: it takes as much as the cube of the number of rows."""

        def goes_on(state: tuple[Counted, Any]) -> Bool[Array, ""]:
            counted, is_exact = state
            return (counted.num_rows < limit) & ~is_exact

        def more(state: tuple[Counted, Any]) -> tuple[Counted, Any]:
            counted, _ = state
            target = jnp.ceil(counted.num_rows.astype(jnp.float32) * GROWTH).astype(jnp.int32)
            target = self._whole_batches(jnp.maximum(target, self.budget.minimum))
            counted = self._grown(parameters, key, counted, jnp.minimum(target, limit))
            return counted, tolerance.allows(*self.estimator.estimate(counted))

        return while_loop(goes_on, more, (self._start(), jnp.zeros((), bool)))[0]

    def _grown(self, parameters: Parameters, key: Array, counted: Counted, target: Int[Array, ""]) -> Counted:
        """With batches until there are `target` rows. There are whole ones so far."""
        batch = self.budget.batch
        if self.rows == batch:
            return self._with_batch(parameters, key, counted, target)

        def step(_: Any, counted: Counted) -> Counted:
            return self._with_batch(parameters, key, counted, target)

        return fori_loop(0, -(-(target - counted.num_rows) // batch), step, counted)

    def _with_batch(self, parameters: Parameters, key: Array, counted: Counted, target: Int[Array, ""]) -> Counted:
        """A batch of rows more, of which those from `target` on are zero."""
        sketch, start = counted
        numbers = start + jnp.arange(self.budget.batch, dtype=jnp.int32)
        is_new = numbers < target

        def with_rows(old: Rows, new: Rows) -> Rows:
            return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(is_new[:, None], new, 0), start, 0)

        probes = self._draw(key, numbers)
        images = self.products(parameters, probes)
        directions = self._orthonormal(sketch.basis, images, probes)
        basis = with_rows(sketch.basis, directions)
        columns = jnp.where(is_new[None], basis.conj() @ images.T, 0)
        sketch = sketch._replace(
            probes=with_rows(sketch.probes, probes),
            basis=basis,
            coordinates=jax.lax.dynamic_update_slice_in_dim(sketch.coordinates, columns, start, 1),
        )
        if sketch.images is not None:
            sketch = sketch._replace(images=with_rows(sketch.images, self.products(parameters, directions)))
        if sketch.others is not None:
            others = self._draw(key, -1 - numbers)
            pairs = zip(sketch.others, (others, self.products(parameters, others)), strict=True)
            sketch = sketch._replace(others=tuple(with_rows(old, new) for old, new in pairs))
        return Counted(sketch, jnp.minimum(start + self.budget.batch, target))

    def _draw(self, key: Array, numbers: Int[Array, " b"]) -> Rows:
        return draw(self.estimator.probes, key, numbers, self.products.size, self.products.dtype)

    def _orthonormal(self, basis: Rows, images: Rows, probes: Rows) -> Rows:
        """Directions that are orthogonal to the basis and to each other, and span what the images add to it.

        What images of rounding errors' size leave undecided, probes of that size decide: so an operator of low rank
        has a basis too.
        """
        norm = jnp.linalg.norm(images, axis=1).max()
        rounding = jnp.where(norm > 0, jnp.finfo(images.dtype).eps * norm / self.products.size**0.5, 1)
        new = images + rounding.astype(images.dtype) * probes
        if self.rows > self.budget.batch:  # there is a basis already
            # Twice is enough (Giraud, Langou & Rozloznik 2005), but for rounding errors that have become directions.
            new = _normalized(_orthogonal_to(basis, _orthogonal_to(basis, new)))
            new = _orthogonal_to(basis, new)
        return _normalized(new)

    def derivative(self, _: Any, out: Any, along: Along) -> Sketch:
        """That of a sketch of as many rows with the same probes.

        A basis can be turned without a change to its span. This is the derivative of the one that turns least.
        """
        sketch, count = out

        def products_of(rows: Rows, rates: Rows | None = None) -> Rows:
            moving = () if rates is None else ((rows,), (rates,))
            return along(lambda parameters, rows=rows: self.products.of_rows(parameters, rows, count), *moving)[1]

        rates = products_of(sketch.probes)
        coordinates = sketch.basis.conj() @ rates.T
        known = pseudo_inverse(filled(sketch.coordinates, Counted(sketch, count).is_counted))
        basis = known.T @ (rates - coordinates.T @ sketch.basis)
        return Sketch(
            probes=jnp.zeros_like(sketch.probes),
            basis=basis,
            coordinates=coordinates,
            images=None if sketch.images is None else products_of(sketch.basis, basis),
            others=None if sketch.others is None else (jnp.zeros_like(sketch.others[0]), products_of(sketch.others[0])),
        )


def filled(square: Square, is_counted: Bool[Array, " m"]) -> Square:
    """The matrix with its rows and columns that do not count replaced by those of an identity of its scale."""
    scale = jax.lax.stop_gradient(jnp.abs(square).max())
    identity = jnp.eye(square.shape[0], dtype=square.dtype) * jnp.where(scale > 0, scale, 1).astype(square.dtype)
    return jnp.where(is_counted[:, None] & is_counted[None], square, identity)


def dots(a: Inexact[Array, "m k"], b: Inexact[Array, "m k"]) -> Inexact[Array, " k"]:
    """The inner product a^H b of each pair of columns."""
    return (a.conj() * b).sum(0)


def _normalized(rows: Rows) -> Rows:
    """Orthonormal rows of the same span."""
    # The barrier keeps XLA from moving the transpose into products, for which it has slow programs only.
    return jax.lax.optimization_barrier(lane_by_lane(lambda rows: jnp.linalg.qr(rows.T)[0].T)(rows))


def _orthogonal_to(basis: Rows, rows: Rows) -> Rows:
    return rows - (rows @ basis.conj().T) @ basis
