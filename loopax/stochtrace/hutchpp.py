"""Hutch++: the trace on a basis exactly, and an estimate of the rest from other probes."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from loopax.stochtrace.sketch import BasisEstimator, Counted, dots


@dataclass(frozen=True)
class HutchPlusPlus(BasisEstimator):
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

    def samples(self, counted: Counted) -> Inexact[Array, " m"]:
        """See `BasisEstimator.samples`."""
        basis, images, others, of_others = counted.sketch.basis, *_three(counted)
        projected = basis.conj() @ images.T  # Q^H A Q
        seen = basis.conj() @ others.T  # Q^H g, a column for each g
        rest = (others.conj() * of_others).sum(1) + dots(seen, projected @ seen)
        rest -= dots(images.conj() @ others.T, seen) + dots(seen, basis.conj() @ of_others.T)
        return jnp.trace(projected) + rest


def _three(counted: Counted) -> tuple[Array, Array, Array]:
    sketch = counted.sketch
    assert sketch.images is not None
    assert sketch.others is not None
    assert sketch.images_of_others is not None
    return sketch.images, sketch.others, sketch.images_of_others
