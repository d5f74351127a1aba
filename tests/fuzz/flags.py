"""More operations of bodies: choices between constants, and flags that only loops compute."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.fuzz.loops import Operation, Values
from tests.fuzz.program import KEPT_NAME, OFFLOADED_NAME


def guarded_domain(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Two choices, as people keep derivatives finite."""
    inside = c["s"] > 0.1
    return c | {"s": jnp.where(inside, 0.3 * jnp.log(jnp.where(inside, c["s"], 1.0)), 0.7 * c["s"] + 0.2)}


def chosen_inner_loop(c: Values, x: Any, w: Any, loops: Any) -> Values:
    v = loops.inner(2, lambda v: jnp.sin(w @ v) + 0.1, c["v"])
    return c | {"v": jnp.where(True, v, 0.0)}


def scan_with_constants(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Rows and parts of the carry are always the same."""

    def step(carry: Any, e: Any) -> Any:
        s, flag = carry
        return (jnp.where(flag, jnp.sin(s + e), s), True), (0.5, jnp.where(True, s, e))

    (s, _), (halves, v) = lax.scan(step, (c["s"], True), c["v"])
    return c | {"s": s, "v": v * halves}


def flag_of_scan(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Whether a walk ever turns back: of the loop, nothing else is used."""

    def step(carry: Any, e: Any) -> Any:
        v, flag = carry
        new = jnp.sin(w @ v) + e
        return (new, flag | (new @ v < 0.0)), None

    _, turned = lax.scan(step, (c["v"], False), c["v"])[0]
    return c | {"v": jnp.where(turned, 0.7 * c["v"], jnp.tanh(c["v"] + x))}


def flag_of_loop(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """The same of an inner loop, which ends where the walk turns back."""

    def step(carry: Any) -> Any:
        i, v, _ = carry
        new = jnp.sin(w @ v) + x
        return i + 1, new, new @ v < 0.0

    goes_on = lambda carry: (carry[0] < 3) & ~carry[2]
    i, _, turned = loops.inner_while(goes_on, step, (jnp.int32(0), c["v"], jnp.bool_(False)))
    return c | {"v": jnp.where(turned, 0.7 * c["v"], jnp.tanh(c["v"] - 0.2 * x)), "n": c["n"] + i}


def flags_of_rows(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """One of each row of an inner scan."""
    step = lambda s, row: (jnp.sin(s + row @ c["v"]), s > 0.1)
    s, flags = loops.inner_scan(step, c["s"], w)
    return c | {"v": jnp.where(flags, c["v"], -0.6 * c["v"]), "s": jnp.where(flags.any(), s, 0.5 * s)}


def turn_if(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """A loop sets the flag in the carry, and the next step reads it."""
    v, flag = loops.inner(2, lambda p: (jnp.sin(w @ p[0]), p[1] ^ (p[0][0] > x)), (c["v"], c["t"]))
    return c | {"t": flag, "v": jnp.where(c["t"], v, 0.8 * c["v"])}


def branch_on_flag(c: Values, x: Any, w: Any, loops: Any) -> Values:
    v, t = loops.cond(c["t"], lambda v: (jnp.sin(w @ v), False), lambda v: (0.9 * v, True), c["v"])
    return c | {"v": v, "t": t}


def named(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """For policies of `jax.checkpoint`."""
    kept = checkpoint_name(jnp.sin(w @ c["v"]), KEPT_NAME)
    return c | {"v": jnp.cos(checkpoint_name(kept * c["s"], OFFLOADED_NAME)) * kept}


def checkpoint_with_policy(c: Values, x: Any, w: Any, loops: Any) -> Values:
    policy = jax.checkpoint_policies.save_only_these_names(KEPT_NAME)
    function = lambda v, s: jnp.cos(checkpoint_name(jnp.sin(w @ v), KEPT_NAME) * s)
    return c | {"v": jax.checkpoint(function, policy=policy, prevent_cse=False)(c["v"], c["s"])}


def checkpoint_of_scan(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """With an inner loop in each of its steps, and a flag that only the loop computes."""

    def step(v: Any, e: Any) -> Any:
        found = loops.inner(2, lambda p: (jnp.sin(w @ p[0]) + e, p[1] | (p[0][0] > x)), (v, jnp.bool_(False)))
        return jnp.where(found[1], found[0], 0.5 * v), found[1]

    v, flags = jax.checkpoint(lambda v, es: lax.scan(step, v, es))(c["v"], w[0])
    return c | {"v": jnp.where(flags, v, 0.9 * v)}


def checkpoint_of_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    function = lambda v, s: loops.cond(s > 0.1, lambda v: jnp.sin(w @ v), lambda v: v, v)
    return c | {"v": 0.9 * jax.checkpoint(function)(c["v"], c["s"])}


# Those of one expression.
SHORT: dict[str, Operation] = {
    "chosen_by_a_constant": lambda c, x, w, loops: (
        c | {"v": jnp.where(True, jnp.sin(w @ c["v"]), 0.0), "s": jnp.where(False, 0.0, jnp.tanh(c["s"] + x))}
    ),
    "chosen_by_constants": lambda c, x, w, loops: (
        c | {"v": lax.select(jnp.array([True, False, True]), jnp.sin(c["v"]), jnp.full(3, 0.3))}
    ),
    "one_of_constants": lambda c, x, w, loops: (
        c | {"s": lax.select_n(c["n"] % 3, jnp.zeros(()), jnp.sin(c["s"]), jnp.full((), -0.4)), "n": c["n"] + 1}
    ),
    "constant": lambda c, x, w, loops: c | {"s": jnp.asarray(0.25), "v": c["v"] * jnp.cos(c["s"])},
    "clipped": lambda c, x, w, loops: c | {"v": jnp.clip(c["v"] + 0.3 * x, -0.6, 0.5), "s": jnp.maximum(c["s"], -0.3)},
    # Whatever the operation before gives.
    "chosen_result": lambda c, x, w, loops: (
        c | {"v": jnp.where(True, c["v"], 0.0), "s": lax.select(True, c["s"], jnp.zeros_like(c["s"]))}
    ),
    "set_flag": lambda c, x, w, loops: c | {"t": jnp.where(c["t"], c["v"].sum() > 0.0, True)},
}
