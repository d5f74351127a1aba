"""`value_and_grad` of long runs: from its arguments to its results."""

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from loopax._src.core.jaxpr.util import MOST_STEPS, num_bytes
from loopax._src.durable.chunk import RowPlan, placed
from loopax._src.durable.gradient_chunk import Functions, Given, Problem, Programs, inexact, tree_of
from loopax._src.durable.gradient_plan import Bounds, choice, fewest, plan
from loopax._src.durable.gradient_run import GradientRun
from loopax._src.durable.options import check, locked, refuse_transformations
from loopax._src.durable.outputs import Outputs
from loopax._src.durable.pace import watching
from loopax._src.durable.row_source import RowSource
from loopax._src.durable.saves import Saves
from loopax._src.durable.states import States, Transfers
from loopax._src.durable.step_hash import Written
from loopax._src.durable.stored_program import compare_with_stored, refuse_unsavable, stored_program_of, types_of
from loopax._src.frontend.options import Words, check_callable, one_bool, pair
from loopax._src.frontend.steps import call_user
from loopax._src.jax_internals import api_boundary
from loopax._src.kinds import Kind, KindLike, Lax, Residuals, to_kind
from loopax._src.loops import scan
from loopax._src.nnx.functional import roots
from loopax._src.progress import ProgressLike, Reporter, Shown, to_progress
from loopax._src.pytrees.leaves import Dynamic, describe, describe_node, pack, type_in_words
from loopax._src.pytrees.static import Why, int_within, static_bool
from loopax._src.schedule.binomial import evaluations
from loopax._src.settings import settings

NAME = "durable.value_and_grad"
LOOPS = "scan", "fori_loop", "while_loop"
_WORDS = Words(NAME, "f", "xs", "ys")
_INFO = Why("the structure of what is returned", "give info=True in all calls, and leave out what is not wanted")
_UNBOUNDED_STEPS = 2**62
_HALF = jnp.float16, jnp.bfloat16


