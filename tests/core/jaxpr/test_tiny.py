"""Tiny steps: what their results take, and what calls of their operations are expected to cost."""

from math import inf

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopax as lx
from loopax._src.core import Checkpoints
from loopax._src.core.jaxpr import cost as tiny
from loopax._src.settings import costs

Y = jnp.ones(3, jnp.float32)
W = jnp.eye(3, dtype=jnp.float32)


def of(function, x=Y):
    return jax.make_jaxpr(function)(x)


BYTES = {
    "two operations": (lambda y: 2 * y + 1, 24),
    "moves": (lambda y: jnp.concatenate([y[1:], y[:1]]), 0),
    "in jit": (jax.jit(jnp.sin), 12),
    "product": (lambda y: W @ y, inf),
    "loop": (lambda y: lax.fori_loop(0, 3, lambda _, y: 2 * y, y), inf),
    "loop of loopax": (lambda y: lx.fori_loop(0, 3, lambda _, y: 2 * y, y), inf),
    "branch": (lambda y: lax.cond(y[0] > 0, jnp.sin, jnp.cos, y), inf),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_results(name):
    function, expected = BYTES[name]
    assert tiny.result_bytes(of(function).jaxpr) == expected


def test_calls_cost_nothing_in_one_function():
    step = of(lambda y: 2 * y + 1)
    assert tiny.calls(step, 24) == 0.0
    assert tiny.calls(step, 23) == pytest.approx(costs().call * 24 / tiny.BYTES_OF_CALL)
    assert tiny.calls(step, 24, stored=1) > 0.0


@pytest.mark.parametrize(("size", "expected"), [(3, True), (300, False)])
def test_steps_that_are_tiny(size, expected):
    assert tiny.is_tiny(of(lambda y: 2 * y + 1, jnp.ones(size, jnp.float32))) == expected


def test_other_devices_have_no_such_functions(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not tiny.is_tiny(of(lambda y: 2 * y + 1))


class Asking(lx.Kind):
    """A kind that remembers what it was told of a loop."""

    def __init__(self):
        """Nothing so far."""
        self.told = []

    def plan(self, loop):
        """Carries at some steps."""
        self.told.append(loop)
        return Checkpoints()


def facts_of(step):
    asking = Asking()
    loop = lambda y: lx.fori_loop(0, 1000, lambda _, y: step(y), y, kind=asking).sum()
    jax.make_jaxpr(jax.grad(loop))(Y)
    return asking.told[-1].step


def by_indices(y):
    """A step of many components, whose derivative is too large for one function."""
    for _ in range(8):
        y = y + 0.01 * jnp.stack([y[1] * y[2], y[2] * y[0], y[0] * y[1] - y[2]])
    return y


def test_facts_of_tiny_loops():
    small, large, other = (facts_of(step) for step in (lambda y: y - 0.1 * y * y, by_indices, lambda y: W @ (y * y)))
    assert small.carry_calls == 0.0 < large.carry_calls < large.residual_calls
    assert small.residual_calls < costs().call  # a little for each array of residuals
    assert small.overhead == large.overhead == tiny.STEP < other.overhead == costs().step
    assert other.carry_calls == 0.0


def test_auto_checkpoints_where_only_blocks_are_one_function():
    def kind_of(step):
        found = lx.explain(lambda y: lx.fori_loop(0, 1000, lambda _, y: step(y), y).sum(), Y)
        stored = found.loops[0].stored
        assert stored is not None
        return stored.kind

    assert kind_of(by_indices) == "Checkpointed()"
    assert kind_of(lambda y: y - 0.1 * y * y) in ("Bounded()", "Residuals()")
