"""Loops of a given number of steps, and ways to look for errors and callbacks, for the tests of errors."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import loopax as lx

RUN_TIME = (eqx.EquinoxRuntimeError, jax.errors.JaxRuntimeError)  # the second under plain `jax.jit`
KINDS = ["auto", "lax", "checkpointed", "bounded", "residuals"]


def while_loop(steps: Any, **options: Any) -> Any:
    return lx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, 2.0 * c[1]), (0, 1.0), **options)


def fori_loop(steps: Any, **options: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: 2.0 * x, 1.0, **options)


def scan(steps: Any, **options: Any) -> Any:
    return lx.scan(lambda c, _: (2.0 * c, c), 1.0, None, steps, **options)


def scan_with_stop(steps: Any, **options: Any) -> Any:
    return lx.scan(lambda c, _: (c + 1, c), 0, stop=lambda c, _: c >= steps, **options)


EACH_LOOP = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])
EACH_LIMITED = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan, scan_with_stop])


def raises(error: Any, *parts: str) -> Any:
    """An error whose message has these parts, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


def loop_bodies(jaxpr: Any) -> list[Any]:
    """The bodies of the loops of a program that are not inside another loop."""
    found = []
    for eqn in jaxpr.eqns:
        inner = [p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")]
        is_loop = eqn.primitive.name in ("loop", "linear_loop", "reverse_sweep", "linear_sweep")
        found += inner if is_loop else [body for j in inner for body in loop_bodies(j)]
    return found


def assert_no_callback_in_a_loop(program: Any) -> None:
    bodies = loop_bodies(program.jaxpr)
    assert "callback" in str(program)
    assert bodies
    assert not any("callback" in str(body) for body in bodies)


def eagerly(f: Any) -> Any:
    return f


def leave_tracer() -> Any:
    left = []
    jax.jit(left.append)(1.0)
    return left[0]


SUM = lambda c, x: (c + x, c)


def rows_up_to(length: Any, **options: Any) -> Any:
    return lx.scan(SUM, 0.0, jnp.arange(3.0), length, **options)


def doubled(x: Any, steps: Any) -> Any:
    return lx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, 2.0 * c[1]), (jnp.int32(0), x), max_steps=3)[1]


def inner(x: Any, steps: Any, **options: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: x + 1.0, x, max_steps=3, **options)


def nested_fori(steps: Any, inner: Any = inner) -> Any:
    return lx.fori_loop(0, 2, lambda _, x: inner(x, steps), 0.0)
