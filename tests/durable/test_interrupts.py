"""Ctrl-C and SIGTERM: the state is saved, and the same call goes on."""

import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from loopax import durable
from loopax._src.durable import pace
from loopax._src.durable.pace import watching
from loopax._src.durable.saves import Saves
from tests.durable.cases import same_bits, saves

X = jnp.arange(3.0)


@pytest.fixture(autouse=True)
def _heed_ctrl_c() -> Any:
    """Also where the tests run in the background, and a shell has told them to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _one_chunk_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take no time here: otherwise the whole run is started before the first look at signals."""
    monkeypatch.setattr(pace, "_MOST_IN_A_ROW", 1)


class SignalAt:
    """Sends a signal to this process from within a step."""

    def __init__(self, step: int | None, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def __call__(self, i: Any) -> None:
        if int(i) == self.step:
            os.kill(os.getpid(), self.number)


def run(directory: Any, at: SignalAt | None = None, **options: Any) -> Any:
    at = at or SignalAt(None)

    def body(i: Any, x: Any) -> Any:
        jax.debug.callback(at, i)
        return jnp.sin(x) * 1.5 + 0.1 * i.astype(float)

    options = {"chunk_steps": 2, **options}
    result = durable.fori_loop(0, 20, body, X, directory=directory, **options)
    jax.effects_barrier()
    return result


@pytest.fixture
def handlers() -> Any:
    """The handlers are the same afterwards."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupt_saves(number: int, kind: Any, tmp_path: Any) -> None:
    with pytest.raises(kind, match=r"interrupted after \d+ steps, which are saved in .*run. The same call") as error:
        run(tmp_path / "run", SignalAt(7, number))
    (last,) = saves(tmp_path / "run")
    assert 7 < last <= 12  # the signal may be seen a chunk later
    assert f"after {last} steps" in str(error.value)
    assert number == signal.SIGINT or error.value.code == 143  # pyright: ignore[reportAttributeAccessIssue]
    same_bits(run(tmp_path / "run"), run(tmp_path / "whole"))


@pytest.mark.usefixtures("handlers")
def test_an_interrupt_after_the_run_is_not_lost() -> None:
    seen = []

    def signalled() -> None:
        with watching():
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("remembered")

    with pytest.raises(KeyboardInterrupt):
        signalled()
    assert seen == ["remembered"]


@pytest.mark.usefixtures("handlers")
def test_a_second_interrupt_does_not_wait(tmp_path: Any, monkeypatch: Any) -> None:
    def interrupted_again(self: Any, state: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Saves, "start", interrupted_again)
        with pytest.raises(KeyboardInterrupt) as error:
            run(tmp_path / "run", SignalAt(7))
    assert "saved in" not in str(error.value)
    assert saves(tmp_path / "run") == []


def test_what_is_ignored_stays_ignored(tmp_path: Any) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(tmp_path, SignalAt(7))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
