"""Compiles loops and their derivatives, and reports which came from JAX's persistent compilation cache.

A program of its own, for `test_compilation_cache.py`: a second process is what a cache on disk is for.
"""

import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

import loopax as lx

EVENTS = ("/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses")


def root(x: Any, **options: Any) -> Any:
    far = lambda y: jnp.abs(y * y - x) > 1e-6
    return lx.while_loop(far, lambda y: (y + x / y) / 2, x, **options)


def unchecked(x: Any) -> Any:
    return root(x, max_steps=50, throw=False)


def checked(x: Any) -> Any:
    return root(x, max_steps=2)


def rows(x: Any, n: Any, kind: Any) -> Any:
    step = lambda h, row: (jnp.sin(h * row), h)
    h, ys = lx.scan(step, x, jnp.linspace(1.0, 2.0, 20, dtype=jnp.float32), length=n, kind=kind, throw=False)
    return h + ys.sum()


X, N = jnp.float32(2.0), jnp.int32(7)
PROGRAMS: dict[str, Any] = {
    "while_loop": (unchecked, X),
    "gradient": (jax.grad(unchecked), X),
    "gradient without a bound": (jax.grad(root), X),
    "batch of second derivatives": (jax.vmap(jax.grad(jax.grad(unchecked))), jnp.stack([X, X + 1])),
    **{
        f"gradient of a scan, {kind}": (jax.grad(lambda x, n, kind=kind: rows(x, n, kind)), X, N)
        for kind in ("checkpointed", "bounded", "residuals")
    },
}
CHECKED: dict[str, Any] = {"while_loop, checked": (checked, X), "gradient, checked": (jax.grad(checked), X)}


def report() -> dict[str, tuple[int, int, str]]:
    """Cache hits and misses, and the error, if any, for each program."""
    counts: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    found = {}
    for name, (f, *arguments) in (PROGRAMS | CHECKED).items():
        lowered = jax.jit(f).lower(*arguments)
        counts.clear()
        compiled = lowered.compile()
        hits, misses = (counts[event] for event in EVENTS)
        found[name] = (hits, misses, error_of(compiled, arguments))
    return found


def error_of(program: Any, arguments: Any) -> str:
    try:
        jax.block_until_ready(program(*arguments))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(report()))
