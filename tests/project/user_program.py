"""A program as a user writes it, fully typed: mypy and pyright check it strictly, and `make dist` runs it."""

from typing import NamedTuple, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import loopax as lx
from loopax import stochtrace


class State(NamedTuple):
    """A body that slows down."""

    position: Array
    speed: Array


def settle(start: State) -> State:
    """Move until the speed is small."""

    def moves(state: State) -> Array:
        return jnp.abs(state.speed) > 1e-3

    def move(state: State) -> State:
        return State(state.position + state.speed, 0.5 * state.speed)

    return lx.while_loop(moves, move, start, max_steps=100, kind="bounded")


def power(x: Array, n: Array) -> tuple[Array, lx.LoopInfo]:
    """Multiply, and count."""

    def multiply(i: Array, y: Array) -> Array:
        del i
        return y * x

    return lx.fori_loop(0, n, multiply, jnp.ones(()), info=True)


class Cell(eqx.Module):
    """A recurrent cell."""

    weight: Array

    def last_state(self, xs: Array, length: Array) -> Array:
        """Scan the first `length` rows."""

        def step(state: Array, x: Array) -> tuple[Array, Array]:
            return jnp.tanh(self.weight * state + x), state

        state, states = lx.scan(step, 0.0, xs, length=length, kind=lx.Checkpointed(4), lanes=lx.Compact())
        assert_type(state, Array)
        assert_type(states, Array)
        return state + states.sum()


def absolute(x: Array) -> Array:
    """Choose between two functions; a lane evaluates one of them."""
    return lx.cond(x > 0, lambda: x, lambda: -x)


def main() -> None:
    """Run everything once."""
    end = settle(State(jnp.zeros(()), jnp.ones(())))
    assert_type(end, State)
    value, info = power(jnp.array(2.0), jnp.array(3))
    assert_type(info, lx.LoopInfo)

    cell, xs, lengths = Cell(jnp.array(0.5)), jnp.ones((3, 5)), jnp.array([1, 5, 3])
    states = jax.vmap(cell.last_state)(xs, lengths)
    slopes = jax.grad(lambda xs: jax.vmap(cell.last_state)(xs, lengths).sum())(xs)

    report = lx.lane_report(lengths)
    assert_type(report, lx.LaneReport)
    estimate = stochtrace.estimate_trace(lambda v: 2.0 * v, jax.random.key(0), size=4, num_matvecs=3)
    assert_type(estimate, stochtrace.TraceEstimate)

    print(f"{end.position:.3f} {value:.0f} in {info.num_steps} steps, {absolute(-value):.0f}")
    print(states, (slopes != 0).sum(axis=1))
    print(f"{report.share(report.lockstep):.0%} useful, trace {estimate.value:.0f}")


if __name__ == "__main__":
    main()
