"""How the gradient of a long run is divided: the steps of a chunk, what is stored within it, where states are kept.

It is chosen from measured seconds when a run begins. Results depend on chunks and on their kind to the last bits, so
what is chosen is stored, and holds for the whole run.
"""

import json
import shutil
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from jax import Array

from loopax._src.core.jaxpr.util import num_bytes
from loopax._src.durable.chunk import CHUNK_BYTES
from loopax._src.durable.files import read_sealed, write_sealed
from loopax._src.durable.gradient_chunk import Programs, device_bytes, functions_of, recorded_bytes
from loopax._src.durable.gradient_problem import NAME, Given, Problem
from loopax._src.durable.options import all_agree, of_first, on_first
from loopax._src.durable.pace import CHUNK_SECONDS, SavePace
from loopax._src.durable.row_source import RowSource
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.durable.states import Plan
from loopax._src.durable.stored_program import refuse_gone
from loopax._src.kinds import Checkpointed, Kind, Residuals, to_kind
from loopax._src.schedule.binomial import evaluations_from

PULLBACK = 2.0  # the time of a pullback / that of its steps: a guess
_PROBE = "probe"  # the directory of a state that is written to see how long that takes
_PROBE_SECONDS = 0.02  # of steps that are measured
_LEAST_SECONDS = 0.02  # of a chunk that stores residuals: calls and saves take milliseconds
_MOST_STEPS = 1 << 17  # of a chunk
UNBOUNDED = 1 << 30  # states on disk, where nobody knows how many there will be


@dataclass(frozen=True)
class Bounds:
    """What the user says, checked; bytes."""

    disk: int | None  # for states
    memory: int  # for states, and for what is stored within a chunk
    is_strict: bool  # whether the user has said how much memory
    kind: Kind
    chunk_steps: int | None


@dataclass(frozen=True)
class Choice:
    """What is chosen when a run begins."""

    chunk_steps: int
    stores: str  # within a chunk, where nobody has named a kind: "residuals", "checkpoints" or "60 checkpoints"
    step_seconds: float  # measured, as what follows
    write_seconds: float  # of a state
    read_seconds: float

    def kind(self, named: Kind) -> Kind:
        """What is stored within a chunk."""
        if named != to_kind("auto"):
            return named
        count, _, what = self.stores.rpartition(" ")
        return Residuals() if what == "residuals" else Checkpointed(int(count) if count else None)


