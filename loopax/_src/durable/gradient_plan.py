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
from loopax._src.durable.gradient_chunk import Functions, Given, Problem, recorded_bytes
from loopax._src.durable.options import all_agree, on_first, write_whole
from loopax._src.durable.pace import CHUNK_SECONDS, SavePace
from loopax._src.durable.row_source import RowSource
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.durable.states import Plan
from loopax._src.kinds import Auto, Checkpointed, Kind, Residuals
from loopax._src.schedule.binomial import evaluations_from

PULLBACK = 2.0  # the time of a pullback / that of its steps, until it has been measured
_PROBE_SECONDS = 0.02  # of steps that are measured
_LEAST_SECONDS = 0.02  # of a chunk that stores residuals: calls and saves take milliseconds
_MOST_STEPS = 1 << 20  # of a chunk
UNBOUNDED = 1 << 30  # states on disk, where nobody knows how many there will be


@dataclass(frozen=True)
class Bounds:
    """What the user says, checked; bytes."""

    name: str  # of the function
    disk: int | None  # for states
    memory: int  # for states, and for what is stored within a chunk
    is_strict: bool  # whether the user has said how much memory
    kind: Kind
    chunk_steps: int | None


@dataclass(frozen=True)
class Choice:
    """What is chosen when a run begins."""

    chunk_steps: int
    checkpoints: int | None  # within a chunk, where nobody has named a kind; None: residuals
    step_seconds: float  # measured, as what follows
    write_seconds: float  # of a state
    read_seconds: float

    def kind(self, named: Kind) -> Kind:
        """What is stored within a chunk."""
        if not isinstance(named, Auto):
            return named
        return Residuals() if self.checkpoints is None else Checkpointed(self.checkpoints)


