"""The gradient of a long run: chunks forwards, then each one differentiated from the last to the first.

The forward pass keeps the state before some chunks (`durable/states.py`). On the way back each chunk is differentiated
from its state, which is read, or computed again from one before it. The schedule is the binomial one, a step of which
is a chunk (`schedule/binomial.py`).

What a chunk gives depends on its state alone, and a state is the same whether it is read or computed again. So a run
that goes on asks the schedule anew, from the states that are on disk, and ends with the same bits.
"""

import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import count, islice, pairwise, repeat
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable.gradient_chunk import Programs, inexact
from loopax._src.durable.gradient_plan import PULLBACK, UNBOUNDED, evaluated, fewest
from loopax._src.durable.gradient_problem import NAME, Given
from loopax._src.durable.options import agreed, all_agree
from loopax._src.durable.pace import Interrupts
from loopax._src.durable.row_source import RowSource
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.durable.states import Plan, States
from loopax._src.progress import Shown
from loopax._src.schedule.binomial import Action, evaluations_from, replay
from loopax._src.schedule.online import online


class Gradient(NamedTuple):
    """What is known on the way back: the value, and cotangents of the state before a chunk, and of the parameters."""

    value: Array
    of_state: list[Array]
    of_params: list[Array]


@dataclass
class Work:
    """What this process has computed: chunks."""

    advanced: int = 0
    reversed: int = 0


