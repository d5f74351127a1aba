"""Transformations of `f(t, n)`, from a float64[2] and an int32 to a pytree of arrays, into another such function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Function = Callable[[Any, Any], Any]


def floats(results: Any) -> list[Any]:
    """The results that have derivatives."""
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]


def as_one(f: Function, n: Any) -> Callable[[Any], Any]:
    """All results in one number."""

    def one(t: Any) -> Any:
        parts = [jnp.sin(part).astype(float).sum() for x in floats(f(t, n)) for part in (jnp.real(x), jnp.imag(x))]
        return sum(weight * part for weight, part in zip(jnp.linspace(0.5, 1.5, len(parts)), parts, strict=True))

    return one


def direction(t: Any) -> Any:
    """Of the dtype of `t`, also where JAX makes no numbers of 64 bits."""
    return lax.stop_gradient(jnp.cos(t))


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: lambda t, n: jax.grad(as_one(f, n))(t),
    "value_and_grad": lambda f: lambda t, n: jax.value_and_grad(as_one(f, n))(t),
    "vjp": lambda f: lambda t, n: jax.vjp(as_one(f, n), t)[1](jnp.asarray(0.7)),
    "jvp": lambda f: lambda t, n: jax.jvp(lambda t: floats(f(t, n)), (t,), (direction(t),)),
    "linearize": lambda f: lambda t, n: jax.linearize(lambda t: floats(f(t, n)), t)[1](direction(t)),
    "jacfwd": lambda f: lambda t, n: jax.jacfwd(lambda t: floats(f(t, n)))(t),
    "jacrev": lambda f: lambda t, n: jax.jacrev(as_one(f, n))(t),
    "vmap": lambda f: lambda t, n: jax.vmap(f)(jnp.stack([t, t * t, -t]), jnp.stack([n, n // 2, n + 1])),
    "vmap of t": lambda f: lambda t, n: jax.vmap(f, (0, None))(jnp.stack([t, -t * t]), n),
    "vmap of n": lambda f: lambda t, n: jax.vmap(f, (None, 0))(t, jnp.stack([n, n - 1, n + 2])),
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
}


def other(f: Function) -> Function:
    """Something else of the same types."""

    def something(t: Any, n: Any) -> Any:
        value = jnp.sin(t.sum()) * 0.5
        fill = lambda aval: jnp.broadcast_to(value, aval.shape).astype(aval.dtype)
        return jax.tree.map(fill, jax.eval_shape(f, t, n))

    return something


def in_cond(f: Function, loops: Any) -> Function:
    """Where it is not `f`, it is something else, by the lane's own `t`."""
    return lambda t, n: loops.cond(t[0] > 0.3, f, other(f), t, n)


def in_switch(f: Function, loops: Any) -> Function:
    """By the lane's own `n`, which may be out of range."""
    return lambda t, n: loops.switch(n - 1, [lambda t, n: other(f)(t * t, n), other(f), f], t, n)


# As transformations, of a function and the class of loops.
AROUND: dict[str, Callable[[Function, Any], Function]] = {
    "cond": in_cond,
    "switch": in_switch,
    "compact cond": lambda f, loops: in_cond(f, loops.with_compact_branches()),
    "compact switch": lambda f, loops: in_switch(f, loops.with_compact_branches()),
}
FORWARD = {"jvp", "linearize", "jacfwd"}
REVERSE = {"grad", "value_and_grad", "vjp", "jacrev"}
DERIVATIVES = FORWARD | REVERSE
BATCHES = {"vmap", "vmap of t", "vmap of n"}
