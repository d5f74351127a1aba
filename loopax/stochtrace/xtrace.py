"""XTrace: every probe serves the basis of all others, and is the sample of what they miss."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from loopax.stochtrace.basis import BasisEstimator
from loopax.stochtrace.inverses import inverse
from loopax.stochtrace.probes import Probes, is_rotation_invariant
from loopax.stochtrace.sketch import Counted, dots, filled


@dataclass(frozen=True)
class XTrace(BasisEstimator):
    """The exchangeable trace estimate (Epperly, Tropp & Webber 2024, section 2).

    For every probe: the trace on a basis of the images of all other probes, exactly, and an estimate of the rest from
    this one. A sample is two products. Where eigenvalues decay the error falls much faster than Hutchinson's.

    Cost: an orthogonalization of `max_matvecs / 2` vectors, a singular value decomposition of as many rows and
    columns; memory for 1.5 n `max_matvecs` numbers, and a few times that for derivatives.

    Parameters
    ----------
    probes
        "sphere", "normal" or "rademacher". With the first two, what a probe sees of the rest is scaled to what it
        should be long (section 2.3 there).

    Raises
    ------
    ValueError
        Unknown `probes`.

    """

    probes: Probes = "sphere"

    products_per_sample: ClassVar[int] = 2

    def samples(self, counted: Counted) -> Inexact[Array, " m"]:
        """See `BasisEstimator.samples`."""
        sketch = counted.sketch
        assert sketch.images is not None
        projected = sketch.basis.conj() @ sketch.images.T  # Q^H A Q
        seen = sketch.basis.conj() @ sketch.probes.T  # Q^H w, a column for each w
        through = sketch.images.conj() @ sketch.probes.T  # (A Q)^H w
        inverted = inverse(filled(sketch.coordinates, counted.is_counted)).conj().T
        lost = inverted / jnp.linalg.norm(inverted, axis=0, keepdims=True).astype(
            inverted.dtype
        )  # the direction that goes with a probe, as Q times a column
        left = seen - lost * dots(lost, seen)[None]
        basis_part = jnp.trace(projected) - dots(lost, projected @ lost)
        rest = dots(seen, lost) * dots(lost, sketch.coordinates)
        rest += dots(left, projected @ left) - dots(through, left)
        return basis_part + self._scale(counted, left) * rest

    def _scale(self, counted: Counted, left: Inexact[Array, "m m"]) -> Inexact[Array, " m"]:
        """How much longer the part of a probe outside of the others' basis is on average."""
        probes = counted.sketch.probes
        if not is_rotation_invariant(self.probes):
            return jnp.ones_like(probes[:, 0])
        outside = dots(probes.T, probes.T) - dots(left, left)
        dimensions = probes.shape[1] - counted.num_rows + 1
        return dimensions.astype(probes.dtype) / jnp.where(outside == 0, 1, outside)
