"""States of a run on disk: saved while the run goes on, the newest good one found again. Orbax writes them."""

import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopax._src.durable.options import DamagedSaveWarning, agreed, clear_errors, ocp
from loopax._src.durable.outputs import Outputs
from loopax._src.durable.pace import Interrupts, SavePace

_MOST_TEXT = 1000  # of the error of a damaged file


@dataclass(frozen=True)
class SavedState:
    """Where a run is between two chunks."""

    steps: int  # taken so far
    goes_on: bool  # whether there is another one to take
    arrays: list[jax.Array]  # the carry


def _sealed(steps: int, goes_on: bool, sums: list[str]) -> dict[str, Any]:
    """What is written beside the arrays of a save, with a checksum of its own."""
    seal = sha256(repr((steps, goes_on, sums)).encode()).hexdigest()
    return {"steps": steps, "goes_on": goes_on, "checksums": sums, "seal": seal}


class Saves:
    """The saves of a run, each of a state after the rows that belong to it, and when they are due."""

    def __init__(
        self, where: str, root: Path, keep: int | None, pace: SavePace, outputs: Outputs | None = None
    ) -> None:
        """Unfinished saves of an earlier process are removed.

        All saves are kept (None) of states that are soon read again: these are not compressed, which takes time.
        """
        self.where, self.directory, self.pace, self.outputs = where, root / "saves", pace, outputs
        tree = ocp().PyTreeCheckpointHandler(use_compression=keep is not None)
        handlers = {"state": tree, "facts": ocp().JsonCheckpointHandler()}
        options = ocp().CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True, save_root_metadata=False
        )
        self._manager = ocp().CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def save(self, state: SavedState) -> None:
        """Begin to save a state, if it is not the newest one that is saved."""
        if self._manager.latest_step() != state.steps:
            if self.outputs is not None:
                self.outputs.flush()
            self.start(state)
            self.pace.saving(state.steps)

    def start(self, state: SavedState) -> None:
        """Begin to save; what is given may be used up by the next chunk. Waits for an earlier save to end."""
        self.finish()
        # Orbax may write from the very memory of an array on a CPU, which the next chunk takes for its results.
        copies = [jnp.copy(x) for x in state.arrays]
        self.write(replace(state, arrays=copies), checksums(state.arrays))

    def write(self, state: SavedState, sums: list[str], is_older: bool = False) -> None:
        """Begin to save a state, with its checksums. `is_older`: there may be saves of later states."""
        arrays, args = _written(state.arrays), ocp().args
        facts = _sealed(state.steps, state.goes_on, sums)
        written = {"state": args.PyTreeSave(arrays)} if arrays else {}
        items = args.Composite(facts=args.JsonSave(facts), **written)
        with clear_errors(f"{self.where}: saving to {self.directory}", self._newest_good):
            self._manager.save(state.steps, args=items, **({"force": True} if is_older else {}))

    def look(self) -> None:
        """Whether what is being saved is on disk."""
        if not self._manager.is_saving_in_progress():
            self.pace.saved()

    def finish(self) -> None:
        """Wait until what has been begun is on disk."""
        begun = time.perf_counter()
        with clear_errors(f"{self.where}: saving to {self.directory}", self._newest_good):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self.pace.saved()
        self.pace.idle += time.perf_counter() - begun

    def end(self, state: SavedState, interrupts: Interrupts, what: str) -> None:
        """Save the last state, after so much; what an interrupt raises, in any process, it raises then."""
        self.save(state)
        self.finish()
        (number,) = agreed(interrupts.received or 0)
        if number:
            interrupts.received = None
            message = (
                f"{self.where}: interrupted after {what}, which are saved in {self.directory.parent}. The same call "
                "goes on from there."
            )
            if number == signal.SIGINT:
                raise KeyboardInterrupt(message)
            ended = SystemExit(message)
            ended.code = 128 + signal.SIGTERM  # the process exits as one that the signal kills
            raise ended

    def newest(
        self, like: Sequence[jax.Array], rows_of: Callable[[SavedState], int] = lambda state: state.steps
    ) -> SavedState | None:
        """The newest save that is whole, with the types and shardings of these arrays; None: there is none.

        `rows_of` says how many rows of outputs belong to a state. Without them, its save is not whole.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if self.outputs is not None and any(steps):
            self.outputs.refuse_gone()
        problems = []
        for step in steps:
            try:
                state = self._restore(step, like)
                if self.outputs is not None:
                    self.outputs.check(rows_of(state))
            except Exception as error:  # noqa: BLE001, a damaged file makes errors of all kinds
                first = next(iter(str(error).splitlines()), "")  # a bare `assert` in a library has no text
                problems.append(f"  step {step}: {type(error).__name__}: {first[:_MOST_TEXT]}")
                continue
            for damaged in steps[: len(problems)]:
                self._manager.delete(damaged)
            if problems:
                warnings.warn(
                    f"{self.where}: saves in {self.directory}, or outputs that belong to them, are damaged. These "
                    "saves have been removed:\n" + "\n".join(problems) + f"\nThe run goes on from step {step} instead.",
                    DamagedSaveWarning,
                    stacklevel=2,
                )
            return state
        if problems:
            raise RuntimeError(
                f"{self.where}: no save in {self.directory} is whole:\n" + "\n".join(problems) + "\nRestore what "
                "is damaged from a backup, or delete the directory of the run to start anew."
            )
        return None

    def _restore(self, step: int, like: Sequence[jax.Array]) -> SavedState:
        return checked(*self.read(step, like))

    def read(self, step: int, like: Sequence[jax.Array]) -> tuple[SavedState, list[str]]:
        """The state of one save, with the types and shardings of these arrays, and its checksums."""
        args = ocp().args
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in _written(like).items()
        }
        restored = ocp().checkpoint_utils.construct_restore_args(shapes)
        wanted = {"state": args.PyTreeRestore(shapes, restore_args=restored)} if shapes else {}
        found = self._manager.restore(step, args=args.Composite(facts=args.JsonRestore(), **wanted))
        facts = found.facts
        if facts != _sealed(step, facts["goes_on"], facts["checksums"]):
            raise ValueError("what is on disk is not what was saved (the checksum of its numbers differs)")
        arrays = [found.state[f"{i:05d}"] if x.size else jnp.copy(x) for i, x in enumerate(like)]
        return SavedState(step, facts["goes_on"], arrays), facts["checksums"]

    def steps(self) -> list[int]:
        """Those of which there is a save."""
        return sorted(self._manager.all_steps())

    def remove(self, step: int) -> None:
        """Delete one save."""
        self._manager.delete(step)

    def close(self) -> None:
        """Wait for what has been begun, and let Orbax's threads end."""
        self._manager.close()

    def _newest_good(self) -> str:
        steps = ocp().utils.checkpoint_steps(self.directory)
        return f"The last good save is that of step {max(steps)}" if steps else "There is no save yet"


