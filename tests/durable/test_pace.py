"""When states are saved: a kill loses no more work than `checkpoint_every`, and Ctrl-C and SIGTERM lose none."""

import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopax import durable
from loopax._src.durable import pace as paces
from loopax._src.durable import run as runs
from loopax._src.durable import saves as keeping
from loopax._src.durable.pace import Interrupts, SavePace, checkpoint_every, watching
from loopax._src.durable.saves import SavedState, Saves
from loopax._src.progress import Shown
from tests.durable.cases import same_bits, saves


class Simulation:
    """A run of steps and saves that take made-up times, under the real control."""

    def __init__(
        self, every: tuple[float, bool], step_seconds: list[float], save_seconds: list[float], total: int
    ) -> None:
        self.now, self.work = 0.0, 0.0
        self.every, self.total = every, total
        self.step_seconds, self.save_seconds = step_seconds, save_seconds
        self.saves: list[tuple[float, int, float]] = []  # when complete, the steps, the work until then
        self.chunks: list[int] = []
        self.lost = 0.0

    # ---- a clock

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("results of chunks are there at once")

    # ---- a chunk

    def run(self, arrays: Any, start: Any, most: int) -> Any:
        (begin,) = start
        for step in range(begin, begin + most):
            seconds = self.step_seconds[step % len(self.step_seconds)]
            self.now += seconds
            self.work += seconds
            self._kill_now(step + 1)
        self.chunks.append(most)
        return arrays, [], [jnp.int32(most), np.bool_(True)]

    def _kill_now(self, steps: int) -> None:
        """What would be lost."""
        complete = [(at, state, work) for at, state, work in self.saves if at <= self.now]
        _, state, work = complete[-1] if complete else (0.0, 0, 0.0)
        self.lost = max(self.lost, steps - state if self.every[1] else self.work - work)

    # ---- a manager of saves, one at a time, as Orbax has it

    def latest_step(self) -> None:
        return None

    def save(self, step: int, args: Any) -> None:
        assert not self.is_saving_in_progress()
        seconds = self.save_seconds[len(self.saves) % len(self.save_seconds)]
        self.saves.append((self.now + seconds, step, self.work))

    def is_saving_in_progress(self) -> bool:
        return bool(self.saves) and self.saves[-1][0] > self.now

    def wait_until_finished(self) -> None:
        if self.saves:
            self.now = max(self.now, self.saves[-1][0])

    def check_for_errors(self) -> None:
        pass

    def go(self, chunk_steps: int | None = None, unroll: int = 1) -> None:
        chunk: Any = SimpleNamespace(run=self.run, rows=2**31 - 1)
        options = SimpleNamespace(finite=None)
        job: Any = SimpleNamespace(
            start=lambda steps: [steps], total=self.total, rows=None, stops=False, options=options
        )
        nothing = lambda *_, **__: None
        orbax = SimpleNamespace(
            CheckpointManagerOptions=nothing,
            CheckpointManager=lambda *_, **__: self,
            PyTreeCheckpointHandler=nothing,
            JsonCheckpointHandler=nothing,
            args=SimpleNamespace(Composite=nothing, JsonSave=nothing),
        )
        with pytest.MonkeyPatch.context() as patch:
            for module in (paces, runs, keeping):
                patch.setattr(module, "time", self)
            patch.setattr(keeping, "ocp", lambda: orbax)
            store = Saves("a test", Path(), 2, SavePace(*self.every, chunk_steps, unroll))
            runs.DurableRun(job, chunk, store).advance(SavedState(0, True, []), Interrupts(), Shown(None, None))
        assert sum(self.chunks) == self.total


SECONDS = st.floats(1e-6, 20.0)


@settings(max_examples=80)
@given(
    st.integers(1, 60),
    st.lists(SECONDS, min_size=1, max_size=5),
    st.lists(SECONDS, min_size=1, max_size=3),
    st.none() | st.integers(1, 100),
)
def test_steps(every: int, step_seconds: Any, save_seconds: Any, chunk_steps: Any) -> None:
    """However long steps and saves take."""
    simulation = Simulation((every, True), step_seconds, save_seconds, 150)
    simulation.go(chunk_steps)
    assert simulation.lost <= every


