"""A step repeated on its own results: autoregressive models, integrators, environments."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from loopax._src.core import row_buffers as buffers
from loopax._src.core.finite import Finite
from loopax._src.core.ir.lanes import LanesLike
from loopax._src.core.jaxpr.util import stacked
from loopax._src.frontend import options as arguments
from loopax._src.frontend.rows import row_types
from loopax._src.frontend.run import run_scan
from loopax._src.frontend.steps import call_user, scan_rows, step_back
from loopax._src.frontend.trace import strongly_typed
from loopax._src.history import History
from loopax._src.jax_internals import api_boundary, keep_bits, mapped_aval, runs_in_python, zeros
from loopax._src.kinds import DerivativeLike, KindLike
from loopax._src.nnx.functional import freeze, thaw
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static import Called, Why, positive_int

WORDS = arguments.Words("rollout", "step", "inputs", "outputs", "state", "output")
_SAVE_EVERY = Why(
    "how many outputs there are",
    "carry a `Buffer` in the state, and append under a traced condition: `append(output, when=i % m == 0)`",
)


class Rollout(NamedTuple):
    """The result of `rollout`.

    Attributes
    ----------
    state
        The last state. With a history: the pair of last state and history. Another rollout can start from this pair.
    outputs
        One row for each saved step, `(rows, ...)`. Rows of steps that were not taken are zero.
    num_steps : int32[]
        The steps that were taken.

    """

    state: PyTree[Any]
    outputs: PyTree[Array]
    num_steps: Int[Array, ""]


@api_boundary
def rollout(
    step: Callable[..., tuple[Any, Any]],
    state: PyTree[Any],
    length: int | Int[Array, ""] | None = None,
    *,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    derivative: DerivativeLike = None,
    lanes: LanesLike = "lockstep",
    inputs: PyTree[Any] = None,
    history: History | None = None,
    stop: Callable[[Any, Any], Any] | None = None,
    save_every: int = 1,
    unroll: int | bool = 1,
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: ProgressLike = None,
    finite: Finite | None = None,
) -> Any:
    """Repeat a step on its own results; the number of steps may be known only at run time.

    The meaning, without `max_steps` and `save_every`::

        outputs = zeros
        for i in range(length):
            state, outputs[i] = step(state, inputs[i], history=history, key=fold_in(key, i))
            history = history.push(outputs[i])
            if stop(state, outputs[i]):
                break
        return state, outputs, i + 1

    Parameters
    ----------
    step
        The step: `step(state)` returns a pair, the next state and an output. With `inputs`, the second argument is a
        row of `inputs`. With `history` or `key`, the step also gets the keyword argument `history=` or `key=`.
    state
        The first state: any pytree, like the carry of `loopax.scan`. Give None for a model whose only state is its
        history.
    length
        The number of steps, static or traced. A traced length may differ between lanes under `jax.vmap`. None: one step
        for each row of `inputs`, or until `stop`.
    max_steps, kind, derivative, lanes
        As in `loopax.scan`. A function inside a `kind`, such as an inverse, gets a state where the function of a scan
        gets a carry.
    inputs
        The inputs: a pytree of arrays `(rows, ...)` with the same number of rows, at least `length`. None: the step
        gets no input.
    history
        A window of past outputs that the step can read, as a `History`. Each output is pushed to the window, so an
        output must look like the rows of the window. None: no window.
    stop
        An early exit: `stop(state, output)` returns one bool. True ends the rollout after this step, which still
        counts. None: no early exit.
    save_every
        Save only the outputs of the steps m, 2m, ..., with m = `save_every` and steps counted from 1. The default 1
        saves every output.
    unroll, key, throw, info, progress, finite
        As in `loopax.scan`.

    Returns
    -------
    Rollout
        `(state, outputs, num_steps)`. With `info=True`: the pair of this tuple and a `LoopInfo`. The number of outputs
        is the number of rows of `inputs`, else a static `length`, else `max_steps`, divided by `save_every`.

    Raises
    ------
    TypeError
        - As in `loopax.scan`.
        - `history` is not a `History`, or an output does not match the rows of the history.
        - `save_every` is not an int.
    ValueError
        As in `loopax.scan`, or `save_every` is not positive.
    NotImplementedError
        - As in `loopax.scan`.
        - The `kind` has an inverse, and there is a `history`: a window forgets rows, so a step cannot be undone.
    equinox.EquinoxRuntimeError
        As in `loopax.scan`.

    Notes
    -----
    Cost for n steps: n evaluations of `step`. The cost of a step does not depend on the number of rows. Outputs that
    `save_every` skips take no memory. One compilation serves every traced length.

    Derivatives: forward and reverse mode, in every order.

    """
    options = arguments.options("rollout", kind, lanes, key, progress, max_steps, throw, info, derivative, finite)
    extent = scan_rows(WORDS, options, step, stop, inputs, length, False).unrolled("rollout", unroll, stop is not None)
    every = positive_int("rollout(save_every=...)", save_every, "steps", _SAVE_EVERY)
    if not (history is None or isinstance(history, History)):
        raise TypeError(f"rollout(history=...): got {describe(history)}, expected a loopax.History.")
    called = Called("rollout", (step,) if stop is None else (step, stop), ("state", "x"))
    back = step_back(options, None, inputs is not None, lambda carry: carry.state, _carry_before)
    if back is not None and history is not None:
        raise NotImplementedError(
            "rollout(history=...), which forgets rows, does not take a kind that brings an inverse. Choose another "
            "kind, such as `Checkpointed()`, or write the loop as a while_loop, fori_loop or scan of its own."
        )

    # Before: step: (state, [row of inputs]) -> (state, output)
    # After: take: (carry, row of inputs) -> (carry, output or None), where outputs are saved in the carry
    def take(saves: bool, carry: _Carry, x: Any, **key: Any) -> tuple[_Carry, Any]:
        given, names = ([], ["state"]) if inputs is None else ([x], ["state", "x"])
        window = {} if carry.history is None else {"history": carry.history}
        result = call_user(WORDS.where, step, names, carry.state, *given, **window, **key)
        state, y = arguments.pair(WORDS, result)
        after = carry._replace(state=state, history=None if carry.history is None else carry.history.push(y))
        if not saves:
            return after, y
        number = carry.num_steps + 1
        place = jnp.where(number % every == 0, number // every - 1, jnp.iinfo(jnp.int32).max)
        saved = jax.tree.map(lambda rows, x: buffers.put(rows, place, jnp.asarray(x), appends=True), carry.saved, y)
        is_last = arguments.one_bool("stop of rollout", False if stop is None else stops(after, y))
        return after._replace(saved=saved, num_steps=number, is_last=is_last), None

    def stops(carry: _Carry, y: Any) -> Any:
        return call_user("stop of rollout", stop, ["state", "output"], carry.state, y)

    def run(saves: bool, given: tuple[_Carry, Any], options: arguments.Options) -> Any:
        is_last = (lambda carry, _: carry.is_last) if saves else stops
        functions, depends_on = (partial(take, saves), stop and is_last), (saves, every, inputs is None)
        return run_scan(WORDS, options, extent, *functions, *given, called, back, depends_on=depends_on)

    carry = _Carry(state, history)
    saves = every > 1 and not runs_in_python()  # where steps are values, outputs are left out afterwards
    if saves:
        # The types of an output are those of the rollout that saves all of them, which is traced and not run: on frozen
        # arguments, so that objects of the caller stay what they are.
        row = lambda x: mapped_aval(x.shape[0], 0, jax.typeof(x)) if isinstance(x, jax.Array) else x  # noqa: E731
        frozen, found, silent = freeze((carry, inputs)), [], replace(options, throw=False)
        jax.eval_shape(lambda: found.append(jax.tree.map(row, run(False, thaw(frozen), silent)[0][1])))
        types = row_types("rollout(save_every=...): the output of step", found[0])
        saved = jax.tree.map(lambda x: zeros(stacked(x, (extent.capacity or 0) // every)), types)
        carry = carry._replace(saved=saved, num_steps=jnp.int32(0), is_last=jnp.zeros((), bool))
    (last, outputs), loop_info = run(saves, (carry, inputs), options)
    last_state = last.state if history is None else (last.state, last.history)
    if saves:
        outputs = last.saved
    elif every > 1:
        of_save_points = partial(keep_bits, lambda rows: rows[every - 1 :: every])
        outputs = jax.tree.map(lambda rows: of_save_points(strongly_typed(rows)), outputs)
    return options.with_info(Rollout(last_state, outputs, loop_info.num_steps), loop_info)


class _Carry(NamedTuple):
    """What goes from step to step."""

    state: Any
    history: History | None
    # With save_every:
    saved: Any = None  # the outputs that have been saved, with room for the others
    num_steps: Any = None  # that have been taken
    is_last: Any = None  # whether `stop` has said so


def _carry_before(after: _Carry, state: Any) -> _Carry:
    """The carry before a step, with this state; what has been saved stays."""
    if after.num_steps is None:
        return after._replace(state=state)
    return after._replace(state=state, num_steps=after.num_steps - 1, is_last=jnp.zeros((), bool))