def _written(arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The arrays that Orbax writes, by name: it takes none without elements."""
    return {f"{i:05d}": x for i, x in enumerate(arrays) if x.size}


def checked(state: SavedState, sums: list[str]) -> SavedState:
    """Return the state; ValueError if it has not these checksums."""
    if checksums(state.arrays) != sums:
        raise ValueError("what is on disk is not what was saved (its checksum differs)")
    return state


_SEED = 0x9E3779B1  # the golden ratio: a number without a pattern


def checksums(arrays: Sequence[Any]) -> list[str]:
    """Sixteen hexadecimal digits for each array, which do not depend on how it is spread over devices.

    Sums of integers modulo 2**32 are the same in whatever order they are taken, so each device adds up what it holds.
    """
    return [np.asarray(pair).astype(">u4").tobytes().hex() for pair in _sums(list(arrays))]


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """Two sums of what each word and where it stands are mixed to; sums of weighted words would miss some swaps."""
    sums = []
    for words in map(_words, arrays):
        # Where each element stands, counted from 1.
        positions, stride = jnp.ones(words.shape, jnp.uint32), 1
        for axis in reversed(range(words.ndim)):
            positions += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= words.shape[axis]
        mixed = _mix(words ^ _mix(positions))
        again = _mix(mixed ^ jnp.uint32(_SEED))
        sums.append(jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in (mixed, again)]))
    return sums


def _mix(x: jax.Array) -> jax.Array:
    """Each bit of a word depends on all of the given one, and no two words give the same (MurmurHash3's last step)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers, small elements one to a word."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    if x.dtype == jnp.bool_ or x.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return x.astype(jnp.int32).astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
