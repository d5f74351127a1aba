"""More operations of bodies: callbacks that are counted, and rows in host memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.loops import Operation, Values

Who = tuple[Any, ...]  # of whom an effect is, and whether it happens: `Loops.who`


def say(c: Values, x: Any, w: Any, loops: Any) -> Values:
    loops.say("say", c["s"], loops.who(c))
    return c | {"s": jnp.sin(c["s"] + x)}


def say_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    def loud(v: Any) -> Any:
        loops.say("say_in_branch", v[0], loops.who(c))
        return jnp.sin(w @ v)

    return c | {"v": loops.cond(c["s"] > 0.1, loud, lambda v: 0.9 * v, c["v"])}


def say_and_change_nothing(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """In a branch, whose result is its operand."""

    def loud(s: Any) -> Any:
        loops.say("say_and_change_nothing", s, loops.who(c))
        return s

    return c | {"s": 0.9 * loops.cond(x > 0.0, loud, lambda s: s, c["s"])}


def say_in_inner_loop(c: Values, x: Any, w: Any, loops: Any) -> Values:
    def loud(v: Any) -> Any:
        loops.say("say_in_inner_loop", v[0], loops.who(c))
        return jnp.tanh(w @ v + x)

    return c | {"v": loops.inner(c["n"] % 3, loud, c["v"]), "n": c["n"] + 1}


def say_in_scan(c: Values, x: Any, w: Any, loops: Any) -> Values:
    who = loops.who(c)

    def loud(s: Any, e: Any) -> Any:
        loops.say("say_in_scan", s, who)
        return jnp.tanh(s + e), s * e

    s, v = lax.scan(loud, c["s"], c["v"])
    return c | {"s": s, "v": v}


def say_in_checkpoint(c: Values, x: Any, w: Any, loops: Any) -> Values:
    @jax.checkpoint
    def loud(v: Any, *who: Any) -> Any:
        loops.say("say_in_checkpoint", v[1], who)
        return jnp.sin(w @ jnp.sin(v))

    return c | {"v": loud(c["v"], *loops.who(c))}


def say_in_custom_jvp(c: Values, x: Any, w: Any, loops: Any) -> Values:
    @jax.custom_jvp
    def loud(s: Any, *who: Any) -> Any:
        loops.say("say_in_custom_jvp", s, who)
        return jnp.tanh(s)

    @loud.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return loud(*primals), 0.7 * jnp.cos(primals[0]) * tangents[0]

    return c | {"s": loud(c["s"] + x, *loops.who(c))}


def say_in_custom_vjp(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """In the function; its forward rule says the same."""

    @jax.custom_vjp
    def loud(s: Any, *who: Any) -> Any:
        loops.say("say_in_custom_vjp", s, who)
        return jnp.sin(s)

    backward = lambda stored, ct: (0.8 * jnp.cos(stored[0]) * ct, *(None for _ in stored[1:]))
    loud.defvjp(lambda s, *who: (loud(s, *who), (s, *who)), backward)
    return c | {"s": loud(c["s"] + x, *loops.who(c))}


def say_in_backward_rule(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """What is stored and the cotangent, once for each step back."""

    def loud(stored: Any, ct: Any) -> Any:
        s, *who = stored
        loops.say("say_in_backward_rule", s, who)
        loops.say("say_in_backward_rule: cotangent", ct, who)
        return (0.8 * jnp.cos(s) * ct, *(None for _ in who))

    return c | {"s": with_backward_rule(loud)(c["s"] + x, *loops.who(c))}


def tell_in_backward_rule(c: Values, x: Any, w: Any, loops: Any) -> Values:
    def loud(stored: Any, ct: Any) -> Any:
        s, *who = stored
        loops.tell("tell_in_backward_rule", ct, who)
        return (0.8 * jnp.cos(s) * ct, *(None for _ in who))

    return c | {"s": with_backward_rule(loud)(c["s"] + x, *loops.who(c))}


def with_backward_rule(rule: Any) -> Any:
    """A sine."""
    function = jax.custom_vjp(lambda s, *who: jnp.sin(s))
    function.defvjp(lambda s, *who: (jnp.sin(s), (s, *who)), rule)
    return function


def tell(c: Values, x: Any, w: Any, loops: Any) -> Values:
    loops.tell("tell", c["s"], loops.who(c))
    return c | {"s": jnp.sin(c["s"] + x)}


def ask_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    asked = lambda s: loops.ask("ask_in_branch", s, loops.who(c))
    return c | {"s": 0.9 * loops.cond(c["v"][0] > 0.0, asked, lambda s: s - 0.1, c["s"])}


def ask_in_checkpoint(c: Values, x: Any, w: Any, loops: Any) -> Values:
    asked = jax.checkpoint(lambda s, *who: loops.ask("ask_in_checkpoint", jnp.sin(s), who))
    return c | {"s": 0.9 * asked(c["s"], *loops.who(c))}


def say_in_order(c: Values, x: Any, w: Any, loops: Any) -> Values:
    loops.say("say_in_order", c["s"], loops.who(c), ordered=True)
    return c | {"s": jnp.sin(c["s"] + x)}


def branch_on_host(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """An operand of a branch that is in host memory."""
    stored = loops.to_host(lax.stop_gradient(c["v"]))
    v = loops.cond(c["s"] > 0.1, lambda v: jnp.sin(loops.to_device(v)), lambda v: 0.5 * loops.to_device(v), stored)
    return c | {"v": 0.6 * c["v"] + 0.3 * v}


# Those of one expression.
SHORT: dict[str, Operation] = {
    "ask": lambda c, x, w, loops: c | {"s": 0.5 * c["s"] + 0.4 * loops.ask("ask", c["s"] + x, loops.who(c))},
    # A row of xs that is in host memory.
    "row_from_host": lambda c, x, w, loops: c | {"v": 0.7 * c["v"] + 0.2 * loops.to_device(c["x on host"])},
}
