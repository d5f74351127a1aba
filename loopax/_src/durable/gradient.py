"""`value_and_grad` of long runs: from its arguments to its results."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.durable.chunk import RowPlan
from loopax._src.durable.files import locked
from loopax._src.durable.gradient_chunk import Functions, device_bytes, inexact, numbers_of_inexact, tree_of
from loopax._src.durable.gradient_plan import Bounds, Division, evaluated, plan
from loopax._src.durable.gradient_problem import NAME, UNBOUNDED_STEPS, Given, Problem, Question, problem_of
from loopax._src.durable.gradient_run import GradientRun
from loopax._src.durable.options import check, refuse_transformations
from loopax._src.durable.outputs import Outputs
from loopax._src.durable.pace import watching
from loopax._src.durable.row_source import RowSource
from loopax._src.durable.saves import Saves
from loopax._src.durable.states import States, Transfers
from loopax._src.durable.step_hash import Written
from loopax._src.durable.stored_program import compare_with_stored, stored_program_of
from loopax._src.jax_internals import api_boundary
from loopax._src.kinds import Kind, KindLike, Residuals, to_kind
from loopax._src.progress import ProgressLike, Reporter, Shown, to_progress
from loopax._src.pytrees.leaves import pack, type_in_words
from loopax._src.pytrees.static import Why, int_within, static_bool
from loopax._src.schedule.binomial import evaluations
from loopax._src.settings import settings

_STATES = 8  # for which a gradient takes memory, where nobody has said how much
_INFO = Why("the structure of what is returned", "give info=True in all calls, and leave out what is not wanted")


class Gradients(NamedTuple):
    """Gradients of a long run.

    Attributes
    ----------
    params, init
        Pytrees as those given: a gradient for each array of real or complex numbers, None for all other leaves. None
        if `argnums` leaves them out.
    xs
        As `params`, with arrays on disk (`durable.Rows`) that have a row for each step. None without `xs`.

    """

    params: PyTree[Any]
    init: PyTree[Any]
    xs: PyTree[Any] = None


class GradientInfo(NamedTuple):
    """What the gradient of a long run has taken; returned with `info=True`.

    Attributes
    ----------
    num_steps : int
        The steps of the loop.
    chunk_steps : int
        The steps of a chunk.
    kind : Kind
        What is stored within a chunk, while it is differentiated.
    evaluations : float
        How often each step is evaluated, on average, by a run that nothing interrupts.
    states_on_disk, states_in_memory : int
        How many states are kept between chunks, at a time.
    state_bytes : int
        The size of one.
    evaluated : float
        As `evaluations`, of this call alone.
    bytes_written, bytes_read : int
        States that this call has written and read.
    hidden : float
        The share of the time of these writes and reads during which the call has computed.
    more_disk : dict of int to float
        What `evaluations` would be with more bytes of `disk`.

    """

    num_steps: int
    chunk_steps: int
    kind: Any
    evaluations: float
    states_on_disk: int
    states_in_memory: int
    state_bytes: int
    evaluated: float
    bytes_written: int
    bytes_read: int
    hidden: float
    more_disk: dict[int, float]


def _of_init(init: Any, problem: Problem, of_state: list[Array]) -> Any:
    """In the dtypes of `init`, where the loop has taken others."""
    (arrays, spec), gradients = pack(init), dict(zip(numbers_of_inexact(problem.state.avals), of_state, strict=True))
    return tree_of(spec, [gradients[i].astype(arrays[i].dtype) for i in numbers_of_inexact(arrays)])


def _outputs(root: Path, problem: Problem, rows: RowSource, steps: int, some: int) -> Outputs | None:
    """Where rows of gradients of xs are written; None: there are none."""
    if rows.length is None or not problem.num_xs:
        return None
    zeros = [jnp.zeros(x.shape, x.dtype) for x in rows.types(some)]
    spec = pack(tree_of(problem.rows, inexact(zeros))[0])[1]
    return Outputs(NAME, root, spec, RowPlan(steps, steps - 1, -1)) if spec.avals else None


def _compare(
    root: Path, problem: Problem, given: Given, rows: RowSource, settings_: dict[str, str], anyway: bool
) -> str:
    """Compare what is asked for with what the directory holds; gives what tells programs apart."""
    of_row = rows.types(1)

    def program(params: Any, state: Any, row: Any) -> Any:
        functions, one = Functions(problem, 1, Residuals()), Given(params, state, row, np.int32(0), np.int32(1))
        return functions.forward(one), functions.value(one)[0]

    closed = jax.make_jaxpr(program)(given.params, given.state, of_row)
    names = [*problem.params.names("params"), *problem.state.names("carry, sum of ys: "), *problem.rows.names("rows: ")]
    written = Written(closed, names, {}, [])
    arrays = dict(zip(names, [*given.params, *given.state], strict=False))
    types = {name: type_in_words(jax.typeof(x)) for name, x in arrays.items()}
    types |= {f"a row of {name}": type_in_words(x) for name, x in zip(problem.rows.names(), of_row, strict=True)}
    stored = stored_program_of(NAME, settings_, types, arrays, written, rows.checksums())
    compare_with_stored(NAME, root, stored, anyway)
    return repr((stored.step, stored.functions, {name: stored.values[name] for name in written.arrays}))


def _numbers(argnums: Any) -> set[int]:
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    what = ", which counts `params`, `init` and `xs`"
    return {int_within(f"{NAME}(argnums=...)", number, 0, 2, what) for number in given}


def _bytes(name: str, value: Any) -> int:
    return int_within(f"{NAME}({name}=...)", value, 0, 2**63 - 1, ", a number of bytes")


def _info(run: GradientRun, kind: Kind, state_bytes: int) -> GradientInfo:
    plan, work, transfers = run.plan, run.work, run.states.transfers
    chunks = max(plan.chunks, 1)

    def each(disk: int) -> float:
        whole = plan._replace(disk=disk, is_spread=plan.is_spread and disk == plan.disk)
        return (evaluations(chunks, min(whole.slots, chunks + 1)) if run.is_open else evaluated(whole)) / chunks

    more = {min(factor * plan.disk, chunks - 1) for factor in (2, 4, chunks)} - {plan.disk}
    waits = min(transfers.waited / transfers.seconds, 1.0) if transfers.seconds else 0.0
    return GradientInfo(
        num_steps=plan.steps,
        chunk_steps=plan.chunk,
        kind=kind,
        evaluations=each(plan.disk),
        states_on_disk=min(plan.disk, chunks - 1),
        states_in_memory=min(plan.memory, chunks - 1),
        state_bytes=state_bytes,
        evaluated=(work.advanced + work.reversed) / chunks,
        bytes_written=transfers.bytes_written,
        bytes_read=transfers.bytes_read,
        hidden=1.0 - waits,
        more_disk={disk * state_bytes: each(disk) for disk in sorted(more) if each(disk) < each(plan.disk)},
    )


@api_boundary
def value_and_grad(
    loss: Callable[..., Any],
    f: Callable[..., Any],
    *,
    directory: str | os.PathLike[str],
    kind: KindLike = "auto",
    loop: Literal["scan", "fori_loop", "while_loop"] = "scan",
    length: int | None = None,
    cond_fun: Callable[[Any, Any], Any] | None = None,
    disk: int | None = None,
    memory: int | None = None,
    cotangents: PyTree[Any] = None,
    argnums: int | Sequence[int] = (0, 1, 2),
    checkpoint_every: int | float | timedelta = 60.0,
    resume: str = "auto",
    chunk_steps: int | None = None,
    progress: ProgressLike = None,
    info: bool = False,
) -> Callable[..., Any]:
    """Value and gradient of a loop that is too long for memory, or for one sitting: with checkpoints on disk.

    Like `jax.value_and_grad` of this function, for each array of real or complex numbers in its arguments::

        def value(params, init, xs):
            carry, ys = loopax.scan(lambda carry, x: f(params, carry, x), init, xs, length)
            return loss(params, carry, jax.tree.map(lambda y: y.sum(0), ys))

    The function that is returned runs the loop forwards in compiled chunks of steps, writes the state before chunks to
    disk, and differentiates the chunks from the last to the first. If the process is killed at any moment, the same
    call goes on, and ends with the same bits. Call it from Python, not inside of `jit`, `vmap` or `grad`.

    Parameters
    ----------
    loss
        `loss(params, carry, sum_of_ys)` is a real number. For the other loops it is `loss(params, carry)`.
    f
        A step. For `loop="scan"`: `f(params, carry, x) -> (carry, y)`; for `"fori_loop"`:
        `f(params, i, carry) -> carry`, with i from 0 on; for `"while_loop"`: `f(params, carry) -> carry`. Give large
        arrays as parameters, or in `xs`, rather than closing over them.
    directory
        The directory of this run, and of no other run. loopax creates a directory that does not exist.
    kind
        What is stored within a chunk, as in `loopax.scan`. `"auto"`: residuals of each step in chunks that fit in
        `memory`; where these would be shorter than 20 milliseconds, checkpoints.
    loop
        Which loop `f` is the body of.
    length
        The number of steps. None: the rows of `xs` or of `cotangents`. For a `while_loop` the most steps; None: any
        number.
    cond_fun
        `cond_fun(params, carry)`: whether a `while_loop` goes on.
    disk
        The bytes that states may take on disk. None: as many as the schedule can use. With fewer states than chunks,
        chunks are evaluated again, as seldom as possible. Beside them are four saves of where the run is, and rows.
    memory
        The bytes of memory for what a chunk stores while it is differentiated, and for states that are not on disk.
        None: those of `loopax.configure`, which are 256 MiB if nothing is said, or those of eight states if these are
        more. Parameters, the first and the current state, gradients and rows of a chunk come on top.
    cotangents
        Rows of a pytree like that of the outputs of a scan, one for each output. Then `sum_of_ys` is one number: the
        sum of the products of cotangents and outputs.
    argnums
        Of which of `params`, `init` and `xs` (0, 1, 2) there is a gradient. That of `xs` takes disk and time: leave it
        out if `xs` are data.
    checkpoint_every
        The most work that may be lost if the process is killed, as in `durable.scan`. The default is 60.0 seconds.
        States in memory are lost, too, and are computed again.
    resume, progress
        As in `durable.scan`. Progress counts evaluations of a step; what a pullback takes counts for two.
    chunk_steps
        The steps in one compiled chunk. None: as many as take about 0.2 seconds, or fewer, see `kind`. The last bits of
        a gradient depend on it, so it is stored when a run begins.
    info
        Whether to return a `GradientInfo`, too.

    Returns
    -------
    function
        `(params, init, xs=None) -> (value, gradients)`, or `((value, gradients), info)`. Only a scan takes `xs`. Its
        arrays may be on disk: `durable.Rows`, `numpy.memmap`. The gradients are those of `params`, of `init` and of
        `xs` (`durable.Gradients`); that of `xs` is on disk, as `durable.Rows`.

    Raises
    ------
    TypeError
        - The call is inside a transformation of JAX.
        - An argument has another type than expected, `loss` does not return a real number, or `f` returns another carry
          than it gets.
    ValueError
        - The directory holds a run of another program, or of other arguments; the message says what differs.
        - `memory` or `disk` is too small (the message says the least), or the kind has no gradient.
        - `length` is missing, or is not the number of rows.
    RuntimeError
        - Another process runs in the directory.
        - A file that cannot be computed again is damaged; the message names it. States that are damaged are computed
          again, with a `DamagedSaveWarning`.
        - A `while_loop` would go on after `length` steps.
    loopax.durable.SaveError
        Something could not be written, because a disk is full for example. The same call goes on from the last save.
    KeyboardInterrupt, SystemExit
        After a signal, when the run is saved.

    Notes
    -----
    Cost: each step is evaluated twice if all states have room on disk (once forwards, once for its pullback); with room
    for s of n chunks, r times more where n is at most C(s + r, r). Writes and reads run beside the computation. If they
    take longer than chunks do, fewer states are written.

    Derivatives: of first order, in reverse mode.

    Source: the schedule is the binomial one, with chunks as steps, whose lowest states are on disk (Griewank & Walther
    2000; Stumm & Walther 2009).

    See docs/long-gradients.md.

    """
    question = Question(loss, f, loop, cond_fun, cotangents is not None).checked()
    memory = None if memory is None else _bytes("memory", memory)
    disk = None if disk is None else _bytes("disk", disk)
    named, wanted = to_kind(kind), _numbers(argnums)
    if named.inverse is not None:
        raise ValueError(
            f"{NAME}(kind={type(named).__name__}(...)): a chunk is more than a step of the loop; its inverse is not "
            "known. Leave kind= out, or give one that stores residuals or carries."
        )
    reporter, info = to_progress(NAME, progress), static_bool(f"{NAME}(info=...)", info, _INFO)
    durability = directory, checkpoint_every, 2, resume, chunk_steps

    @api_boundary
    def call(params: Any, init: Any, xs: Any = None) -> Any:
        refuse_transformations(NAME, (params, init), xs, instead="`jax.value_and_grad` of a loop of loopax")
        root, pace, keep, anyway = check(NAME, *durability)
        rows = question.rows(xs, cotangents)
        steps = question.steps(length, rows)
        problem, given = problem_of(question, params, init, rows, len(jax.tree.leaves(xs)) if 2 in wanted else 0)
        settings_ = {
            "loop": loop,
            "steps": str(steps),
            "kind": repr(named),
            "chunk_steps": str(chunk_steps),
            "of xs": str(2 in wanted),
        }
        enough = max(settings().memory, _STATES * device_bytes(given.state))
        bounds = Bounds(disk, enough if memory is None else memory, memory is not None, named, pace.chunk_steps)
        with ExitStack() as stack:
            stack.enter_context(locked(NAME, root))
            problem = problem._replace(program=_compare(root, problem, given, rows, settings_, anyway))
            stack.enter_context(jax.disable_jit(False))  # chunks are compiled, whatever is debugged
            limit = steps if steps >= 0 else UNBOUNDED_STEPS if length is None else length
            chosen, programs = Division(root, bounds, problem, given, rows, limit).chunk()
            state_bytes = num_bytes(map(jax.typeof, given.state))
            planned = plan(chosen, bounds, list(given.state), programs.memory, steps)
            outputs = _outputs(root, problem, rows, steps, chosen.chunk_steps)

            def saves(name: str, keep: int | None, outputs: Outputs | None = None) -> Saves:
                return stack.enter_context(closing(Saves(NAME, root / name, keep, replace(pace), outputs)))

            def shown(what: str, total: int | None) -> Shown:
                if reporter is None:
                    return Shown(None, total)
                label = f"{reporter.label or NAME}, {what}"
                found = Shown(Reporter.of(replace(reporter, label=label), NAME, f, "evaluation"), total)
                stack.callback(found.end, finished=False)
                return found

            at = [saves("states", None), saves("ahead", keep), saves("back", keep, outputs)]
            transfers = stack.enter_context(closing(Transfers()))  # ends before these
            states = States(at[0], planned.disk, planned.memory, list(given.state), transfers)
            watched = stack.enter_context(watching())
            params_ = list(given.params)
            run = GradientRun(
                programs, question.is_open, planned, limit, params_, rows, states, at[1], at[2], shown, watched
            )
            gradient = run.to_the_end()
        of_init = _of_init(init, problem, gradient.of_state)
        of_xs = None if outputs is None else outputs.rows()
        of_all = tree_of(problem.params, gradient.of_params), of_init, of_xs
        found = gradient.value, Gradients(*(one if i in wanted else None for i, one in enumerate(of_all)))
        return (found, _info(run, chosen.kind(named), state_bytes)) if info else found

    return call
