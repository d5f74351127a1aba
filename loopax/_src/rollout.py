"""A step repeated on its own results: autoregressive models, integrators, environments."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from loopax._src.core.row_buffers import primitives as buffers
from loopax._src.frontend import options as arguments
from loopax._src.frontend.rows import row_types
from loopax._src.frontend.steps import step_back
from loopax._src.frontend.trace import StepBack
from loopax._src.history import History
from loopax._src.kinds import KindLike
from loopax._src.lanes import LanesLike
from loopax._src.loops import ScanBody, run_scan, scan_spec
from loopax._src.messages import inverse_message
from loopax._src.nnx.functional import freeze, thaw
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.leaves import describe
from loopax._src.pytrees.static_args import Why, positive_int

WORDS = arguments.Words("rollout", "step", "inputs", "outputs", "state", "output")
_SAVE_EVERY = Why(
    "how many outputs there are",
    "carry a `Buffer` in the state, and append under a traced condition: `append(output, when=i % m == 0)`",
)


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
    progress: ProgressLike = None,
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
        As in `loopax.scan`. The functions of a kind get a state where those of a scan get a carry.

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
    NotImplementedError
        As in `loopax.scan`; a kind with an inverse and a `history`, which forgets rows.
    equinox.EquinoxRuntimeError
        A traced `length` is negative or beyond the rows of `inputs`, or `max_steps` stops a rollout that would go
        on, and `throw` is True.

    Notes
    -----
    Cost: `step` once for each step that is taken, however many rows there are. With `save_every`, what is not saved
    takes no memory. One compilation serves every traced length. Derivatives: all, in every order.

    """
    options = arguments.options("rollout", kind, lanes, key, progress, max_steps, throw, info)
    loop_spec = scan_spec(WORDS, options, step, stop, inputs, length, False, unroll)
    every = positive_int("rollout(save_every=...)", save_every, "steps", _SAVE_EVERY)
    if not (history is None or isinstance(history, History)):
        raise TypeError(f"rollout(history=...): got {describe(history)}, expected a loopax.History.")
    functions, back = (step,) if stop is None else (step, stop), _step_back(options, inputs is not None)
    if back is not None and history is not None:
        raise NotImplementedError(inverse_message("rollout(history=...), which forgets rows,"))

    def run(once: _Once | _Saving, carry: _Carry, inputs: Any, options: arguments.Options) -> Any:
        spec = type(once), every, inputs is None
        body = ScanBody(WORDS, once.take, stop and once.is_last, functions, spec, ("state", "x"), back)
        return run_scan(body, options, loop_spec, carry, inputs)

    once, carry = _Once(step, stop, with_input=inputs is not None), _Carry(state, history)
    if every > 1:
        silent = replace(options, throw=False)
        like = _output_types(lambda carry, inputs: run(once, carry, inputs, silent)[0][1], carry, inputs)
        carry = _start_saving(carry, like, (loop_spec.extent.capacity or 0) // every)
    (last, outputs), loop_info = run(once if every == 1 else _Saving(once, every), carry, inputs, options)
    last_state = last.state if history is None else (last.state, last.history)
    done = Rollout(last_state, outputs if every == 1 else last.saved, loop_info.num_steps)
    return options.with_info(done, loop_info)


class _Carry(NamedTuple):
    """What goes from step to step."""

    state: Any
    history: History | None
    # With save_every:
    saved: Any = None  # the outputs that have been saved, with room for the others
    num_steps: Any = None  # that have been taken
    is_last: Any = None  # whether `stop` has said so


class _Once(NamedTuple):
    """A step of a rollout as one of a scan."""

    step: Callable[..., tuple[Any, Any]]
    stop: Callable[[Any, Any], Any] | None
    with_input: bool

    def take(self, carry: _Carry, x: Any, **key: Any) -> tuple[_Carry, Any]:
        """The next carry, and the output."""
        inputs = (x,) if self.with_input else ()
        window = {} if carry.history is None else {"history": carry.history}
        state, y = arguments.pair(WORDS, self.step(carry.state, *inputs, **window, **key))
        return _Carry(state, None if carry.history is None else carry.history.push(y)), y

    def is_last(self, carry: _Carry, y: Any) -> Any:
        """Whether to stop."""
        assert self.stop is not None
        return self.stop(carry.state, y)


class _Saving(NamedTuple):
    """Steps that put outputs into a carry at their save points, and return no rows."""

    once: _Once
    every: int

    def take(self, carry: _Carry, x: Any, **key: Any) -> tuple[_Carry, None]:
        """The next carry."""
        after, y = self.once.take(carry, x, **key)
        number = carry.num_steps + 1
        place = jnp.where(number % self.every == 0, number // self.every - 1, jnp.iinfo(jnp.int32).max)
        saved = jax.tree.map(lambda rows, x: buffers.put(rows, place, jnp.asarray(x), appends=True), carry.saved, y)
        is_last = False if self.once.stop is None else self.once.is_last(after, y)
        is_last = arguments.one_bool("stop of rollout", is_last)
        return after._replace(saved=saved, num_steps=number, is_last=is_last), None

    def is_last(self, carry: _Carry, _: Any) -> Any:
        """Whether to stop."""
        return carry.is_last


def _step_back(options: arguments.Options, with_input: bool) -> StepBack | None:
    """A step back by the kind's functions of states; what has been saved stays."""
    of_states = step_back(options, has_rows=with_input)
    if of_states is None:
        return None

    def inverse(row: Any, extras: Any, carries: Sequence[_Carry], x: Any, *recorded: Any) -> _Carry:
        (after,) = carries
        before = after._replace(state=of_states.inverse(row, extras, [after.state], x, *recorded))
        if after.num_steps is None:
            return before
        return before._replace(num_steps=after.num_steps - 1, is_last=jnp.zeros((), bool))

    def record(row: Any, extras: Any, carries: Sequence[_Carry], x: Any) -> Any:
        assert of_states.record is not None
        return of_states.record(row, extras, [carry.state for carry in carries], x)

    return StepBack(inverse, of_states.record and record)


def _start_saving(carry: _Carry, like: Any, rows: int) -> _Carry:
    saved = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), like)
    return carry._replace(saved=saved, num_steps=jnp.int32(0), is_last=jnp.zeros((), bool))


def _output_types(outputs: Callable[[Any, Any], Any], carry: _Carry, inputs: Any) -> PyTree[jax.ShapeDtypeStruct]:
    """The types of an output, from the rollout that saves all of them, which is traced and not run."""
    frozen, found = freeze((carry, inputs)), []  # so that objects of the caller stay what they are
    jax.eval_shape(lambda: found.append(jax.tree.map(_row, outputs(*thaw(frozen)))))
    return row_types("rollout(save_every=...): the output of step", found[0])


def _row(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if isinstance(x, jax.Array) else x
