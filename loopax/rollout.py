"""A step repeated on its own results: autoregressive models, integrators, environments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from loopax import _arguments as arguments
from loopax._carry import describe
from loopax._lengths import Extent, scan_extent
from loopax._nnx import freeze, thaw
from loopax._rows import row_types
from loopax._static import positive_int
from loopax.core import buffers
from loopax.history import History
from loopax.kinds import KindLike
from loopax.lanes import LanesLike
from loopax.loops import ScanBody, run_scan

WORDS = arguments.Words("rollout", "step", "inputs", "outputs")


class Rollout(NamedTuple):
    """What a rollout has come to.

    Attributes
    ----------
    state
        The last state; with a history, the pair of state and history, from which another rollout can go on.
    outputs
        A row for every step that was saved, `(rows, ...)`; rows of steps that were not taken are zero.
    num_steps : int32[]
        Steps that were taken.

    """

    state: PyTree[Any]
    outputs: PyTree[Array]
    num_steps: Int[Array, ""]


def rollout(
    step: Callable[..., tuple[Any, Any]],
    state: PyTree[Any],
    length: int | Int[Array, ""] | None = None,
    *,
    inputs: PyTree[Any] = None,
    history: History | None = None,
    stop: Callable[[Any, Any], Any] | None = None,
    save_every: int = 1,
    unroll: int | bool = 1,
    max_steps: int | None = None,
    kind: KindLike = "auto",
    lanes: LanesLike = "lockstep",
    key: Array | None = None,
    throw: bool = True,
    info: bool = False,
    progress: Any = None,
) -> Any:
    """Repeat a step on its own results, for as many steps as are known only at run time.

    The meaning, `max_steps` and `save_every` aside::

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
        `step(state)` is a pair: the next state, and an output. It is also given what there is of these: a row of
        `inputs` as second argument, and by name `history=` and `key=`.
    state
        The first state: any pytree, as the carry of `loopax.scan`. None for a model whose state is its history.
    length
        The number of steps, static or traced; it may differ between lanes under `jax.vmap`. Without it: all rows of
        `inputs`, or until `stop`.
    inputs
        A pytree of arrays with the same number of rows, `(rows, ...)`, at least `length`.
    history
        The window that an autoregressive model looks at. Every output is pushed, so it is a row like the others.
    stop
        `stop(state, output)` is one bool: whether this step was the last. It counts.
    save_every
        Save the output of every so many steps only: those of the steps m, 2 m, ..., counted from 1.
    unroll, max_steps, kind, lanes, key, throw, info, progress
        As in `loopax.scan`.

    Returns
    -------
    Rollout
        `(state, outputs, num_steps)`; with `info=True`, the pair of that and a `LoopInfo`. There are as many outputs
        as `inputs` has rows, else a static `length`, else `max_steps`, divided by `save_every`.

    Raises
    ------
    TypeError
        As in `loopax.scan`; `history` is no `History`; an output does not match its rows; `save_every` is not an int.
    ValueError
        As in `loopax.scan`: `inputs` has fewer rows than a static `length`; no way to know the number of steps, or
        that of the outputs. `save_every` is not positive.
    equinox.EquinoxRuntimeError
        A traced `length` is negative or beyond the rows of `inputs`, or `max_steps` stops a rollout that would go
        on, and `throw` is True.

    Notes
    -----
    Cost: `step` once for each step that is taken, however many rows there are. With `save_every`, what is not saved
    takes no memory. One compilation serves every traced length. Derivatives: all, in every order.

    """
    options = arguments.options("rollout", kind, lanes, key, progress, max_steps)
    arguments.check_callable("step of rollout", step)
    if stop is not None:
        arguments.check_callable("stop of rollout", stop)
    every = positive_int("rollout(save_every=...)", save_every, "steps", "how many outputs there are is decided")
    if not (history is None or isinstance(history, History)):
        raise TypeError(f"rollout(history=...): got {describe(history)}, expected a loopax.History.")
    rows = arguments.rows_of(WORDS, freeze(inputs))
    extent = scan_extent(WORDS, length, rows, options.max_steps, reverse=False, stops=stop is not None)
    unroll = arguments.unroll_steps("rollout", unroll, extent.bound if extent.fixed else None, stop is not None)

    once = _Once(step, stop, with_input=inputs is not None)
    init = state, history
    if every > 1:
        once = _Saving(once, every)
        init = *init, *once.start(extent, options, state, history, inputs)
    functions = (step,) if stop is None else (step, stop)
    body = ScanBody(WORDS, once.take, stop and once.is_last, functions, (type(once), every, inputs is None))
    (last, outputs), loop_info = run_scan(body, options, extent, init, inputs, False, unroll, throw)
    last_state, last_history = last[:2]
    done = Rollout(
        last_state if history is None else (last_state, last_history),
        outputs if every == 1 else last[2],
        loop_info.num_steps,
    )
    return (done, loop_info) if info else done


class _Once(NamedTuple):
    """A step of a rollout as one of a scan, with the carry (state, history)."""

    step: Callable[..., tuple[Any, Any]]
    stop: Callable[[Any, Any], Any] | None
    with_input: bool

    def take(self, carry: Any, x: Any, **key: Any) -> tuple[Any, Any]:
        """The next carry, and the output."""
        state, history = carry
        inputs = (x,) if self.with_input else ()
        window = {} if history is None else {"history": history}
        state, y = arguments.pair(WORDS, self.step(state, *inputs, **window, **key))
        return (state, None if history is None else history.push(y)), y

    def is_last(self, carry: Any, y: Any) -> Any:
        """Whether to stop."""
        assert self.stop is not None
        return self.stop(carry[0], y)


class _Saving(NamedTuple):
    """The same with the carry (state, history, saved outputs, steps taken, whether to stop), and no rows."""

    once: _Once
    every: int

    def start(self, extent: Extent, options: arguments.Options, state: Any, history: Any, inputs: Any) -> Any:
        """The rest of the carry."""
        frozen = freeze((state, inputs))

        def output() -> Any:
            state, inputs = frozen
            row = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), inputs)
            key = options.step_key(jnp.int32(0), options.extras)
            return self.once.take((thaw(state), history), thaw(row), **key)[1]

        if extent.capacity is None:
            raise arguments.no_capacity(WORDS, "outputs", "leave save_every=1 and return (state, None) from step")
        like = row_types("rollout(save_every=...): the output of step", jax.eval_shape(output))
        rows = extent.capacity // self.every
        saved = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), like)
        return saved, jnp.int32(0), jnp.zeros((), bool)

    def take(self, carry: Any, x: Any, **key: Any) -> tuple[Any, None]:
        """The next carry."""
        state, history, saved, number, _ = carry
        (state, history), y = self.once.take((state, history), x, **key)
        number = number + 1
        place = jnp.where(number % self.every == 0, number // self.every - 1, jnp.iinfo(jnp.int32).max)
        saved = jax.tree.map(lambda rows, leaf: buffers.put(rows, place, jnp.asarray(leaf), appends=True), saved, y)
        is_last = jnp.zeros((), bool) if self.once.stop is None else self.once.is_last((state, history), y)
        return (state, history, saved, number, arguments.one_bool("stop of rollout", is_last)), None

    def is_last(self, carry: Any, _: Any) -> Any:
        """Whether to stop."""
        return carry[-1]
