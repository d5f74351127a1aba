"""Hutch++: the trace on a basis exactly, and an estimate of the rest from other probes."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from loopax._src.jax_internals import api_boundary
from loopax._src.stochtrace.sketch import Counted, SketchEstimator, dots


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
