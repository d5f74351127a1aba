"""`local`: a copy of NNX objects, for a loop that changes them."""

from typing import Any

import jax
from jaxtyping import PyTree

from loopax._src.nnx.functional import freeze, roots, thaw
from loopax._src.pytrees.leaves import describe


def local(module: PyTree[Any]) -> Any:
    """Copy Flax NNX objects, for a loop that changes them while the caller's stay as they are.

    The meaning::

        return copy.deepcopy(module)   # the arrays themselves are shared: they are immutable

    A loop changes the NNX objects in its carry in place. That is not wanted where one module serves many lanes, each
    with its own dropout counters and batch statistics, which the one module could not hold::

        def lane(model, x):                                   # jax.vmap(lane, in_axes=(None, 0))
            return lx.fori_loop(0, n, body, (lx.local(model), x))

    Parameters
    ----------
    module
        A module, an `nnx.Rngs`, or any pytree with NNX objects in it. What it holds twice is one object in the copy
        too.

    Returns
    -------
    copy
        The same, with new NNX objects that belong to the trace in which `local` is called.

    Raises
    ------
    TypeError
        There is no NNX object in `module`. Other models (Equinox modules, plain pytrees) are never changed in place.

    Notes
    -----
    Copies nothing that has a size. Gradients pass through. The copy draws the random numbers that the original would
    draw: lanes that share a module share its dropout masks. For masks of its own give each lane an `nnx.Rngs(key)`.

    """
    if not roots(module):
        leaf = describe(module) if jax.tree_util.all_leaves([module]) else f"a {type(module).__name__} without any"
        raise TypeError(
            f"local(module): got {leaf}, expected a Flax NNX object, or a pytree with NNX objects in it. "
            "Only these are changed in place; leave `local` out for other models."
        )
    return thaw(freeze(module))