@dataclass
class GradientRun:
    """Everything that a run needs."""

    programs: Programs
    is_open: bool  # a condition says how many steps there are
    plan: Plan
    limit: int  # the most steps, where only a condition tells how many there are
    params: list[Array]
    rows: RowSource
    states: States
    ahead: Saves  # where the forward pass is
    back: Saves  # where the way back is, after the rows of cotangents of xs that belong to it
    shown: Callable[[str, int | None], Shown]  # of a pass, and so many evaluations
    interrupts: Interrupts
    work: Work = field(default_factory=Work)
    # On the way back: the chunks that are not differentiated yet, the gradient before the others, and evaluations.
    _end: int = 0
    _gradient: Any = None
    _evaluations: int = 0

    def to_the_end(self) -> Gradient:
        """Go on from where the run is."""
        first, outputs = self.states.first, self.back.outputs
        zeros = ([jnp.zeros_like(x) for x in inexact(xs)] for xs in (first, self.params))
        like, treedef = jax.tree.flatten(Gradient(self.programs.no_value, *zeros))
        found = self.back.newest(like)
        if outputs is not None:
            outputs.open(0 if found is None else found.steps)
        if found is None:
            return self._backward(*self._begin_back(self._forward()))
        if self.is_open:
            last = self._reached()
            if last.goes_on:  # the save of the last state is damaged
                last = self._forward()
            self.plan = self.plan._replace(steps=last.steps)
        end = self.plan.chunks_before(self.plan.steps - found.steps)
        self.states.begin(end)
        return self._backward(end, treedef.unflatten(found.arrays))

    def _reached(self) -> SavedState:
        """Where the forward pass is."""
        return self.ahead.newest(self.states.first) or SavedState(0, True, self.states.first)

    def _forward(self) -> SavedState:
        """The state before the last chunk; behind it where only a condition tells which one is the last."""
        plan, saves = self.plan, self.ahead
        at = self._reached()
        chunk, is_known = plan.chunks_before(at.steps), not self.is_open
        self.states.begin(chunk + 1, plan.starts() if is_known else None)
        saves.pace.begin(at.steps)
        work = round((evaluated(plan) + PULLBACK * plan.chunks) * plan.chunk) if is_known else None
        shown = self.shown("forward", work)
        shown.begin(at.steps)
        begun, stored = at.steps, islice(self._stored(), chunk, None)
        stopped = False
        last = plan.chunks - 1 if is_known else max(plan.chunks_before(self.limit), 1)  # one looks at the condition
        while at.goes_on and chunk < last and not stopped:
            kept = next(stored)
            for other in self.states.kept(chunk) if isinstance(kept, tuple) else ():
                if other not in kept:
                    self.states.drop(other)
            if chunk in kept:
                self.states.keep(chunk, at.arrays, self._to_disk(chunk, plan.chunks if is_known else UNBOUNDED, True))
            self._wait_if_needed(saves, at)
            at, chunk = self._advance(chunk, at, saves), chunk + 1
            shown.update(at.steps - begun)
            self._save_if_due(saves, at)
            stopped = self._is_interrupted()
        self.states.finish()
        saves.end(at, self.interrupts, f"{at.steps} steps of the forward pass")
        shown.end(finished=True)
        if at.goes_on and not is_known:
            raise eqx.EquinoxRuntimeError(
                f"{NAME}(length={self.limit}): cond_fun would go on after so many steps. Give a larger length, or None."
            )
        return at

    def _stored(self) -> Iterator[Container[int]]:
        """For each chunk of the forward pass, before which chunks states are kept then."""
        if self.plan.steps >= 0:
            return repeat(self.plan.starts())
        return (range(i + 1) for i in count()) if self.plan.slots >= UNBOUNDED else online(self.plan.slots)

    def _to_disk(self, chunk: int, end: int, is_ahead: bool) -> bool:
        """Where a state goes from which those before `end` may follow.

        The way ahead takes the disk first, which outlives the process. The way back takes memory, if it has room for
        those that may follow.
        """
        disk, memory = self.states.free()
        if self.plan.is_spread:
            return disk > 0 and is_ahead and chunk in self.plan.starts_on_disk()
        coming = min(end - chunk, memory + disk)
        return disk > 0 and (coming > memory or (is_ahead and coming <= disk))

    def _begin_back(self, reached: SavedState) -> tuple[int, Gradient]:
        """The value, and the gradient before the last chunk, or behind it, as `_forward` has given the state."""
        if self.is_open:
            self.plan = self.plan._replace(steps=reached.steps)
        elif self.plan.chunks:
            last = self.plan.chunks - 1
            self._evaluations = self._work_of(last)
            return last, self._reverse(last, reached.arrays, None)
        return self.plan.chunks, Gradient(*self.programs.value(self._given(0, reached.arrays)))

    def _backward(self, end: int, gradient: Gradient) -> Gradient:
        """Differentiate the chunks before `end`, from the last to the first."""
        self._end, self._gradient = end, gradient
        self.back.pace.begin(self._reached_back().steps)
        shown = self.shown("backward", self._evaluations + self._rest(end))
        shown.begin()
        shown.update(self._evaluations)
        stopped = False
        while self._end and not stopped:
            arrays = self.states.first
            for action in self._actions(self._end):
                arrays = self._do(action, arrays)
                shown.update(self._evaluations)
                if action.name == "reverse":
                    self._save_if_due(self.back, self._reached_back())
                stopped = action.name in ("advance", "reverse") and self._is_interrupted()
                if stopped or arrays is None:  # a damaged state is dropped, and the schedule asked anew
                    break
        reached = self._reached_back()
        self.states.finish()
        self.back.end(reached, self.interrupts, f"the gradient of the last {reached.steps} of {self.plan.steps} steps")
        shown.end(finished=True)
        return self._gradient

    def _actions(self, end: int) -> Iterator[Action]:
        """Those that reverse the chunks before `end`; of states that are spread, those behind the last one on disk."""
        start, slots = 0, self.plan.slots
        if self.plan.is_spread:
            start, slots = self.states.on_disk(end)[-1], 1 + self.plan.memory
        kept = [chunk - start for chunk in self.states.kept(end) if chunk >= start]
        for action in replay(kept, end - start, slots):
            yield action._replace(step=start + action.step)

    def _do(self, action: Action, arrays: list[Array]) -> list[Array] | None:
        """One action of the way back, which gives another current state; None: it cannot be read."""
        chunk, states = action.step, self.states
        low, high = self.plan.rows(chunk)
        if action.name == "restore":
            return states.read(chunk)
        if action.name == "keep":
            states.keep(chunk, arrays, self._to_disk(chunk, self._end, False))
        elif action.name == "drop":
            states.drop(chunk)
        elif action.name == "advance":
            self._evaluations += high - low
            return self._advance(chunk, SavedState(low, True, arrays), None).arrays
        else:
            self._wait_if_needed(self.back, self._reached_back())
            states.read_ahead(states.kept(chunk)[-1] if chunk else 0)
            self._gradient, self._end = self._reverse(chunk, arrays, self._gradient), chunk
            self._evaluations += self._work_of(chunk)
        return arrays

    def _work_of(self, chunk: int) -> int:
        """The evaluations of a step that the pullback of a chunk counts for, its own included."""
        low, high = self.plan.rows(chunk)
        return round((1 + PULLBACK) * (high - low))

    def _reached_back(self) -> SavedState:
        """Where the way back is."""
        return SavedState(self.plan.steps_behind(self._end), self._end > 0, jax.tree.leaves(self._gradient))

    def _rest(self, end: int) -> int:
        """The evaluations of a step on the way back from a chunk; a pullback counts for some."""
        if self.plan.is_spread:
            edges = [*self.states.on_disk(end), end]
            again = sum(fewest(high - low, 1 + self.plan.memory) for low, high in pairwise(edges))
        else:
            again = evaluations_from(self.states.kept(end), end, self.plan.slots) - end if end else 0
        return round((again + PULLBACK * end) * self.plan.chunk)

    def _advance(self, chunk: int, at: SavedState, saves: Saves | None) -> SavedState:
        """Behind a chunk; the saves learn how long that takes."""
        begun = time.perf_counter()
        arrays, taken, goes_on = jax.block_until_ready(self.programs.forward(self._given(chunk, at.arrays)))
        self.work.advanced += 1
        if saves is not None:
            saves.pace.took(int(taken), time.perf_counter() - begun)
        return SavedState(at.steps + int(taken), bool(goes_on), arrays)

    def _reverse(self, chunk: int, arrays: list[Array], gradient: Gradient | None) -> Gradient:
        """The gradient before a chunk; without one behind it, it is the last. Rows of it begin to be written."""
        begun, given, outputs = time.perf_counter(), self._given(chunk, arrays), self.back.outputs
        last, recorded = self.programs.record(given)
        if gradient is None:
            gradient = Gradient(*self.programs.value(given._replace(state=last)))
        of_state, of_params, of_rows = jax.block_until_ready(
            self.programs.pull(given, recorded, gradient.of_state, gradient.of_params)
        )
        low, high = self.plan.rows(chunk)
        if outputs is not None and outputs.writes:
            # In the order of the way back.
            outputs.write(self.plan.steps_behind(chunk + 1), [np.asarray(x)[: high - low][::-1] for x in of_rows])
        self.work.reversed += 1
        self.back.pace.took(high - low, time.perf_counter() - begun)
        return Gradient(gradient.value, of_state, of_params)

    def _given(self, chunk: int, arrays: list[Array]) -> Given:
        """What a chunk is given."""
        low, high = self.plan.rows(chunk) if self.plan.steps >= 0 else (chunk * self.plan.chunk, self.limit)
        rows, most = self.rows.read(low, self.plan.chunk), min(high - low, self.plan.chunk)
        return Given(self.params, arrays, rows, np.int32(min(low, MOST_STEPS)), np.int32(most))

    def _wait_if_needed(self, saves: Saves, at: SavedState) -> None:
        """Wait for saves where a kill in the next chunk could lose more than it may."""
        if all_agree(saves.pace.must_wait(at.steps, self.plan.chunk)):
            saves.finish()
            if all_agree(saves.pace.must_wait(at.steps, self.plan.chunk)):
                self.states.finish()
                saves.save(at)
                saves.finish()

    def _is_interrupted(self) -> bool:
        """Whether a signal has come, to any process."""
        return bool(agreed(self.interrupts.received or 0)[0])

    def _save_if_due(self, saves: Saves, at: SavedState) -> None:
        """Save if that is due."""
        saves.look()
        if all_agree(saves.pace.should_save(at.steps)):
            self.states.finish()
            saves.save(at)
            saves.finish()
