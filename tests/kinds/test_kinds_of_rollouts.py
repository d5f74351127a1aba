"""`rollout` with the kinds that bring an inverse, or another derivative, and with rare outputs."""

from typing import Any

import jax
import pytest
from jax import Array

import loopax as lx
from tests.support.problem import BOUND, LOSSY, XS, H, W, mixed
from tests.support.reference import assert_close


def some_outputs(kind: Any, **options: Any) -> Any:
    def loss(w: Array, h: Array, n: Any) -> Array:
        f = lambda c, x: (new := LOSSY.take(w, c, x), LOSSY.row(x, new))
        back, record = lambda c, x, row: LOSSY.back(w, c, x, row), lambda before, after, x: LOSSY.lost(before)
        done = lx.rollout(f, LOSSY.start(h), n, inputs=XS, save_every=3, kind=kind(back, record), **options)
        return mixed((done.state[:2], done.outputs))

    return jax.jit(jax.grad(loss, (0, 1)))


@pytest.mark.parametrize("stop", [None, lambda c, y: abs(c[0]).max() > 2.0], ids=["", "stop"])
@pytest.mark.parametrize("kind", [{"rtol": 1e-9}, pytest.param({"checkpoints": 2}, marks=pytest.mark.slow)], ids=str)
def test_an_inverse_of_states(stop: Any, kind: dict[str, Any]) -> None:
    """The state alone is walked back; outputs that were saved, and their number, are loopax's own."""
    found = some_outputs(lambda back, record: lx.Reversible(back, record=record, **kind), stop=stop)
    expected = some_outputs(lambda *_: lx.Bounded(), stop=stop)
    for n in (0, 1, 7, BOUND):
        assert_close(found(W, H, n), expected(W, H, n))


def test_a_history_forgets() -> None:
    history = lx.History(4, like=H)
    pattern = r"rollout\(history=\.\.\.\), which forgets rows, does not take a kind that brings an inverse"
    with pytest.raises(NotImplementedError, match=pattern):
        lx.rollout(lambda s, history: (s, s), H, 3, history=history, kind=lx.Reversible(lambda s: s))