@settings(max_examples=80)
@given(st.floats(0.01, 100.0), st.floats(1e-3, 1.0), st.lists(SECONDS, min_size=1, max_size=3))
def test_seconds(every: float, part: float, save_seconds: Any) -> None:
    """Of steps that take the same time, each less than is allowed."""
    simulation = Simulation((every, False), [part * every], save_seconds, min(int(10 / part), 1000))
    simulation.go()
    assert simulation.lost <= every * (1 + 1e-9)


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(2, 7), st.none() | st.integers(1, 30))
def test_chunks_are_whole_iterations(every: int, unroll: int, chunk_steps: Any) -> None:
    simulation = Simulation((every, True), [0.01], [0.05], 10 * unroll + 1)
    simulation.go(chunk_steps, unroll)
    assert all(chunk % unroll == 0 for chunk in simulation.chunks[:-1])
    assert simulation.lost <= max(every, unroll)


def test_saves_are_not_more_than_needed() -> None:
    """One for each `checkpoint_every`, about: margins are for the time that a save takes."""
    for every in ((10.0, False), (1000, True)):
        simulation = Simulation(every, [0.01], [0.2], 20_000)
        simulation.go()
        assert 20 <= len(simulation.saves) <= 23
    assert checkpoint_every("f", timedelta(minutes=2)) == (120.0, False)


X = jnp.arange(3.0)


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """They are the same afterwards. Ctrl-C is heeded also where a shell has told the tests to ignore it.

    Steps take no time here: where several chunks are started at once, no step follows the first look at signals.
    """
    monkeypatch.setattr(paces, "_MOST_IN_A_ROW", 1)
    first = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, first)


def run(directory: Any, signal_at: int | None = None, number: int = signal.SIGINT) -> Any:
    """With a signal to this process from within a step."""

    def send(i: Any) -> None:
        if int(i) == signal_at:
            signal.raise_signal(number)

    def body(i: Any, x: Any) -> Any:
        jax.debug.callback(send, i)
        return jnp.sin(x) * 1.5 + 0.1 * i.astype(float)

    result = durable.fori_loop(0, 20, body, X, directory=directory, chunk_steps=2)
    jax.effects_barrier()
    return result


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupt_saves(number: int, kind: Any, tmp_path: Any) -> None:
    with pytest.raises(kind, match=r"interrupted after \d+ steps, which are saved in .*run. The same call") as error:
        run(tmp_path / "run", 7, number)
    (last,) = saves(tmp_path / "run")
    assert 7 < last <= 12  # the signal may be seen a chunk later
    assert f"after {last} steps" in str(error.value)
    assert number == signal.SIGINT or error.value.code == 143  # pyright: ignore[reportAttributeAccessIssue]
    same_bits(run(tmp_path / "run"), run(tmp_path / "whole"))


@pytest.mark.usefixtures("handlers")
def test_ctrl_break_saves_on_windows(tmp_path: Any, monkeypatch: Any) -> None:
    """The signal is there on Windows alone; another one stands in for it."""
    number = getattr(signal, "SIGBREAK", None) or signal.SIGUSR1
    monkeypatch.setattr(signal, "SIGBREAK", number, raising=False)
    with pytest.raises(SystemExit, match=r"interrupted after \d+ steps, which are saved in") as error:
        run(tmp_path / "run", 7, number)
    assert error.value.code == 143
    assert saves(tmp_path / "run")


@pytest.mark.usefixtures("handlers")
def test_an_interrupt_after_the_run_is_not_lost() -> None:
    seen = []

    def signalled() -> None:
        with watching():
            signal.raise_signal(signal.SIGINT)
            seen.append("remembered")

    with pytest.raises(KeyboardInterrupt):
        signalled()
    assert seen == ["remembered"]


@pytest.mark.usefixtures("handlers")
def test_a_second_interrupt_does_not_wait(tmp_path: Any, monkeypatch: Any) -> None:
    def interrupted_again(self: Any, state: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Saves, "start", interrupted_again)
        with pytest.raises(KeyboardInterrupt) as error:
            run(tmp_path / "run", 7)
    assert "saved in" not in str(error.value)
    assert saves(tmp_path / "run") == []


@pytest.mark.usefixtures("handlers")
def test_what_is_ignored_stays_ignored(tmp_path: Any) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(tmp_path, 7)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
