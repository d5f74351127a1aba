"""Mistakes of a user that type checkers find before the program runs."""

# ruff: noqa: F841

import jax.numpy as jnp
from jax import Array

import loopax as lx


def double(x: Array) -> Array:
    """Return twice the value."""
    return 2.0 * x


def grow(x: Array) -> Array:
    """Say whether to go on."""
    return x < 9.0


ONE = jnp.ones(())


def mistakes() -> None:
    """Make one in each line."""
    lx.while_loop(grow, double, ONE, max_step=9)  # MISTAKE: the option is called max_steps
    lx.while_loop(grow, double, ONE, max_steps=9.0)  # MISTAKE: not an integer
    lx.while_loop(grow, double, ONE, kind="revolve")  # MISTAKE: no such kind
    lx.while_loop(grow, double, ONE, lanes="compat")  # MISTAKE: no such lanes
    lx.fori_loop(0, 3, ONE, lambda i, x: x)  # MISTAKE: body and carry are in the wrong order
    lx.scan(double, ONE, jnp.ones(3))  # MISTAKE: the body returns no pair
    lx.durable.scan(lambda c, x: (c, x), ONE, jnp.ones(3))  # MISTAKE: no directory
    number: int = lx.while_loop(grow, double, ONE)  # MISTAKE: the result is an array
    pair: Array = lx.while_loop(grow, double, ONE, info=True)  # MISTAKE: the result is a pair
    lx.Checkpointed("ten")  # MISTAKE: not a number of checkpoints
    lx.lanes_map(double, ONE, lane=4)  # MISTAKE: the option is called lanes
