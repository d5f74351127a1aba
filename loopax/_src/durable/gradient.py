"""Gradients of long runs: carries at the starts of chunks on disk, and chunks differentiated from the last to the first.

A forward pass takes all chunks, and stores the state before some of them, on disk or in memory. Then each chunk is
differentiated from its state, which is read, or computed again from one before it. The schedule is the binomial one, a
step of which is a chunk (`schedule/binomial.py`); its lowest slots are on disk, those above them in memory.

Nothing of a run depends on when it was interrupted: what a chunk gives depends on its state alone, and states are the
same whether they are read or computed again. So a run that goes on asks the schedule anew, from the states on disk.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import PyTree

from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.durable.chunk import CHUNK_BYTES, RowPlan, placed
from loopax._src.durable.options import check, locked, refuse_transformations, write_whole
from loopax._src.durable.outputs import Outputs
from loopax._src.durable.pace import Interrupts, SavePace, watching
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.loops import scan
from loopax._src.pytrees.leaves import pack
from loopax._src.schedule.binomial import Action, replay, starts

_NAME = "durable.value_and_grad"
_CHUNK_SECONDS, _PROBE_SECONDS, _MOST_PROBED = 0.2, 0.05, 1 << 16


class Run(NamedTuple):
    """The compiled parts of a run; a state is (carry, sum of ys), differentiated leaves are those of inexact dtypes."""

    forward: Callable[..., Any]  # (params, state, rows of xs, number of steps) -> state
    pullback: Callable[..., Any]  # (params, state, rows, number, cotangent of the state, sum for params) -> both, rows
    value: Callable[..., Any]  # (params, state) -> value, cotangents of params and of the state


def _compiled(loss: Any, f: Any, kind: Any, rows: int) -> Run:
    """For chunks of at most so many rows."""

    def walked(params: Any, state: Any, xs: Any, most: Any, **options: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            carry, total = state
            carry, y = f(params, carry, x)
            return (carry, jax.tree.map(jnp.add, total, y)), None

        bound = {} if jax.tree.leaves(xs) else {"max_steps": rows}
        return scan(step, state, xs, length=most, **bound, **options)[0]

    def pullback(params: Any, state: Any, xs: Any, most: Any, cotangent: Any, total: Any) -> Any:
        (params, state, xs), rest = eqx.partition((params, state, xs), eqx.is_inexact_array)

        def of_inexact(*inexact: Any) -> Any:
            out = walked(*eqx.combine(inexact, rest), most, kind=kind)
            return eqx.filter(out, eqx.is_inexact_array)

        of_params, of_state, of_rows = jax.vjp(of_inexact, params, state, xs)[1](cotangent)
        return of_state, jax.tree.map(jnp.add, total, of_params), of_rows

    def value(params: Any, state: Any) -> Any:
        inexact, rest = eqx.partition((params, state), eqx.is_inexact_array)

        def of_inexact(inexact: Any) -> Any:
            params, (carry, total) = eqx.combine(inexact, rest)
            return loss(params, carry, total)

        found, (of_params, of_state) = jax.value_and_grad(of_inexact)(inexact)
        return found, of_params, of_state

    return Run(jax.jit(walked), jax.jit(pullback, donate_argnums=(4, 5)), jax.jit(value))


class Plan(NamedTuple):
    """Chunks, and how many states are kept at a time."""

    steps: int  # of the run
    chunk: int  # steps of a chunk; the last one may have fewer
    disk: int  # states on disk
    memory: int  # states in memory

    @property
    def chunks(self) -> int:
        return -(-self.steps // self.chunk)

    @property
    def slots(self) -> int:
        return self.disk + self.memory

    def rows(self, chunk: int) -> tuple[int, int]:
        """The rows of a chunk, from and to."""
        return chunk * self.chunk, min((chunk + 1) * self.chunk, self.steps)


@dataclass
class States:
    """The states before chunks that are kept: on disk, and in memory, where a process that ends loses them.

    The first one is known: nobody stores it.
    """

    saves: Saves
    plan: Plan
    first: list[Array]
    make_room: Callable[[], None] = lambda: None  # so that `clear` may be called
    in_memory: dict[int, list[Array]] = field(default_factory=dict)
    on_disk: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)  # still on disk, as a run that goes on may need them

    def kept(self, end: int) -> list[int]:
        """The chunks before `end` before which a state is kept."""
        return sorted(chunk for chunk in {0, *self.on_disk, *self.in_memory} if chunk < end)

    def keep(self, chunk: int, arrays: list[Array]) -> None:
        """Store a state: on disk as long as there is room, as states that are kept first are kept for longest."""
        if chunk == 0 or chunk in self.on_disk or chunk in self.in_memory:
            return
        if len(self.on_disk) < self.plan.disk:
            if len(self.on_disk) + len(self.dropped) >= self.plan.disk:
                self.make_room()
            self.saves.start(SavedState(chunk, True, arrays))
            self.on_disk.add(chunk)
        else:
            self.in_memory[chunk] = [jnp.copy(x) for x in arrays]

    def read(self, chunk: int) -> list[Array]:
        """A state as it was kept."""
        if chunk == 0:
            return [jnp.copy(x) for x in self.first]
        if chunk in self.in_memory:
            return [jnp.copy(x) for x in self.in_memory[chunk]]
        self.saves.finish()
        return self.saves.read(chunk, self.first)

    def drop(self, chunk: int) -> None:
        """Forget a state; its files stay until `clear`."""
        if chunk in self.on_disk:
            self.on_disk.remove(chunk)
            self.dropped.add(chunk)
        self.in_memory.pop(chunk, None)

    def clear(self) -> None:
        """Remove the files of states that nobody needs any more, not even a run that goes on."""
        self.saves.finish()
        for chunk in self.dropped:
            self.saves.remove(chunk)
        self.dropped.clear()


class Gradient(NamedTuple):
    """What is known on the way back: the value, and cotangents of the state before a chunk, and of the parameters."""

    value: Array
    of_state: Any
    of_params: Any


@dataclass
class Machine:
    """What runs a plan."""

    run: Run
    plan: Plan
    params: Any
    xs: Any
    treedef: Any  # of a state
    states: States
    ahead: Saves  # where the forward pass is
    back: Saves  # where the way back is; with the rows of cotangents of xs

    def to_the_end(self, interrupts: Interrupts) -> Gradient:
        """Go on from where the run is."""
        like = jax.eval_shape(self.run.value, self.params, self.treedef.unflatten(self.states.first))
        like = Gradient(*jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)[:1], like[2], like[1])
        like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        leaves, treedef = jax.tree.flatten(like)
        found = self.back.newest(leaves)
        if found is None:
            last = self.treedef.unflatten(self.forward(interrupts))
            value, of_params, of_state = self.run.value(self.params, last)
            end, gradient = self.plan.chunks, Gradient(value, of_state, of_params)
        else:
            done = found.steps
            end, gradient = (self.plan.steps - done + self.plan.chunk - 1) // self.plan.chunk, treedef.unflatten(found.arrays)
            self.states.on_disk = {chunk for chunk in self.states.saves.steps() if chunk < end}
            self.states.dropped = {chunk for chunk in self.states.saves.steps() if chunk >= end}
            self.states.clear()
        if self.back.outputs is not None:
            self.back.outputs.open(0 if found is None else found.steps)
        return self.backward(end, gradient, interrupts)

    def _rows(self, chunk: int) -> tuple[Any, Any]:
        """The rows of xs of a chunk, and their number; behind them are zeros."""
        low, high = self.plan.rows(chunk)

        def padded(x: Any) -> Array:
            rows = jnp.asarray(x[low:high])
            return jnp.pad(rows, [(0, self.plan.chunk - (high - low)), *[(0, 0)] * (rows.ndim - 1)])

        return jax.tree.map(padded, self.xs), np.int32(high - low)

    def advance(self, chunk: int, arrays: list[Array]) -> list[Array]:
        """The state behind a chunk."""
        rows, most = self._rows(chunk)
        return jax.tree.leaves(self.run.forward(self.params, self.treedef.unflatten(arrays), rows, most))

    def forward(self, interrupts: Interrupts) -> list[Array]:
        """The last state."""
        state = self.ahead.newest(self.states.first) or SavedState(0, True, self.states.read(0))
        self.states.on_disk = {chunk for chunk in self.states.saves.steps() if chunk <= state.steps}
        chunk, arrays, kept = state.steps, state.arrays, set(starts(self.plan.chunks, self.plan.slots + 1))
        self.ahead.pace.begin(chunk)
        while chunk < self.plan.chunks and not interrupts.received:
            if chunk in kept:
                self.states.keep(chunk, arrays)
            begun = time.monotonic()
            arrays = jax.block_until_ready(self.advance(chunk, arrays))
            self.ahead.pace.took(1, time.monotonic() - begun)
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

        def saved() -> SavedState:
            return SavedState(plan.steps - min(end * plan.chunk, plan.steps), True, jax.tree.leaves(gradient))

        def make_room() -> None:
            saves.save(saved())
            saves.finish()
            states.clear()

        states.make_room = make_room
        saves.pace.begin(saved().steps)
        current: list[Array] = []
        for name, chunk in replay(states.kept(end), end, plan.slots + 1) if end else ():
            if interrupts.received:
                break
            if name == "keep":
                states.keep(chunk, current)
            elif name == "restore":
                current = states.read(chunk)
            elif name == "advance":
                current = jax.block_until_ready(self.advance(chunk, current))
            elif name == "drop":
                states.drop(chunk)
            else:
                rows, most = self._rows(chunk)
                begun, state = time.monotonic(), self.treedef.unflatten(current)
                of_state, of_params, of_rows = self.run.pullback(self.params, state, rows, most, *gradient[1:])
                gradient = jax.block_until_ready(Gradient(gradient.value, of_state, of_params))
                saves.pace.took(int(most), time.monotonic() - begun)
                if saves.outputs is not None and saves.outputs.writes:
                    pieces = [np.asarray(x)[: int(most)][::-1] for x in jax.tree.leaves(of_rows)]
                    saves.outputs.write(saved().steps, pieces)
                end = chunk
                saves.look()
                if saves.pace.should_save(saved().steps):
                    make_room()
        saves.end(saved(), interrupts, f"{plan.chunks - end} of {plan.chunks} chunks back")
        return gradient


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
    """Value and gradient of a function of the last carry and the sum of the outputs of a scan.

    `f(params, carry, x) -> (carry, y)`, and `loss(params, carry, sum of ys)` is a number. The function that is returned
    takes `(params, init, xs=None)`, and returns `(value, (of params, of init, of xs))`, where cotangents of `xs` are
    rows on disk. The same call starts and resumes.

    `disk` and `memory` are the bytes that kept states take; None: as many as there are.
    """

    def call(params: Any, init: Any, xs: Any = None) -> tuple[Array, tuple[Any, Any, Any]]:
        refuse_transformations(_NAME, params, init, xs)
        leaves = jax.tree.leaves(xs)
        steps = len(leaves[0]) if leaves else length
        if steps is None:
            raise ValueError(f"{_NAME}: xs has no arrays, so `length=` says how many steps there are.")
        root, pace, *_ = check(_NAME, directory, checkpoint_every, 2, "auto", chunk_steps)
        with locked(_NAME, root), ExitStack() as stack:
            row = jax.tree.map(lambda x: jnp.asarray(x[0]), xs) if leaves else None
            y = jax.eval_shape(lambda *args: f(*args)[1], params, init, row)
            total = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), y)
            first = placed(jax.tree.leaves((init, total)))
            treedef = jax.tree.structure((init, total))
            plan = _plan(root, steps, chunk_steps or _MOST_PROBED, disk, memory, num_bytes(map(jax.typeof, first)))
            run = _compiled(loss, f, kind, plan.chunk)
            inexact = eqx.filter(jax.tree.map(lambda x: jnp.zeros((plan.chunk, *x.shape[1:]), x.dtype), xs), eqx.is_inexact_array)
            rows = RowPlan(steps, steps - 1, -1)
            outputs = Outputs(_NAME, root / "backward", pack(inexact)[1], rows) if jax.tree.leaves(inexact) else None

            def saves(name: str, keep: int | None, outputs: Outputs | None = None) -> Saves:
                _, pace, *_ = check(_NAME, directory, checkpoint_every, 2, "auto", chunk_steps)
                return stack.enter_context(closing(Saves(_NAME, root / name, keep, pace, outputs)))

            states = States(saves("states", None), plan, first)
            machine = Machine(run, plan, params, xs, treedef, states, saves("forward", 2), saves("backward", 2, outputs))
            interrupts = stack.enter_context(watching())
            gradient = machine.to_the_end(interrupts)
            of_init = gradient.of_state[0]
            return gradient.value, (gradient.of_params, of_init, outputs.rows() if outputs else None)

    return call


def _plan(root: Path, steps: int, chunk: int, disk: int | None, memory: int, state_bytes: int) -> Plan:
    """That of the run in a directory, or a new one."""
    file = root / "plan.json"
    if file.exists():
        return Plan(**json.loads(file.read_text()))
    chunks = -(-steps // chunk)
    on_disk = chunks if disk is None else disk // max(state_bytes, 1)
    plan = Plan(steps, chunk, min(on_disk, chunks), memory // max(state_bytes, 1))
    write_whole(file, json.dumps(plan._asdict()))
    return plan