@dataclass(frozen=True)
class Division:
    """Divides a run into chunks."""

    root: Path
    bounds: Bounds
    problem: Problem
    given: Given  # of the first step, without rows
    rows: RowSource
    steps: int  # at most

    def chunk(self) -> tuple[Choice, Programs]:
        """That of the run in the directory, or a new one."""
        file = self.root / "plan.json"
        on_first(lambda: shutil.rmtree(self.root / _PROBE, ignore_errors=True))  # of a process that was killed
        if not all_agree(file.exists()):
            refuse_gone(NAME, file)
            chosen, programs = self._chosen()
            on_first(lambda: write_sealed(file, json.dumps(asdict(chosen))))
            return chosen, programs
        try:
            chosen = Choice(**json.loads(read_sealed(file)))
        except (OSError, TypeError, ValueError) as error:
            raise RuntimeError(
                f"{NAME}: {file} is damaged ({error}). Restore it from a backup, or delete the "
                "directory of the run to start anew."
            ) from error
        return chosen, self._compiled(chosen)

    def _compiled(self, chosen: Choice) -> Programs:
        functions = functions_of(self.problem, chosen.chunk_steps, chosen.kind(self.bounds.kind))
        return Programs(functions, self.given._replace(rows=self.rows.read(0, chosen.chunk_steps)))

    def _chosen(self) -> tuple[Choice, Programs]:
        bounds = self.bounds
        row_bytes = max(self.rows.row_bytes, 1)
        most, few = (
            max(min(self.steps, _MOST_STEPS, min(CHUNK_BYTES, bounds.memory // part) // row_bytes), 1)
            for part in (8, 32)  # of the memory, for the rows of a chunk, and of those that are measured
        )
        seconds = _step_seconds(self.problem, self.given, self.rows, few)
        wanted = bounds.chunk_steps or max(min(round(CHUNK_SECONDS / seconds), most), 1)
        wanted = max(min(wanted, self.steps), 1)
        transfers = (0.0, 0.0) if bounds.disk == 0 else _transfer_seconds(self.root, [*self.given.state])
        if bounds.kind != to_kind("auto"):
            chosen = Choice(wanted, "", seconds, *transfers)
            return chosen, self._compiled(chosen)
        recorded, room = _recorded(self.problem, self.given, self.rows), float(bounds.memory)
        while within := self._within(room, wanted, seconds, *recorded):
            chosen = Choice(*within, seconds, *transfers)
            programs = self._compiled(chosen)
            if programs.memory <= bounds.memory:
                return chosen, programs
            room *= 0.9 * bounds.memory / programs.memory  # XLA needs more than what is recorded
        chosen = Choice(bounds.chunk_steps or 1, "1 checkpoints", seconds, *transfers)
        programs = self._compiled(chosen)
        if bounds.is_strict and programs.memory > bounds.memory:
            raise ValueError(
                f"{NAME}(memory={bounds.memory}): the pullback of the smallest chunk takes {programs.memory} "
                f"bytes. Give memory={programs.memory} or more; {16 * programs.memory} make it several times as fast."
            )
        return chosen, programs

    def _within(self, room: float, wanted: int, seconds: float, fixed: int, each: int) -> tuple[int, str] | None:
        """The steps of a chunk for which there is room, and what it stores; `fixed` and `each`: bytes of residuals."""
        bounds, state = self.bounds, device_bytes(self.given.state)
        free = int(room) - 2 * state - fixed
        if free < each + state:
            return None
        fits = free // max(each, 1)
        if fits >= wanted or (bounds.chunk_steps is None and fits * seconds >= _LEAST_SECONDS):
            return min(wanted, fits), "residuals"
        count = min(free // max(state, 1), wanted)
        return wanted, "checkpoints" if count >= 3 * wanted**0.5 else f"{count} checkpoints"


def _step_seconds(problem: Problem, given: Given, rows: RowSource, most: int) -> float:
    """Measured, for as many steps as take long enough."""
    forward = jax.jit(functions_of(problem, most, None).forward)
    given, some = given._replace(rows=rows.read(0, most)), 1
    while True:
        given = given._replace(most=np.int32(some))
        jax.block_until_ready(forward(given))
        begun = time.perf_counter()
        taken = int(jax.block_until_ready(forward(given))[1])
        seconds = of_first(time.perf_counter() - begun)
        if seconds >= _PROBE_SECONDS or some == most or taken < some:
            return max(seconds, 1e-6) / max(taken, 1)
        some = min(2 * some, most)


def _recorded(problem: Problem, given: Given, rows: RowSource) -> tuple[int, int]:
    """The bytes that the pullback of a chunk needs, for no step and for each one."""
    one, two = (
        recorded_bytes(functions_of(problem, n, Residuals()), given._replace(rows=rows.types(n))) for n in (1, 2)
    )
    return max(2 * one - two, 0), two - one


def _transfer_seconds(root: Path, state: list[Array]) -> tuple[float, float]:
    """To write a state, and to read it, when that has been done before."""
    place, found = root / _PROBE, (0.0, 0.0)
    with closing(Saves(NAME, place, None, SavePace(1.0, False))) as saves:
        for i in range(2):
            begun = time.perf_counter()
            saves.start(SavedState(i, True, state))
            saves.finish()
            written = time.perf_counter()
            saves.read(i, state)
            found = written - begun, time.perf_counter() - written
    on_first(lambda: shutil.rmtree(place))
    return of_first(found[0]), of_first(found[1])


def plan(chosen: Choice, bounds: Bounds, state: list[Array], within: int, steps: int) -> Plan:
    """Where how many states are kept, that have these arrays; `within`: the bytes that a chunk takes; -1 steps: any."""
    on_disk, on_device = (max(size, 1) for size in (num_bytes(map(jax.typeof, state)), device_bytes(state)))
    chunks = UNBOUNDED if steps < 0 else -(-steps // chosen.chunk_steps)
    if bounds.is_strict and within > bounds.memory:
        raise ValueError(
            f"{NAME}(memory={bounds.memory}): the pullback of a chunk of {chosen.chunk_steps} steps takes "
            f"{within} bytes with kind={bounds.kind}. Give memory={within} or more, another kind, or fewer chunk_steps."
        )
    most = max(chunks - 1, 0)
    disk = most if bounds.disk is None else min(bounds.disk // on_disk, most)
    # One is used by the chunk, and one is read ahead.
    memory = min(max(bounds.memory - within - 2 * on_device, 0) // on_device, most)
    if disk + memory == 0 and most > 1:
        raise ValueError(
            f"{NAME}(disk={bounds.disk}, memory={bounds.memory}): there is no room for a single state, of "
            f"{on_disk} bytes, and each chunk would be computed again from the start. Give disk={on_disk} or more; "
            "with n states, 2 to 3 evaluations of a step take runs of n**2 / 2 chunks."
        )
    found = Plan(steps, chosen.chunk_steps, disk, memory)
    return found if steps < 0 else _fastest(found, chosen)


def fewest(chunks: int, slots: int) -> int:
    """How many chunks are evaluated in all, where their number is known: the last one is evaluated once.

    That is the optimum (Griewank & Walther 2000), with the first state in one of the slots.
    """
    return evaluations_from([0], chunks, slots) - chunks if chunks else 0


def fewest_spread(chunks: int, disk: int, memory: int) -> int:
    """How many chunks are evaluated in all, if states on disk are spread evenly and those between them in memory."""
    short, longer = divmod(chunks, disk + 1)
    lengths = {short: disk + 1 - longer, short + 1: longer}
    last = -(-chunks // (disk + 1))  # the forward pass goes through it once, as its first way back
    return chunks - last + sum(many * fewest(length, 1 + memory) for length, many in lengths.items())


def evaluated(plan: Plan) -> int:
    """How many chunks a plan evaluates."""
    if plan.is_spread:
        return fewest_spread(plan.chunks, plan.disk, plan.memory)
    return fewest(plan.chunks, plan.slots)


def _fastest(widest: Plan, chosen: Choice) -> Plan:
    """How many states to keep on disk, and which: `widest` keeps as many as have room.

    The binomial schedule evaluates the fewest chunks, but writes other states on its way back. Where the disk is slow,
    states that are spread evenly and written once take less time.
    """
    chunks, chunk = widest.chunks, chosen.chunk_steps * chosen.step_seconds
    write, read = chosen.write_seconds, chosen.read_seconds

    def seconds(plan: Plan) -> float:
        work = evaluated(plan)
        back = (work - chunks + PULLBACK * chunks) * chunk
        again = 0 if plan.is_spread else min(max(work - 2 * chunks, 0), chunks)  # written and read, on the way back
        waits = plan.disk * write - chunks * chunk, again * write + (plan.disk + again) * read - back
        return chunks * chunk + back + sum(max(wait, 0.0) for wait in waits)

    hidden = min(int(chunks * chunk / max(write, 1e-9)), widest.disk)
    numbers = sorted({hidden, widest.disk, *(widest.disk >> i for i in range(1, 30))}, reverse=True)
    plans = [widest._replace(disk=disk, is_spread=spread) for spread in (False, True) for disk in numbers]
    return min(plans, key=seconds)
