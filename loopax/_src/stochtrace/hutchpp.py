"""Hutch++: the trace on a basis exactly, and an estimate of the rest from other probes."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from loopax._src.stochtrace.sketch import Counted, SketchEstimator, dots


@dataclass(frozen=True)
class HutchPlusPlus(SketchEstimator):
    """The trace on a basis, and Hutchinson's estimate of the rest (Meyer, Musco, Musco & Woodruff 2021).

    A sample is three products: one for the basis, one on it, one for the rest. The error falls with their number, not
    with its square root, for positive semidefinite operators; the standard error is that of the rest, given the basis.

    Cost: an orthogonalization of `max_matvecs / 3` vectors; memory for 5/3 n `max_matvecs` numbers, and a few times
    that for derivatives.

    Parameters
    ----------
    probes
        "rademacher", "normal" or "sphere".

    Raises
    ------
    ValueError
        Unknown `probes`.

    """

    products_per_sample: ClassVar[int] = 3
    has_others: ClassVar[bool] = True

    def samples(self, counted: Counted) -> tuple[Inexact[Array, " m"], None]:
        """See `SketchEstimator.samples`."""
        sketch = counted.sketch
        assert sketch.images is not None
        assert sketch.others is not None
        others, of_others = sketch.others
        projected = sketch.basis.conj() @ sketch.images.T  # Q^H A Q
        seen = sketch.basis.conj() @ others.T  # Q^H g, a column for each g
        rest = (others.conj() * of_others).sum(1) + dots(seen, projected @ seen)
        rest -= dots(sketch.images.conj() @ others.T, seen) + dots(seen, sketch.basis.conj() @ of_others.T)
        return jnp.trace(projected) + rest, None
