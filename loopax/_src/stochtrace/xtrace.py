"""XTrace: every probe serves the basis of all others, and is the sample of what they miss."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from loopax._src.jax_internals import api_boundary
from loopax._src.pytrees.static import Why, static_bool
from loopax._src.stochtrace.factorizations import inverse, inverse_root, product
from loopax._src.stochtrace.operators import Operator, Probes
from loopax._src.stochtrace.sketch import Sketch, SketchEstimator, abs2, at_least_rounding, dots, filled

_DECLARED = Why("whether the estimate is one", "declare it: nothing else depends on it")


@api_boundary
@dataclass(frozen=True)
class XNysTrace(SketchEstimator):
    """Estimate the trace of a semidefinite operator from Nyström approximations.

    The operator must be positive or negative semidefinite; for other operators the estimate is wrong. A sample takes
    one product. If the eigenvalues decay, this estimator usually has the smallest error of the four. Source: Epperly,
    Tropp & Webber (2024), section 3.

    Parameters
    ----------
    probes
        The distribution of the probes: `"sphere"` (the default), `"normal"` or `"rademacher"`. With `"sphere"` and
        `"normal"`, the part of a probe outside of the span of the other probes is scaled to its mean length.
    positive_semidefinite
        Whether a matrix or a function is positive semidefinite: a declaration, which is not checked. The default is
        False. A `lineax` operator declares it by its tags.

    Raises
    ------
    ValueError
        `probes` is unknown.

    Notes
    -----
    Cost: an orthogonalization of `max_matvecs` vectors, and an eigendecomposition of a matrix with as many rows and
    columns. Memory for 2 n `max_matvecs` numbers, and a few times as many for derivatives.

    """

    probes: Probes = "sphere"
    positive_semidefinite: bool = False

    _has_images: ClassVar[bool] = False
    _rounding_per_sample: ClassVar[float] = 8.0  # it divides by square roots of small numbers

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        static_bool("XNysTrace(positive_semidefinite=...)", self.positive_semidefinite, _DECLARED)

    def _check(self, operator: Operator) -> None:
        """See `Estimator.check`."""
        if not (operator.sign or self.positive_semidefinite):
            raise ValueError(
                "estimate_trace(operator, estimator=XNysTrace()): the operator is not declared to be positive (or "
                "negative) semidefinite, and for others the estimate is wrong. Tag it, as in "
                "lineax.MatrixLinearOperator(A, lineax.positive_semidefinite_tag), or say "
                "XNysTrace(positive_semidefinite=True); if it is not, take XTrace()."
            )

    def _samples(self, sketch: Sketch, num_rows: Any) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"]]:
        """See `SketchEstimator._samples`."""
        gram = product(sketch.probes.conj(), sketch.basis.T, sketch.coordinates)  # w^H A w
        gram = (gram + gram.conj().T) / 2
        sign = jnp.sign(jnp.trace(gram).real)
        known, rounding = inverse_root(filled(gram * sign.astype(gram.dtype), sketch.is_counted(num_rows)))
        root = known + rounding
        # A = Q F F^H Q^H on the span of the probes
        factor = product(sketch.coordinates, known)
        factor += jax.lax.stop_gradient(product(sketch.coordinates, rounding))
        lengths = jnp.linalg.norm(root, axis=1, keepdims=True)
        root = root / lengths.astype(root.dtype)
        lost = product(factor, root.conj().T)  # what goes with each probe
        seen = product(sketch.basis.conj(), sketch.probes.T)
        rest = abs2(dots(lost, seen))
        outside, outside_both = self._outside(sketch, num_rows)
        samples = abs2(factor).sum() - abs2(lost).sum(0) + rest * outside
        # Without j too, a plane goes, from which the part of j is taken.
        along, products = product(root, root.conj().T), product(lost.conj().T, lost)
        alone = at_least_rounding(1 - abs2(along))
        of_both = jnp.diag(products).real[:, None] + jnp.diag(products).real[None] - 2 * (along * products.T).real
        without = abs2(factor).sum() - of_both / alone + rest[:, None] / alone * outside_both
        return sign * samples, sign * without

    def _outside(self, sketch: Sketch, num_rows: Any) -> tuple[Float[Array, " m"], Float[Array, "m m"]]:
        """How much longer the part of a probe i outside of the span of the others is on average; without j too."""
        probes = sketch.probes
        if self.probes == "rademacher":  # the only probes that do not look the same from every direction
            ones = jnp.ones_like(probes[:, 0].real)
            return ones, jnp.ones_like(ones[:, None] * ones[None])
        inverted = inverse(filled(product(probes.conj(), probes.T), sketch.is_counted(num_rows)))
        own = jnp.diag(inverted).real  # one over its squared length
        without = own[:, None] - abs2(inverted) / own[None]
        dimensions = (probes.shape[1] - num_rows + 1).astype(own.dtype)
        return dimensions * own, (dimensions + 1) * without


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

    def _samples(self, sketch: Sketch, num_rows: Any) -> tuple[Inexact[Array, " m"], Inexact[Array, "m m"]]:
        """See `SketchEstimator._samples`."""
        assert sketch.images is not None
        projected = product(sketch.basis.conj(), sketch.images.T)  # Q^H A Q
        seen = product(sketch.basis.conj(), sketch.probes.T)  # Q^H w, a column for each w
        through = product(sketch.images.conj(), sketch.probes.T)  # (A Q)^H w
        inverted = inverse(filled(sketch.coordinates, sketch.is_counted(num_rows))).conj().T
        # The direction that goes with a probe: Q times a column.
        lost = inverted / jnp.linalg.norm(inverted, axis=0, keepdims=True).astype(inverted.dtype)
        left = seen - lost * dots(lost, seen)[None]
        basis_part = jnp.trace(projected) - dots(lost, product(projected, lost))
        rest = dots(seen, lost) * dots(lost, sketch.coordinates)
        rest += dots(left, product(projected, left)) - dots(through, left)
        samples = basis_part + self._scale(sketch.probes, num_rows, dots(left, left)) * rest

        # The sample i on a basis without j either. Two directions are lost, which span a plane, and `first` and
        # `second` are the coefficients there of what the probe i has in it: the formulas above, with the plane in place
        # of a line.
        along, seen_along = product(lost.conj().T, lost), product(lost.conj().T, seen)
        products = product(lost.conj().T, projected, lost)
        own, other = jnp.diag(seen_along)[:, None], seen_along.T
        scale = 1 / at_least_rounding(1 - abs2(along)).astype(along.dtype)
        first, second = scale * (own - along * other), scale * (other - along.conj() * own)
        ahead = product(lost.conj().T, projected, seen)
        behind = product(seen.conj().T, projected, lost) - product(through.conj().T, lost)
        of_own, of_other = jnp.diag(products)[:, None], jnp.diag(products)[None]
        without = jnp.trace(projected) - scale * (of_own + of_other - along * products.T - along.conj() * products)
        rest = (dots(seen, product(projected, seen)) - dots(through, seen))[:, None]
        rest += first.conj() * (dots(lost, sketch.coordinates) - jnp.diag(ahead))[:, None]
        rest -= second.conj() * ahead.T + first * jnp.diag(behind)[:, None] + second * behind
        rest += first.conj() * (first * of_own + second * products) + second.conj() * (
            first * products.T + second * of_other
        )
        inside = dots(seen, seen)[:, None] - first.conj() * own - second.conj() * other
        return samples, without + self._scale(sketch.probes, num_rows, inside.T, others=1).T * rest

    def _scale(
        self, probes: Array, num_rows: Any, inside: Inexact[Array, "*k m"], others: int = 0
    ) -> Inexact[Array, "*k m"]:
        """How much longer the part of a probe outside of the others' basis is on average; `others` are left out too."""
        if self.probes == "rademacher":  # the only probes that do not look the same from every direction
            return jnp.ones_like(inside)
        lengths = dots(probes.T, probes.T)
        outside = (lengths if inside.ndim == 1 else lengths[None]) - inside
        dimensions = probes.shape[1] - num_rows + 1 + others
        return dimensions.astype(probes.dtype) / jnp.where(outside == 0, 1, outside)
