"""Sketches that grow until they have as many rows as are asked for at run time, or say enough."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from loopax._src.loops import fori_loop, while_loop
from loopax._src.stochtrace.estimator import Budget, Tolerance
from loopax._src.stochtrace.inverses import pseudo_inverse
from loopax._src.stochtrace.lapack import lane_by_lane
from loopax._src.stochtrace.probes import Probes, draw
from loopax._src.stochtrace.products import Along, Parameters, Products
from loopax._src.stochtrace.sketch import Counted, Rows, Sketch, filled

GROWTH = 1.1  # a tolerance is asked again when there are so many times as many samples


@dataclass(frozen=True)
class Growth:
    """A sketch that grows, a batch at a time."""

    products: Products
    budget: Budget
    probes: Probes
    has_images: bool
    has_others: bool
    estimate: Callable[[Counted], tuple[Any, Any]]  # value and standard error

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
        images = empty() if self.has_images else None
        others = (empty(), empty()) if self.has_others else None
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
            return counted, tolerance.allows(*self.estimate(counted))

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
        others = self._draw(key, -1 - numbers) if self.has_others else probes[:0]
        images, of_others = jnp.split(self.products(parameters, jnp.concatenate([probes, others])), [len(probes)])
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
            pairs = zip(sketch.others, (others, of_others), strict=True)
            sketch = sketch._replace(others=tuple(with_rows(old, new) for old, new in pairs))
        return Counted(sketch, jnp.minimum(start + self.budget.batch, target))

    def _draw(self, key: Array, numbers: Int[Array, " b"]) -> Rows:
        return draw(self.probes, key, numbers, self.products.size, self.products.dtype)

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


def _normalized(rows: Rows) -> Rows:
    """Orthonormal rows of the same span."""
    # The barrier keeps XLA from moving the transpose into products, for which it has slow programs only.
    return jax.lax.optimization_barrier(lane_by_lane(lambda rows: jnp.linalg.qr(rows.T)[0].T)(rows))


def _orthogonal_to(basis: Rows, rows: Rows) -> Rows:
    return rows - (rows @ basis.conj().T) @ basis
