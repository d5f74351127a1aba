"""Any number of items through a fixed number of lanes: `lanes_map`."""

from collections.abc import Callable
from typing import Any, TypeVar

from jaxtyping import PyTree

from loopax._src import core
from loopax._src.core.jaxpr.util import split_list, stacked
from loopax._src.frontend.options import check_callable
from loopax._src.frontend.references import refuse_references_in
from loopax._src.frontend.run_time_checks import settle
from loopax._src.frontend.trace_program import item_program
from loopax._src.jax_internals import api_boundary, zeros
from loopax._src.nnx.functional import freeze, thaw
from loopax._src.pytrees.leaves import pack, restore_weak
from loopax._src.pytrees.static import Why, positive_int

R = TypeVar("R")

_LANES = Why("the size of the batch in the program", "choose one for all calls: results do not depend on it")


@api_boundary
def lanes_map(f: Callable[[Any], R], xs: PyTree[Any], *, num_lanes: int = 256) -> R:
    """Map a function that holds a loop over any number of items, with a fixed number of lanes.

    The meaning::

        return stack([f(x) for x in xs])

    All lanes step together. A lane that has finished an item takes the next item, while other lanes go on. The time
    depends on the sum of the steps of all items, not on the slowest item.

    Parameters
    ----------
    f
        The function: `f(x)` returns the result of one item. `f` holds exactly one loop of loopax, outside of `cond`,
        `scan` and other loops. The code before and after the loop runs once for each item.
    xs
        The items: a pytree of arrays `(items, ...)` with the same number of items. Leaves that are not arrays are
        passed to `f` unchanged.
    num_lanes
        The number of items that are computed at a time: an int from 1 on. The default is 256.

    Returns
    -------
    ys
        The stacked results, `(items, ...)`, in the order of `xs`.

    Raises
    ------
    TypeError
        - `num_lanes` is not an int, or is traced.
        - `f` is not callable, or changes a Flax NNX object in `xs`.
    ValueError
        - `num_lanes` is less than 1.
        - `f` holds no loop, or several.
        - The arrays of `xs` have unequal numbers of items, or there is no array.

    Notes
    -----
    Memory: inputs, outputs and the state of all lanes. A gradient stores 16 such states, and what the loop's `kind`
    stores of one round; in a round, an eighth of the lanes finishes. Apart from inputs and outputs, memory does not
    grow with the number of items.

    Cost: about (sum of all steps) / `num_lanes` iterations, each for all lanes. Forward and gradient together evaluate
    the body at most four to five times for each step. If the loop in `f` scans rows, each lane reads its own row; the
    gradient of such rows costs time in proportion to their size in each iteration.

    Derivatives: forward and reverse mode, in every order.

    """
    check_callable("f of lanes_map", f)
    num_lanes = positive_int("lanes_map(num_lanes=...)", num_lanes, "lanes", _LANES)
    frozen = freeze(xs)
    refuse_references_in("lanes_map(xs=...)", frozen, "Give its value (`ref[...]`).")
    arrays, spec = pack(frozen)
    counts = {x.shape[0] if x.ndim else -1 for x in arrays}
    if len(counts) != 1 or -1 in counts:
        raise ValueError(
            "lanes_map(xs=...): every array in xs needs a leading axis with as many items. Got shapes "
            f"{', '.join(str(x.shape) for x in arrays) or '(no arrays)'}. Close over values that all items share."
        )
    (items,) = counts
    made = item_program("lanes_map", f, spec.rows())
    if not items:
        outputs = [zeros(stacked(aval, 0)) for aval in made.program.out_avals]
    else:
        outputs = core.run_queue(made.program, made.shared, arrays, items, num_lanes)
    of_checks, ys = split_list(outputs, [sum(made.flags.sizes)])
    ys = restore_weak(ys, made.results.avals)
    return thaw(settle(made.results.unpack(ys), made.flags.checks(of_checks)))