def choice(root: Path, bounds: Bounds, problem: Problem, given: Given, rows: RowSource, steps: int) -> Choice:
    """That of the run in the directory, or a new one. `given`: of the first step, without rows; `steps`: at most."""
    file = root / "plan.json"
    if not all_agree(file.exists()):
        chosen = json.dumps(asdict(_chosen(root, bounds, problem, given, rows, steps)))
        on_first(lambda: write_whole(file, chosen))
    try:
        return Choice(**json.loads(file.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{bounds.name}: {file} is damaged ({error}). Restore it from a backup, or delete the directory of the run "
            "to start anew."
        ) from error


def _chosen(root: Path, bounds: Bounds, problem: Problem, given: Given, rows: RowSource, steps: int) -> Choice:
    most = max(min(steps, _MOST_STEPS, CHUNK_BYTES // max(rows.row_bytes, 1)), 1)
    seconds = _step_seconds(problem, given, rows, most)
    wanted = max(min(round(CHUNK_SECONDS / seconds), most), 1)
    chunk, checkpoints = bounds.chunk_steps or wanted, None
    if isinstance(bounds.kind, Auto):
        state = num_bytes(map(jax.typeof, given.state))
        fixed, each = _recorded(problem, given, rows)
        room = bounds.memory - 2 * state - fixed
        if room < each + state:
            least = 3 * state + fixed + each
            raise ValueError(
                f"{bounds.name}(memory={bounds.memory}): the pullback of one step takes {least} bytes. Give "
                f"memory={least} or more; {16 * least} make it several times as fast."
            )
        fits = room // max(each, 1)
        if fits >= chunk or (bounds.chunk_steps is None and fits * seconds >= _LEAST_SECONDS):
            chunk = min(chunk, fits)
        else:
            checkpoints = min(room // max(state, 1), chunk)
    transfers = (0.0, 0.0) if bounds.disk == 0 else _transfer_seconds(root, bounds.name, list(given.state))
    return Choice(chunk, checkpoints, seconds, *transfers)


def _step_seconds(problem: Problem, given: Given, rows: RowSource, most: int) -> float:
    """Measured, for as many steps as take long enough."""
    forward = jax.jit(Functions(problem, most, None).forward)
    given, some = given._replace(rows=rows.read(0, most)), 1
    while True:
        given = given._replace(most=np.int32(some))
        jax.block_until_ready(forward(given))
        begun = time.monotonic()
        taken = int(jax.block_until_ready(forward(given))[1])
        seconds = time.monotonic() - begun
        if seconds >= _PROBE_SECONDS or some == most or taken < some:
            return max(seconds, 1e-6) / max(taken, 1)
        some = min(2 * some, most)


def _recorded(problem: Problem, given: Given, rows: RowSource) -> tuple[int, int]:
    """The bytes that the pullback of a chunk needs, for no step and for each one."""
    one, two = (recorded_bytes(Functions(problem, n, Residuals()), given._replace(rows=rows.types(n))) for n in (1, 2))
    return max(2 * one - two, 0), two - one


def _transfer_seconds(root: Path, name: str, state: list[Array]) -> tuple[float, float]:
    """To write a state, and to read it, when that has been done before."""
    place, found = root / "probe", (0.0, 0.0)
    with closing(Saves(name, place, None, SavePace(1.0, False))) as saves:
        for i in range(2):
            begun = time.monotonic()
            saves.start(SavedState(i, True, state))
            saves.finish()
            written = time.monotonic()
            saves.read(i, state)
            found = written - begun, time.monotonic() - written
    on_first(lambda: shutil.rmtree(place))
    return found


def plan(chosen: Choice, bounds: Bounds, state: int, within: int, steps: int) -> Plan:
    """Where how many states are kept, of so many bytes each; `within`: the bytes that a chunk takes; -1 steps: any."""
    chunks = UNBOUNDED if steps < 0 else -(-steps // chosen.chunk_steps)
    if bounds.is_strict and within > bounds.memory:
        raise ValueError(
            f"{bounds.name}(memory={bounds.memory}): the pullback of a chunk of {chosen.chunk_steps} steps takes "
            f"{within} bytes with kind={bounds.kind}. Give memory={within} or more, another kind, or fewer chunk_steps."
        )
    most = max(chunks - 1, 0)
    disk = most if bounds.disk is None else min(bounds.disk // max(state, 1), most)
    # One is used by the chunk, and one is read ahead.
    memory = min(max(bounds.memory - within - 2 * state, 0) // max(state, 1), most)
    if disk + memory == 0 and most > 1:
        raise ValueError(
            f"{bounds.name}(disk={bounds.disk}, memory={bounds.memory}): there is no room for a single state, of "
            f"{state} bytes, and each chunk would be computed again from the start. Give disk={state} or more; with n "
            "states, 2 to 3 evaluations of a step take runs of n**2 / 2 chunks."
        )
    return Plan(steps, chosen.chunk_steps, disk if steps < 0 else _fastest(disk, chunks, memory, chosen), memory)


def fewest(chunks: int, slots: int) -> int:
    """How many chunks are evaluated in all, where their number is known: the last one is evaluated once.

    That is the optimum (Griewank & Walther 2000), with the first state in one of the slots.
    """
    return evaluations_from([0], chunks, slots) - chunks if chunks else 0


def _fastest(most: int, chunks: int, memory: int, chosen: Choice) -> int:
    """How many states to keep on disk: all that have room, or as many as are written and read without a wait."""
    chunk = chosen.chunk_steps * chosen.step_seconds

    def seconds(disk: int) -> float:
        back = (fewest(chunks, 1 + disk + memory) + (PULLBACK - 1) * chunks) * chunk
        waits = disk * chosen.write_seconds - chunks * chunk, disk * chosen.read_seconds - back
        return back + sum(max(wait, 0.0) for wait in waits)

    hidden = int(chunks * chunk / max(chosen.write_seconds, 1e-9))
    return min((most, min(most, hidden)), key=seconds)