class Gradients(NamedTuple):
    """Gradients of a long run.

    Attributes
    ----------
    params, init
        Pytrees as those given: a gradient for each array of real or complex numbers, None for all other leaves.
    xs
        The same, of arrays on disk (`durable.Rows`), a row for each step. None without `xs`.

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


class _Asked(NamedTuple):
    """What is to be differentiated, as the user says it."""

    loss: Callable[..., Any]
    f: Callable[..., Any]
    loop: str
    length: int | None
    cond_fun: Callable[[Any, Any], Any] | None
    cotangents: Any

    def check(self) -> "_Asked":
        """The same, or an error."""
        if self.loop not in LOOPS:
            raise ValueError(f"{NAME}(loop=...): got {self.loop!r}, expected one of {', '.join(map(repr, LOOPS))}.")
        check_callable(f"{NAME}(loss)", self.loss)
        check_callable(f"{NAME}(f)", self.f)
        if self.loop == "while_loop":
            check_callable(f"{NAME}(cond_fun=...), which says whether a while_loop goes on", self.cond_fun)
        elif self.cond_fun is not None:
            raise ValueError(
                f"{NAME}(cond_fun=...): only loop='while_loop' has a condition, and this is a {self.loop}."
            )
        if self.cotangents is not None and self.loop != "scan":
            raise ValueError(f"{NAME}(cotangents=...): only loop='scan' has outputs, and this is a {self.loop}.")
        if self.length is None:
            return self
        most = MOST_STEPS if self.loop == "fori_loop" else _UNBOUNDED_STEPS
        return self._replace(length=int_within(f"{NAME}(length=...)", self.length, 0, most))

    def step(self, params: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        """As of `scan`; with cotangents, x is a row of xs and one of them."""
        if self.loop == "fori_loop":
            return call_user(f"f of {NAME}", self.f, ["params", "i", "carry"], params, x, carry), None
        if self.loop == "while_loop":
            return call_user(f"f of {NAME}", self.f, ["params", "carry"], params, carry), None
        x, of_y = x
        carry, y = pair(_WORDS, call_user(_WORDS.where, self.f, ["params", "carry", "x"], params, carry, x))
        return carry, y if self.cotangents is None else _paired(of_y, y)

    def goes_on(self, params: Any, carry: Any) -> Any:
        """The condition of a `while_loop`."""
        where = f"cond_fun of {NAME}"
        return one_bool(where, call_user(where, self.cond_fun, ["params", "carry"], params, carry))

    def number(self, params: Any, carry: Any, total: Any) -> Any:
        """The loss."""
        where, ys = f"loss of {NAME}", [total] if self.loop == "scan" else []
        value = call_user(where, self.loss, ["params", "carry", *["sum_of_ys"] * len(ys)], params, carry, *ys)
        if not (isinstance(value, jax.Array | np.ndarray | np.generic | float) and jnp.ndim(value) == 0):
            raise TypeError(f"{where} must return one real number (a scalar). Got {describe_node(value)}.")
        value = jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{where} must return one real number. Got {describe(value)}.")
        return value

    def rows(self, xs: Any) -> tuple[RowSource, int, int]:
        """Those of xs and of cotangents, how many arrays are in xs, and the steps; -1: nobody knows."""
        if self.loop != "scan" and xs is not None:
            raise TypeError(f"{NAME}: xs are the rows of loop='scan', and this is a {self.loop}. Close over arrays.")
        rows = RowSource(NAME, (xs, self.cotangents)) if self.loop == "scan" else RowSource(NAME, None)
        if rows.length is not None and self.length not in (None, rows.length):
            raise ValueError(f"{NAME}(length={self.length}): xs and cotangents have {rows.length} rows.")
        steps = rows.length if rows.length is not None else self.length
        if steps is None and self.loop != "while_loop":
            raise ValueError(f"{NAME}(length=...): nothing else says how many steps there are. Give their number.")
        return rows, len(jax.tree.leaves(xs)), -1 if self.loop == "while_loop" else steps

    def problem(self, params: Any, init: Any, xs: Any) -> tuple[Problem, Given, RowSource, int]:
        """What is to be differentiated, what the first step is given but for rows, rows, and the steps."""
        for what, tree in (("params", params), ("init", init)):
            if roots(tree):
                raise TypeError(
                    f"{NAME}: {what} holds NNX objects, which have no gradient of their own. Give "
                    "`nnx.split(model)[1]`, and merge it in the body."
                )
        rows, num_xs, steps = self.rows(xs)
        of_params, params_spec = pack(params)
        of_init, init_spec = pack(init)
        found: list[Any] = []

        def one(of_params: Any, of_init: Any, row: Any) -> Any:
            params = params_spec.unpack(of_params)
            x = jnp.zeros(1, jnp.int32) if self.loop == "fori_loop" else rows.unpack(row)
            length = None if jax.tree.leaves(x) else 1
            carry, ys = scan(lambda carry, x: self.step(params, carry, x), init_spec.unpack(of_init), x, length)
            arrays, spec = pack((carry, jax.tree.map(_sum, ys)))
            found.append(spec)
            return arrays

        types = jax.eval_shape(one, of_params, of_init, rows.types(1))
        zeros = [jnp.zeros(x.shape, x.dtype) for x in types[len(of_init) :]]
        start = [x.astype(t.dtype) for x, t in zip(of_init, types, strict=False)]
        arrays = placed([*of_params, *start, *zeros])
        refuse_unsavable(NAME, [*types_of("carry, sum of ys: ", found[-1])])
        given = Given(arrays[: len(of_params)], arrays[len(of_params) :], [], np.int32(0), np.int32(1))
        goes_on = self.goes_on if self.loop == "while_loop" else None
        is_counted = self.loop == "fori_loop"
        problem = Problem(self.step, self.number, goes_on, is_counted, params_spec, found[-1], rows.spec, num_xs)
        jax.eval_shape(Functions(problem, 1, None).value, given)
        return problem, given, rows, steps


def _sum(ys: Any) -> Any:
    """Of one row; of half precision, in float32."""
    total = jnp.sum(ys, 0)
    return total.astype(jnp.promote_types(total.dtype, jnp.float32)) if total.dtype in _HALF else total


def _paired(cotangents: Any, ys: Any) -> Any:
    """The sum of the products of cotangents and outputs."""
    try:
        products = jax.tree.map(lambda c, y: jnp.sum((c * y).real), cotangents, ys)
    except ValueError as error:
        raise ValueError(
            f"{NAME}(cotangents=...): they are not rows of a pytree like that of the outputs ({error})."
        ) from None
    return sum(jax.tree.leaves(products), jnp.zeros(()))


def _of_init(init: Any, of_carry: Any) -> Any:
    """In the dtypes of `init`, where the loop has taken others."""
    arrays, spec = pack(init)
    leaves = jax.tree.leaves(of_carry, is_leaf=lambda x: x is None)
    dynamic = [found for found, leaf in zip(leaves, spec.leaves, strict=True) if isinstance(leaf, Dynamic)]
    pairs = zip(arrays, dynamic, strict=True)
    return tree_of(spec, [found.astype(x.dtype) for x, found in pairs if jnp.issubdtype(x.dtype, jnp.inexact)])


def _outputs(root: Path, problem: Problem, rows: RowSource, steps: int, some: int) -> Outputs | None:
    """Where rows of gradients of xs are written; None: there are none."""
    if rows.length is None:
        return None
    zeros = [jnp.zeros(x.shape, x.dtype) for x in rows.types(some)]
    spec = pack(tree_of(problem.rows, inexact(zeros))[0])[1]
    return Outputs(NAME, root / "back", spec, RowPlan(steps, steps - 1, -1)) if spec.avals else None


def _compare(
    root: Path, problem: Problem, given: Given, rows: RowSource, settings_: dict[str, str], anyway: bool
) -> None:
    """Compare what is asked for with what the directory holds."""
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
    compare_with_stored(
        NAME, root, stored_program_of(NAME, settings_, types, arrays, written, rows.checksums()), anyway
    )


def _bytes(name: str, value: Any) -> int:
    return int_within(f"{NAME}({name}=...)", value, 0, 2**63 - 1, ", a number of bytes")


def _info(run: GradientRun, kind: Kind, state_bytes: int) -> GradientInfo:
    plan, work, transfers = run.plan, run.work, run.states.transfers
    chunks = max(plan.chunks, 1)
    count = evaluations if run.programs.is_open else fewest

    def each(disk: int) -> float:
        return count(chunks, 1 + disk + plan.memory) / chunks

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
        more_disk={disk * state_bytes: each(disk) for disk in sorted(more) if disk > plan.disk},
    )


@api_boundary
def value_and_grad(
    loss: Callable[..., Any],
    f: Callable[..., Any],
    *,
    directory: str | os.PathLike[str],
    loop: Literal["scan", "fori_loop", "while_loop"] = "scan",
    length: int | None = None,
    cond_fun: Callable[[Any, Any], Any] | None = None,
    disk: int | None = None,
    memory: int | None = None,
    kind: KindLike = "auto",
    cotangents: PyTree[Any] = None,
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
        A step. For `loop="scan"`: `f(params, carry, x) -> (carry, y)`; for `"fori_loop"`: `f(params, i, carry) -> carry`,
        with i from 0 on; for `"while_loop"`: `f(params, carry) -> carry`. Give large arrays as parameters, or in `xs`,
        rather than closing over them.
    directory
        The directory of this run, and of no other run. loopax creates a directory that does not exist.
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
        None: those of `loopax.configure`, which are 256 MiB if nothing is said, or what the kind needs. Parameters, the
        first and the current state, gradients and rows of a chunk come on top.
    kind
        What is stored within a chunk, as in `loopax.scan`. `"auto"`: residuals of each step in chunks that fit in
        `memory`; where these would be shorter than 20 milliseconds, checkpoints.
    cotangents
        Rows of a pytree like that of the outputs of a scan, one for each output. Then `sum_of_ys` is one number: the sum
        of the products of cotangents and outputs.
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
        `(params, init, xs=None) -> (value, gradients)`, or `((value, gradients), info)`. Only a scan takes `xs`. Its arrays
        may be on disk: `durable.Rows`, `numpy.memmap`. The gradients are those of `params`, of `init` and of `xs`
        (`durable.Gradients`); that of `xs` is on disk, as `durable.Rows`.

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
    asked = _Asked(loss, f, loop, length, cond_fun, cotangents).check()
    memory_ = settings().memory if memory is None else _bytes("memory", memory)
    disk = None if disk is None else _bytes("disk", disk)
    named = to_kind(kind)
    if isinstance(named, Lax):
        raise ValueError(f"{NAME}(kind=Lax()): this kind has no gradient. Leave kind= out, or choose another one.")
    reporter, info = to_progress(NAME, progress), static_bool(f"{NAME}(info=...)", info, _INFO)
    durability = directory, checkpoint_every, 2, resume, chunk_steps

    @api_boundary
    def call(params: Any, init: Any, xs: Any = None) -> Any:
        refuse_transformations(NAME, (params, init), xs, instead="`jax.value_and_grad` of a loop of loopax")
        root, pace, keep, anyway = check(NAME, *durability)
        problem, given, rows, steps = asked.problem(params, init, xs)
        settings_ = {"loop": loop, "steps": str(steps), "kind": repr(named), "chunk_steps": str(chunk_steps)}
        bounds = Bounds(NAME, disk, memory_, memory is not None, named, pace.chunk_steps)
        with ExitStack() as stack:
            stack.enter_context(locked(NAME, root))
            _compare(root, problem, given, rows, settings_, anyway)
            limit = steps if steps >= 0 else _UNBOUNDED_STEPS if asked.length is None else asked.length
            chosen = choice(root, bounds, problem, given, rows, limit)
            chosen = replace(chosen, chunk_steps=max(min(chosen.chunk_steps, limit), 1))
            within = chosen.kind(named)
            first = given._replace(rows=rows.read(0, chosen.chunk_steps))
            programs = Programs(Functions(problem, chosen.chunk_steps, within), first)
            state_bytes = num_bytes(map(jax.typeof, given.state))
            planned = plan(chosen, bounds, state_bytes, programs.memory, steps)
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
            run = GradientRun(NAME, programs, planned, limit, list(given.params), rows, states, *at[1:], shown, watched)
            gradient = run.to_the_end()
        of_init = _of_init(init, tree_of(problem.state, gradient.of_state)[0])
        of_xs = None if outputs is None else outputs.rows()
        found = gradient.value, Gradients(tree_of(problem.params, gradient.of_params), of_init, of_xs)
        return (found, _info(run, within, state_bytes)) if info else found

    return call
