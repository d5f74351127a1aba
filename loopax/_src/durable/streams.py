"""A stream of items that is saved to disk while it runs, and resumed."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jaxtyping import PyTree

from loopax._src.durable.chunk import RowPlan
from loopax._src.durable.files import locked
from loopax._src.durable.options import check, refuse_transformations
from loopax._src.durable.outputs import Outputs, Rows
from loopax._src.durable.pace import Interrupts, SavePace, watching
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.durable.step_hash import Written
from loopax._src.durable.stored_program import compare_with_stored, refuse_unsavable, stored_program_of, types_of
from loopax._src.jax_internals import api_boundary
from loopax._src.progress import ProgressLike
from loopax._src.pytrees.leaves import Dynamic, Spec
from loopax._src.queues.working_lanes import BusyLanes, WorkingLanes

_NAME = "durable.lanes_stream"
_FIRST_ROOM = 1024  # rows; the room doubles where it is used up
_PATIENCE = 0.1  # seconds to wait for a slow item, until signals are looked at
_ITEMS, _NO_ITEM = 1, -1  # the array of indices, and what it holds where no row is written


def _with_rows_of(results: Spec) -> Spec:
    """The pytree `{items, failed, results}` of arrays of rows."""
    leaves = [
        replace(leaf, aval=leaf.aval.update(shape=(1, *leaf.aval.shape))) if isinstance(leaf, Dynamic) else leaf
        for leaf in results.leaves
    ]
    names = {"items": 0, "failed": 0, "results": results.treedef.unflatten(range(len(leaves)))}
    treedef = jax.tree.structure(names)
    own = [Dynamic(core.ShapedArray((1,), np.dtype(dtype))) for dtype in (bool, np.int64)]
    return Spec(treedef, (*own, *leaves))  # a dict is flattened in the order of its keys: failed, items, results


class StreamOutputs(NamedTuple):
    """The results of a durable stream on disk, in the order in which items were finished.

    Attributes
    ----------
    items : int64[rows]
        The index of the item of each row. `np.argsort(outputs.items)` gives the row of each item.
    failed : bool[rows]
        Whether the loop of the item failed. True only occurs if a call had `throw=False`.
    results
        The results: a pytree like that of `f`, with one row for each item.

    """

    items: Rows
    failed: Rows
    results: PyTree[Rows]


@api_boundary
def lanes_stream(
    f: Callable[[Any], Any],
    items: Iterable[PyTree[Any]],
    *,
    directory: str | os.PathLike[str],
    num_lanes: int = 64,
    checkpoint_every: float | timedelta = 60.0,
    keep: int = 2,
    resume: str = "auto",
    chunk_steps: int | None = None,
    prefetch: int = 2,
    throw: bool = True,
    progress: ProgressLike = None,
) -> StreamOutputs:
    """`loopax.lanes_stream` for runs of hours: writes each result to disk once, and the same call resumes the run.

    The meaning::

        for index, item in enumerate(items):
            results[index] = f(item)

    The call returns when all items are finished. If an earlier call was stopped or killed, the same call continues from
    the newest save. Each item still has exactly one row.

    Parameters
    ----------
    f, chunk_steps, prefetch
        As in `loopax.lanes_stream`.
    num_lanes
        The number of items that are computed at a time, as in `loopax.lanes_stream`. A resumed run must have the same
        number.
    items
        The items, as in `loopax.lanes_stream`; at least one. Give a resumed run the same items from the first on, and
        possibly more. The run skips the items that were begun before the newest save.
    directory, keep, resume
        As in `loopax.durable.while_loop`.
    checkpoint_every
        The most work that may be lost if the process is killed, in seconds (a float, or a `timedelta`). The default is
        60.0.
    throw
        Whether the error of an item's loop is raised. True: the newest save is unchanged, so the same call reaches this
        item again. False: the row of the item is marked as failed.
    progress
        Whether to show progress, as in `loopax.lanes_stream`. The counts start with this call.

    Returns
    -------
    StreamOutputs
        Rows on disk, `(items, failed, results)`. Rows are read when they are indexed.

    Raises
    ------
    TypeError
        As in `loopax.lanes_stream`, or `checkpoint_every` is an int.
    ValueError
        - As in `loopax.lanes_stream`.
        - There is no item, or there are fewer items than the stored run has begun.
        - The directory holds a run of another program or of another version; the message says what differs.
    NotImplementedError
        There is more than one process (`jax.distributed`).
    equinox.EquinoxRuntimeError
        As in `loopax.lanes_stream`.
    loopax.durable.SaveError, RuntimeError, KeyboardInterrupt, SystemExit
        As in `loopax.durable.while_loop`.

    Notes
    -----
    Cost: that of `loopax.lanes_stream`, and for each save a copy of all lanes.

    An error that `items` raises is raised after the results of all earlier items are saved. Lanes that have begun an
    item keep the bound on their steps.

    `durable.outputs` reads the rows during the run. In a row that is not written yet, the index of the item is -1.

    """
    refuse_transformations(_NAME, (items if isinstance(items, list | tuple) else None,), None)
    lanes = WorkingLanes(_NAME, f, items, num_lanes, chunk_steps, prefetch, progress)
    if not isinstance(checkpoint_every, float | np.floating | timedelta):
        raise TypeError(
            f"{_NAME}(checkpoint_every=...): got {checkpoint_every!r}, expected seconds: a float or a "
            "datetime.timedelta. Lanes have no step in common that could be counted."
        )
    checked = check(_NAME, directory, checkpoint_every, keep, resume)
    if jax.process_count() > 1:
        raise NotImplementedError(f"{_NAME} runs in one process, and there are {jax.process_count()}.")
    with locked(_NAME, checked[0]):
        return _StreamRun(lanes, iter(items), throw, checked).to_the_end()


class _StreamRun:
    def __init__(
        self, lanes: WorkingLanes, items: Iterator[Any], throw: bool, checked: tuple[Path, SavePace, int, bool]
    ) -> None:
        """The first item says what all are like."""
        self._lanes, self._throw, (root, pace, keep, anyway) = lanes, throw, checked
        first = list(islice(items, 1))
        if not first:
            raise ValueError(f"{_NAME}(items=...): there is no item, and the first one says what all are like.")
        self._items = chain(first, items)
        lanes.items.ready(0, first[0])
        made = lanes.program.made
        item, results = types_of("item", lanes.items.spec), types_of("results", made.results)
        inside = _packed(0, 0, lanes)[2 + len(item) :]
        states = [(f"state {i} of the loop", jax.typeof(x)) for i, x in enumerate(inside)]
        refuse_unsavable(_NAME, [*item, *results, *states])
        # Whether the run that is stored, if there is one, is the one that is asked for.
        given = [*made.shared, *lanes.function_arrays]
        written = Written(made.program, [*[None] * len(given), *(path for path, _ in item)], {}, given)
        types = {path: aval.str_short() for path, aval in [*item, *results]}
        described = stored_program_of(_NAME, {"lanes": str(lanes.num_lanes)}, types, {}, written)
        compare_with_stored(_NAME, root, described, anyway)
        plan = RowPlan(_FIRST_ROOM, 0, direction=1)
        self._outputs = Outputs(_NAME, root, _with_rows_of(made.results), plan, {_ITEMS: _NO_ITEM})
        self._saves = Saves(_NAME, root, keep, pace, self._outputs)
        self._rows = 0  # that are written, or are being written

    def to_the_end(self) -> StreamOutputs:
        """Go on with what is stored, or begin."""
        try:
            with watching() as interrupts:
                self._go_on()
                self._advance(interrupts)
        finally:
            self._lanes.close()
            self._saves.close()
            if self._outputs.writes:
                self._outputs.resize(self._rows)
        return StreamOutputs(**self._outputs.rows())

    def _go_on(self) -> None:
        """The lanes of the newest save, and the items that come after."""
        like = list(map(jnp.asarray, _packed(0, 0, self._lanes)))
        state = self._saves.newest(like, lambda state: _counts(state.arrays)[0])
        self._rows, begun = (0, 0) if state is None else _counts(state.arrays)
        self._before = 0 if state is None else state.steps
        self._outputs.open(self._rows, max(2 * self._rows, _FIRST_ROOM))
        if state is not None:
            _, indices, *rest = map(np.asarray, state.arrays)
            num_inputs = len(self._lanes.items.spec.avals)
            self._lanes.go_on(BusyLanes(indices.view(np.int64), rest[:num_inputs], rest[num_inputs:]))
        self._lanes.num_begun = self._lanes.items.count = begun
        self._lanes.finished_before = self._rows
        self._lanes.items.start(_after(self._items, begun))

    def _advance(self, interrupts: Interrupts) -> None:
        """Run to the end, saving; an interrupt saves too, and is raised then."""
        saves, pace, goes_on = self._saves, self._saves.pace, True
        pace.begin(self._number)
        while goes_on and interrupts.received is None:
            begun, before = time.perf_counter(), self._number
            if pace.must_wait(before, 1):
                saves.finish()
            is_time = pace.should_save(before)
            goes_on = self._write_finished(start_next=not is_time)
            pace.took(self._number - before, time.perf_counter() - begun)
            if is_time:
                saves.save(self._state())
            else:
                saves.look()
        if self._lanes.running is not None:
            self._write_finished(start_next=False)
        saves.end(self._state(), interrupts, f"{self._rows} items")
        self._lanes.items.raise_error()

    @property
    def _number(self) -> int:
        """Of a save: greater whenever something was done."""
        report = self._lanes.report()
        return self._before + report.iterations + report.items

    def _write_finished(self, start_next: bool) -> bool:
        """Write what was finished; false where nothing is left to do."""
        finished = self._lanes.look(start_next, _PATIENCE)
        if finished is None:
            return False
        failed = [error is not None for error in finished.errors]
        if self._throw and any(failed):
            raise eqx.EquinoxRuntimeError(finished.errors[failed.index(True)])
        if finished.indices:
            own = [np.asarray(failed, bool), np.asarray(finished.indices, np.int64)]
            self._outputs.write(self._rows, [*own, *finished.arrays])
            self._rows += len(failed)
        return True

    def _state(self) -> SavedState:
        """Where the lanes are. No chunk may run."""
        arrays = _packed(self._rows, self._lanes.num_begun, self._lanes)
        return SavedState(self._number, True, list(map(jnp.asarray, arrays)))


def _after(items: Iterator[Any], count: int) -> Iterator[Any]:
    skipped = sum(1 for _ in islice(items, count))
    if skipped < count:
        raise ValueError(
            f"{_NAME}(items=...): the stored run has begun {count} items, and only {skipped} are given. Give the same "
            "items from the first one on, or another directory."
        )
    yield from items


def _packed(rows: int, begun: int, lanes: WorkingLanes) -> list[np.ndarray]:
    """Arrays of a save. JAX has integers of 32 bits by default, so those of 64 are halved."""
    at = lanes.busy()
    assert at is not None  # the first item has made the state
    counts = np.array([rows, begun], np.int64)
    return [counts.view(np.uint32), at.indices.view(np.uint32), *at.inputs, *at.inside]


def _counts(arrays: Sequence[jax.Array]) -> tuple[int, int]:
    """Rows that are written, and items that were begun."""
    rows, begun = np.asarray(arrays[0]).view(np.int64).tolist()
    return rows, begun
