"""Gradients of long runs: states before chunks on disk, and chunks differentiated from the last one to the first.

A forward pass takes all chunks, and keeps the state before some of them (`durable/states.py`). Then each chunk is
differentiated from its state, which is read, or computed again from one before it. The schedule is the binomial one, a
step of which is a chunk (`schedule/binomial.py`); its lowest slots are on disk, and those above them in memory.

What a chunk gives depends on its state alone, and a state is the same whether it is read or computed again. So a run
that goes on asks the schedule anew, from the states that are on disk, and ends with the same bits.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from loopax._src.core.jaxpr.util import num_bytes, padded
from loopax._src.durable.chunk import CHUNK_BYTES, RowPlan, placed
from loopax._src.durable.options import check, locked, refuse_transformations, write_whole
from loopax._src.durable.outputs import Outputs
from loopax._src.durable.pace import Interrupts, SavePace, watching
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.durable.states import Plan, States
from loopax._src.durable.step_hash import Written
from loopax._src.durable.stored_program import compare_with_stored, stored_program_of
from loopax._src.loops import scan
from loopax._src.pytrees.leaves import pack
from loopax._src.schedule.binomial import replay, starts

NAME = "durable.value_and_grad"
_CHUNK_SECONDS, _PROBE_SECONDS, _MOST_ROWS = 0.2, 0.02, 1 << 16


# The compiled parts. A state is (carry, sum of ys); leaves of inexact dtypes are differentiated.


class Run(NamedTuple):
    """What a run computes with."""

    forward: Callable[..., Any]  # (params, state, rows of xs, number of steps) -> state
    pullback: Callable[..., Any]  # (*as forward, cotangent of the state, sum of those of params) -> both, and of rows
    value: Callable[..., Any]  # (params, state) -> value, cotangents of params and of the state


def _compiled(loss: Any, f: Any, kind: Any, rows: int) -> Run:
    """For chunks of at most so many rows."""

    def forward(params: Any, state: Any, xs: Any, most: Any, **options: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            carry, total = state
            carry, y = f(params, carry, x)
            return (carry, jax.tree.map(jnp.add, total, y)), None

        bound = {} if jax.tree.leaves(xs) else {"max_steps": rows}
        return scan(step, state, xs, length=most, **bound, **options)[0]

    def pullback(params: Any, state: Any, xs: Any, most: Any, cotangent: Any, total: Any) -> Any:
        inexact, rest = eqx.partition((params, state, xs), eqx.is_inexact_array)

        def of_inexact(*inexact: Any) -> Any:
            params, state, xs = eqx.combine(inexact, rest)
            return eqx.filter(forward(params, state, xs, most, kind=kind), eqx.is_inexact_array)

        of_params, of_state, of_rows = jax.vjp(of_inexact, *inexact)[1](cotangent)
        return of_state, jax.tree.map(jnp.add, total, of_params), of_rows

    def value(params: Any, state: Any) -> Any:
        inexact, rest = eqx.partition((params, state), eqx.is_inexact_array)

        def of_inexact(inexact: Any) -> Any:
            params, (carry, total) = eqx.combine(inexact, rest)
            return loss(params, carry, total)

        found, (of_params, of_state) = jax.value_and_grad(of_inexact)(inexact)
        return found, of_params, of_state

    return Run(jax.jit(forward), jax.jit(pullback, donate_argnums=(4, 5)), jax.jit(value))


# The run.


class Gradient(NamedTuple):
    """What is known on the way back: the value, and cotangents of the state before a chunk, and of the parameters."""

    value: Array
    of_state: Any
    of_params: Any


@dataclass(frozen=True)
class Machine:
    """Everything that a run needs, but for where it stands."""

    run: Run
    plan: Plan
    params: Any
    xs: Any
    treedef: Any  # of a state
    states: States
    ahead: Saves  # where the forward pass is
    back: Saves  # where the way back is, after the rows of cotangents of xs that belong to it

    def to_the_end(self, interrupts: Interrupts) -> Gradient:
        """Go on from where the run is."""
        types = jax.eval_shape(self.run.value, self.params, self.treedef.unflatten(self.states.first))
        value, of_params, of_state = jax.tree.map(jnp.zeros_like, types)
        like, treedef = jax.tree.flatten(Gradient(value, of_state, of_params))
        found = self.back.newest(like)
        if found is None:
            last = self.treedef.unflatten(self.forward(interrupts))
            value, of_params, of_state = self.run.value(self.params, last)
            end, gradient = self.plan.chunks, Gradient(value, of_state, of_params)
        else:
            end, gradient = self.plan.chunk_before(found.steps), treedef.unflatten(found.arrays)
            self.states.begin(end)
        if self.back.outputs is not None:
            self.back.outputs.open(0 if found is None else found.steps)
        return self.backward(end, gradient, interrupts)

    def forward(self, interrupts: Interrupts) -> list[Array]:
        """The last state."""
        state = self.ahead.newest(self.states.first) or SavedState(0, True, self.states.read(0))
        chunk, arrays, kept = state.steps, state.arrays, set(starts(self.plan.chunks, self.plan.slots))
        self.states.begin(chunk + 1)
        self.ahead.pace.begin(chunk)
        while chunk < self.plan.chunks and not interrupts.received:
            if chunk in kept:
                self.states.keep(chunk, arrays)
            arrays = self._timed(self.ahead.pace, 1, lambda chunk=chunk, arrays=arrays: self._advance(chunk, arrays))
            chunk += 1
            self.ahead.look()
            if self.ahead.pace.should_save(chunk):
                self.ahead.save(SavedState(chunk, True, arrays))
        self.states.saves.finish()
        self.ahead.end(SavedState(chunk, True, arrays), interrupts, f"{chunk} of {self.plan.chunks} chunks ahead")
        return arrays

    def backward(self, end: int, gradient: Gradient, interrupts: Interrupts) -> Gradient:
        """Differentiate the chunks before `end`, from the last to the first."""
        plan, states, saves = self.plan, self.states, self.back

        def save() -> None:
            saves.save(SavedState(plan.steps_behind(end), True, jax.tree.leaves(gradient)))
            saves.finish()
            states.clear()

        states.make_room = save
        saves.pace.begin(plan.steps_behind(end))
        arrays: list[Array] = []
        for name, chunk in replay(states.kept(end), end, plan.slots) if end else ():
            if interrupts.received:
                break
            if name == "keep":
                states.keep(chunk, arrays)
            elif name == "restore":
                arrays = states.read(chunk)
            elif name == "advance":
                arrays = jax.block_until_ready(self._advance(chunk, arrays))
            elif name == "drop":
                states.drop(chunk)
            else:
                gradient, end = self._reverse(chunk, arrays, gradient), chunk
                saves.look()
                if saves.pace.should_save(plan.steps_behind(end)):
                    save()
        reached = SavedState(plan.steps_behind(end), True, jax.tree.leaves(gradient))
        saves.end(reached, interrupts, f"{plan.chunks - end} of {plan.chunks} chunks back")
        return gradient

    def _advance(self, chunk: int, arrays: list[Array]) -> list[Array]:
        """The state behind a chunk."""
        rows, most = self._rows(chunk)
        return jax.tree.leaves(self.run.forward(self.params, self.treedef.unflatten(arrays), rows, most))

    def _reverse(self, chunk: int, arrays: list[Array], gradient: Gradient) -> Gradient:
        """The gradient before a chunk; rows of cotangents of its xs begin to be written."""
        (rows, most), state, outputs = self._rows(chunk), self.treedef.unflatten(arrays), self.back.outputs
        given = self.params, state, rows, most, gradient.of_state, gradient.of_params
        of_state, of_params, of_rows = self._timed(self.back.pace, int(most), lambda: self.run.pullback(*given))
        if outputs is not None and outputs.writes:
            # In the order of the way back.
            pieces = [np.asarray(x)[: int(most)][::-1] for x in jax.tree.leaves(of_rows)]
            outputs.write(self.plan.steps_behind(chunk + 1), pieces)
        return Gradient(gradient.value, of_state, of_params)

    def _timed(self, pace: SavePace, steps: int, compute: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        found = jax.block_until_ready(compute())
        pace.took(steps, time.monotonic() - begun)
        return found

    def _rows(self, chunk: int) -> tuple[Any, Any]:
        """The rows of xs of a chunk, and their number; behind them are zeros."""
        low, high = self.plan.rows(chunk)
        behind = self.plan.chunk - (high - low)
        return jax.tree.map(lambda x: padded(jnp.asarray(x[low:high]), behind), self.xs), np.int32(high - low)


# From the arguments to the results.


def value_and_grad(
    loss: Callable[..., Any],
    f: Callable[..., Any],
    *,
    directory: Any,
    length: int | None = None,
    disk: int | None = None,
    memory: int = 0,
    kind: Any = "auto",
    chunk_steps: int | None = None,
    checkpoint_every: Any = 60.0,
) -> Callable[..., tuple[Array, tuple[Any, Any, Any]]]:
    """Value and gradient of a function of the last carry and of the sum of the outputs of a scan.

    `f(params, carry, x) -> (carry, y)` is its body, and `loss(params, carry, sum of ys)` a number. The function that is
    returned takes `(params, init, xs=None)`, and returns `(value, (of params, of init, of xs))`, where the last is a
    pytree of rows on disk. The same call starts and resumes. `disk` and `memory` are the bytes that kept states may
    take; None: what all of them take.
    """

    def call(params: Any, init: Any, xs: Any = None) -> tuple[Array, tuple[Any, Any, Any]]:
        refuse_transformations(NAME, params, init, xs)
        leaves = jax.tree.leaves(xs)
        steps = len(leaves[0]) if leaves else length
        if steps is None:
            raise ValueError(f"{NAME}(length=...): xs has no arrays, so it says how many steps there are.")
        root, pace, keep, anyway = check(NAME, directory, checkpoint_every, 2, "auto", chunk_steps)
        row = jax.tree.map(lambda x: jnp.asarray(x[0]), xs) if leaves else None
        y = jax.eval_shape(lambda *args: f(*args)[1], params, init, row)
        state = init, jax.tree.map(jnp.zeros_like, y)
        first, treedef = placed(jax.tree.leaves(state)), jax.tree.structure(state)
        with ExitStack() as stack:
            stack.enter_context(locked(NAME, root))
            settings = {"steps": str(steps), "kind": str(kind), "chunk_steps": str(chunk_steps)}
            _compare(root, loss, f, (params, init, row), state, leaves, settings, anyway)
            compiled = partial(_compiled, loss, f, kind)
            size = _chunk_steps(root, lambda: chunk_steps or _measured(compiled, params, state, xs, steps))
            plan = _plan(steps, size, num_bytes(map(jax.typeof, first)), disk, memory)
            zeros = jax.tree.map(lambda x: jnp.zeros((plan.chunk, *x.shape[1:]), x.dtype), xs)
            inexact = eqx.filter(zeros, eqx.is_inexact_array)
            rows = RowPlan(steps, steps - 1, -1)
            outputs = Outputs(NAME, root / "back", pack(inexact)[1], rows) if jax.tree.leaves(inexact) else None

            def saves(name: str, keep: int | None, outputs: Outputs | None = None) -> Saves:
                return stack.enter_context(closing(Saves(NAME, root / name, keep, replace(pace), outputs)))

            kept = States(saves("states", None), plan, first)
            machine = Machine(
                compiled(plan.chunk),
                plan,
                params,
                xs,
                treedef,
                kept,
                saves("ahead", keep),
                saves("back", keep, outputs),
            )
            gradient = machine.to_the_end(stack.enter_context(watching()))
        return gradient.value, (gradient.of_params, gradient.of_state[0], outputs.rows() if outputs else None)

    return call


def _compare(
    root: Path, loss: Any, f: Any, given: Any, state: Any, xs: list[Any], settings: dict[str, str], anyway: bool
) -> None:
    """Compare what is asked for with what the directory holds."""
    params, init, _ = given

    def program(given: Any, params: Any, state: Any) -> Any:
        return f(*given), loss(params, *state)

    closed = jax.make_jaxpr(program)(given, params, state)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((given, params, state))]
    written = Written(closed, paths, {}, [])
    arrays = {f"params{i}": x for i, x in enumerate(jax.tree.leaves(params))}
    arrays |= {f"first carry{i}": x for i, x in enumerate(jax.tree.leaves(init))}
    arrays |= {f"xs, array {i}": jnp.asarray(x) for i, x in enumerate(xs)}
    types = {name: jax.typeof(x).str_short() for name, x in arrays.items()}
    compare_with_stored(NAME, root, stored_program_of(NAME, settings, types, arrays, written), anyway)


def _measured(compiled: Callable[[int], Run], params: Any, state: Any, xs: Any, steps: int) -> int:
    """The steps of a chunk, from the time that some take."""
    row_bytes = sum(x.nbytes // max(len(x), 1) for x in jax.tree.leaves(xs))
    most = max(min(steps, _MOST_ROWS, CHUNK_BYTES // max(row_bytes, 1)), 1)
    forward, rows, some = compiled(most).forward, jax.tree.map(lambda x: jnp.asarray(x[:most]), xs), 1
    while True:
        jax.block_until_ready(forward(params, state, rows, np.int32(some)))
        begun = time.monotonic()
        jax.block_until_ready(forward(params, state, rows, np.int32(some)))
        seconds = time.monotonic() - begun
        if seconds >= _PROBE_SECONDS or some == most:
            return max(min(round(_CHUNK_SECONDS * some / max(seconds, 1e-9)), most), 1)
        some = min(2 * some, most)


def _chunk_steps(root: Path, choose: Callable[[], int]) -> int:
    """Those of the run in a directory, or new ones: they are chosen once, so that a run that goes on has the same."""
    file = root / "plan.json"
    if not file.exists():
        write_whole(file, json.dumps({"chunk_steps": choose()}))
    return json.loads(file.read_text())["chunk_steps"]


def _plan(steps: int, chunk: int, state_bytes: int, disk: int | None, memory: int) -> Plan:
    """As many states as have room in so many bytes, but no more than there are chunks."""
    chunks = -(-steps // chunk)
    kept = (chunks if room is None else min(room // max(state_bytes, 1), chunks) for room in (disk, memory))
    return Plan(steps, chunk, *kept)
