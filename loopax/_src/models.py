"""`local`: a copy of NNX objects, for a loop that changes them."""

from typing import Any

import jax
from jaxtyping import PyTree

from loopax._src.jax_internals import api_boundary
from loopax._src.nnx.functional import freeze, roots, thaw
from loopax._src.pytrees.leaves import describe


@api_boundary
def local(module: PyTree[Any]) -> Any:
    """Copy Flax NNX objects, so that a loop changes the copy and not the caller's objects.

    The meaning::

        return copy.deepcopy(module)   # the arrays themselves are shared: they are immutable

    A loop changes the NNX objects in its carry in place. If many lanes share one module, this module cannot hold the
    dropout counters and batch statistics of each lane. `local` gives each lane its own copy::

        def lane(model, x):                                   # jax.vmap(lane, in_axes=(None, 0))
            return lx.fori_loop(0, n, body, (lx.local(model), x))

    Parameters
    ----------
    module
        A module, an `nnx.Rngs`, or any pytree with NNX objects in it. An object that occurs twice occurs twice in the
        copy, as one object.

    Returns
    -------
    copy
        The copy, with new NNX objects that belong to the trace in which `local` is called.

    Raises
    ------
    TypeError
        `module` holds no NNX object. Loops never change other models (Equinox modules, plain pytrees) in place.

    Notes
    -----
    Cost: no array is copied. Derivatives: gradients pass through.

    The copy draws the same random numbers as the original: lanes that share a module share its dropout masks. To give
    each lane its own masks, give each lane an `nnx.Rngs(key)`.

    """
    if not roots(module):
        leaf = describe(module) if jax.tree_util.all_leaves([module]) else f"a {type(module).__name__} without any"
        raise TypeError(
            f"local(module): got {leaf}, expected a Flax NNX object, or a pytree with NNX objects in it. "
            "Only these are changed in place; leave `local` out for other models."
        )
    return thaw(freeze(module))
