"""Run-time checks: flags in the state of loops, raised once, after the outermost loop.

A callback inside a loop's body costs about ten times what a flag in its carry does. So a check in the
body of a loop is handed to that loop, which carries it along, and so on outward; the outermost loop
raises it with `equinox.error_if`. A check that is made under another transformation inside the body
(a `jit` or `vmap` there) cannot be handed over, and is raised on the spot.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from loopax._compat import trace_state, varying


@dataclass(frozen=True)
class Check:
    """`message` is an error where `failed` (bool[]) is True."""

    failed: Any
    message: str


@dataclass
class Collector:
    """What the body of an outer loop has been handed while it is traced."""

    trace: Any
    checks: list[Check] = field(default_factory=list)


_active = local()


@contextmanager
def collecting() -> Iterator[list[Check]]:
    """Take the checks of loops in a body that is being traced."""
    stack = _active.__dict__.setdefault("stack", [])
    collector = Collector(trace_state())
    stack.append(collector)
    try:
        yield collector.checks
    finally:
        stack.pop()


def settle(results: Any, checks: Sequence[Check]) -> Any:
    """Hand checks to the loop whose body is being traced, or raise where they fail."""
    stack = _active.__dict__.get("stack", [])
    if stack and stack[-1].trace == trace_state():
        stack[-1].checks.extend(checks)
        return results
    for check in checks:
        results = _error_if(results, check)
    return results


def _raise_if(arrays: Any, check: Check) -> Any:
    """`equinox.error_if`, also where arrays vary over the axes of a `shard_map`.

    It cannot return such arrays, since what its error branch returns does not vary. There it checks a
    constant instead, on which the arrays are made to depend.
    """
    if not any(varying(x) for x in jax.tree.leaves(arrays)):
        return eqx.error_if(arrays, check.failed, check.message)
    token = eqx.error_if(jnp.zeros((), bool), check.failed, check.message)
    return jax.tree.map(lambda x: jnp.where(token, jnp.zeros_like(x), x), arrays)


def _error_if(results: Any, check: Check) -> Any:
    """Make every array of the results depend on the check."""
    arrays, rest = eqx.partition(results, eqx.is_array)
    if not jax.tree.leaves(arrays):
        # Nothing depends on the check then; a constant that nobody uses would be removed with it.
        return results
    keys, plain = eqx.partition(arrays, lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
    impls = [jax.random.key_impl(k) for k in jax.tree.leaves(keys)]
    data = jax.tree.map(jax.random.key_data, keys)
    plain, data = _raise_if((plain, data), check)
    leaves, treedef = jax.tree.flatten(data)
    wrapped = [jax.random.wrap_key_data(d, impl=i) for d, i in zip(leaves, impls, strict=True)]
    return eqx.combine(plain, treedef.unflatten(wrapped), rest)
