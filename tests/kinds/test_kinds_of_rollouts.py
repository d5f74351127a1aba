"""`rollout` with the kinds that bring an inverse, or another derivative, and with rare outputs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from tests.support.problem import BOUND, HALVES, LOSSY, XS, H, W, mixed
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


def test_without_inputs_and_with_a_key() -> None:
    def of(kind: lx.Kind) -> Array:
        def move(c: Any, *, key: Array) -> Any:
            p, q = c
            p = p + jnp.sin(q) * jax.random.normal(key, ())
            return (p, q + 0.1 * p), p

        def loss(h: Array) -> Array:
            return mixed(lx.rollout(move, (h, h), 9, kind=kind, key=jax.random.key(1))[:2])

        return jax.grad(loss)(H)

    def undo(c: Any, *, key: Array) -> Any:
        p, q = c
        q = q - 0.1 * p
        return p - jnp.sin(q) * jax.random.normal(key, ()), q

    assert_close(of(lx.Reversible(undo, rtol=1e-9)), of(lx.Residuals()))


@pytest.mark.parametrize("save_every", [1, 2])
def test_truncated(save_every: int) -> None:
    """The derivative of the last three of eight steps is that of a rollout from the state before them."""

    def loss(w: Array, first: int, state: Any, kind: lx.Kind) -> Array:
        f = lambda c, x: (HALVES.take(w, c, x), c[0])
        done = lx.rollout(f, state, inputs=XS[first:8], kind=kind, save_every=save_every)
        return mixed(done.state[:2])

    middle = lx.rollout(lambda c, x: (HALVES.take(W, c, x), None), HALVES.start(H), inputs=XS[:5]).state
    found, expected = (
        jax.grad(loss)(W, 0, HALVES.start(H), lx.Truncated(last=3)),
        jax.grad(loss)(W, 5, middle, lx.Bounded()),
    )
    assert_close(found, expected)


def test_a_fixed_point() -> None:
    def loss(a: Any, kind: lx.Kind) -> Array:
        stop = lambda x, _: jnp.abs(jnp.cos(a * x) - x) < 1e-13
        return lx.rollout(lambda x: (jnp.cos(a * x), None), 0.5, stop=stop, kind=kind).state

    assert_close(jax.grad(loss)(0.9, lx.Implicit(rtol=1e-12)), jax.grad(loss)(0.9, lx.Checkpointed()))


def test_a_history_forgets() -> None:
    history = lx.History(4, like=H)
    pattern = r"rollout\(history=\.\.\.\), which forgets rows, does not take a kind that brings an inverse"
    with pytest.raises(NotImplementedError, match=pattern):
        lx.rollout(lambda s, history: (s, s), H, 3, history=history, kind=lx.Reversible(lambda s: s))
