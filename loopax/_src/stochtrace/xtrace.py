"""XTrace: every probe serves the basis of all others, and is the sample of what they miss."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from loopax._src.jax_internals import api_boundary
from loopax._src.stochtrace.factorizations import inverse
from loopax._src.stochtrace.products import Probes, is_rotation_invariant
from loopax._src.stochtrace.sketch import Counted, SketchEstimator, Square, abs2, at_least_rounding, dots, filled


@api_boundary
@dataclass(frozen=True)
class XTrace(SketchEstimator):
    """Estimate the trace with the exchangeable estimator XTrace (Epperly, Tropp & Webber 2024, section 2).

    For each probe, XTrace takes the trace exactly on a basis of the images of all other probes, and estimates the rest
    with this probe. A sample takes two products. If the eigenvalues decay, the error falls much faster than with
    `Hutchinson`.

    Parameters
    ----------
    probes
        The distribution of the probes: `"sphere"` (the default), `"normal"` or `"rademacher"`. With `"sphere"` and
        `"normal"`, the part of a probe outside of the basis is scaled to its expected length (section 2.3 of the
        paper).

    Raises
    ------
    ValueError
        `probes` is unknown.

    Notes
    -----
    Cost: an orthogonalization of `max_matvecs / 2` vectors, and a singular value decomposition of a matrix with as many
    rows and columns. Memory for 1.5 n `max_matvecs` numbers, and a few times as many for derivatives.

    """

    probes: Probes = "sphere"

    products_per_sample: ClassVar[int] = 2

    def samples(self, counted: Counted) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"]]:
        """See `SketchEstimator.samples`."""
        sketch = counted.sketch
        assert sketch.images is not None
        projected = sketch.basis.conj() @ sketch.images.T  # Q^H A Q
        seen = sketch.basis.conj() @ sketch.probes.T  # Q^H w, a column for each w
        through = sketch.images.conj() @ sketch.probes.T  # (A Q)^H w
        inverted = inverse(filled(sketch.coordinates, counted.is_counted)).conj().T
        # The direction that goes with a probe: Q times a column.
        lost = inverted / jnp.linalg.norm(inverted, axis=0, keepdims=True).astype(inverted.dtype)
        left = seen - lost * dots(lost, seen)[None]
        basis_part = jnp.trace(projected) - dots(lost, projected @ lost)
        rest = dots(seen, lost) * dots(lost, sketch.coordinates)
        rest += dots(left, projected @ left) - dots(through, left)
        samples = basis_part + self._scale(counted, dots(left, left), 0) * rest
        return samples, self._without(counted, projected, seen, through, lost)

    def _without(
        self, counted: Counted, projected: Square, seen: Square, through: Square, lost: Square
    ) -> Inexact[Array, "m m"]:
        """The sample i on a basis without j either.

        Two directions are lost, which span a plane, and `first` and `second` are the coefficients there of what the
        probe i has in it: the formulas of `samples`, with the plane in place of a line.
        """
        along, seen_along = lost.conj().T @ lost, lost.conj().T @ seen
        products = lost.conj().T @ projected @ lost
        own, other = jnp.diag(seen_along)[:, None], seen_along.T
        scale = 1 / at_least_rounding(1 - abs2(along)).astype(along.dtype)
        first, second = scale * (own - along * other), scale * (other - along.conj() * own)
        ahead, behind = lost.conj().T @ projected @ seen, seen.conj().T @ projected @ lost - through.conj().T @ lost
        of_own, of_other = jnp.diag(products)[:, None], jnp.diag(products)[None]
        basis_part = jnp.trace(projected) - scale * (of_own + of_other - along * products.T - along.conj() * products)
        rest = (dots(seen, projected @ seen) - dots(through, seen))[:, None]
        rest += first.conj() * (dots(lost, counted.sketch.coordinates) - jnp.diag(ahead))[:, None]
        rest -= second.conj() * ahead.T + first * jnp.diag(behind)[:, None] + second * behind
        rest += first.conj() * (first * of_own + second * products) + second.conj() * (
            first * products.T + second * of_other
        )
        inside = dots(seen, seen)[:, None] - first.conj() * own - second.conj() * other
        return basis_part + self._scale(counted, inside.T, 1).T * rest

    def _scale(self, counted: Counted, inside: Inexact[Array, "*k m"], others: int) -> Inexact[Array, "*k m"]:
        """How much longer the part of a probe outside of the others' basis is on average; `others` are left out too."""
        probes = counted.sketch.probes
        if not is_rotation_invariant(self.probes):
            return jnp.ones_like(inside)
        outside = dots(probes.T, probes.T) - inside if inside.ndim == 1 else dots(probes.T, probes.T)[None] - inside
        dimensions = probes.shape[1] - counted.num_rows + 1 + others
        return dimensions.astype(probes.dtype) / jnp.where(outside == 0, 1, outside)
