"""What bodies are made of: operations on the values of a carry, bounded, so that no value grows beyond float64.

Values are a dictionary: `v` float64[3], `s` float64[], `n` int32[], and perhaps `z` complex128[2], `f` float32[2], `d`
float64[2] in 32-bit mode, `k` a PRNG key, `g` one of another implementation, `m` an Equinox module, `b` a buffer, `h` a
history, `a` float64[120], `t` a bool and `r` a mutable array that is closed over; also `lane`, an int32[] that differs
from lane to lane, and of the row, with some features, `x64`, `x on host` and `key`. `x` is the row, a float64[]; `w` a
float64[3, 3] that is closed over. Inner loops, branches, buffers, histories and mutable arrays are those of `loops`
(`loops.py`): loopax's and JAX's, or unrolled ones and plain arrays.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.loops import Values

Operation = Callable[[Values, Any, Any, Any], Values]


class Layer(eqx.Module):
    """A leaf of the carry that is a module, with a static field."""

    weight: Any
    rate: float = eqx.field(static=True)

    def __call__(self, v: Any) -> Any:
        """Bounded by one."""
        return jnp.tanh(self.weight @ v * self.rate)


def product(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.tanh(w @ c["v"] + x)}


def elementwise(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.sin(c["v"] * c["s"]) + 0.5 * c["v"], "s": jnp.cos(c["s"] + x)}


def total(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"s": jnp.tanh(c["v"].sum() + 0.3 * c["s"])}


def count(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"n": c["n"] + 1, "s": c["s"] * 0.9 + jnp.sin(c["n"].astype(float)) * 0.1}


def swap(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": c["v"] * 0.5 + c["s"], "s": c["v"][1]}


def overwrite(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.stack([x, c["s"], x * c["s"]])}


def sort(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.sort(c["v"] * jnp.array([1.0, -0.7, 0.4]))}


def largest(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Not `max`: its derivative compares with the largest, which XLA may compute again, and round otherwise."""
    return c | {"s": 0.5 * jnp.sort(c["v"])[-1] + 0.2 * jnp.abs(c["s"])}


def gather(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": c["v"][(jnp.arange(3, dtype=jnp.int32) + c["n"]) % 3] * 0.9, "n": c["n"] + 2}


def scatter(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": c["v"].at[c["n"] % 3].multiply(jnp.cos(c["s"]))}


def cumulative(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.tanh(jnp.cumsum(c["v"])) - 0.1 * x}


def where(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.where(c["v"] > c["s"], c["v"], -0.5 * c["v"])}


def square_root(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Outside of its domain below -2, where no value is."""
    return c | {"v": 0.4 * jnp.sqrt(2.0 + jnp.tanh(c["v"])), "s": jnp.log(2.0 + jnp.sin(c["s"]))}


def cond(c: Values, x: Any, w: Any, loops: Any) -> Values:
    v = lax.cond(c["s"] > 0.1, lambda v, s: jnp.sin(w @ v), lambda v, s: v * s * 0.5, c["v"], c["s"])
    return c | {"v": v}


def switch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    branches = [jnp.sin, lambda v: v * 0.5 + x, lambda v: v[::-1]]
    return c | {"v": lax.switch(c["n"] % 3, branches, c["v"])}


def lax_scan(c: Values, x: Any, w: Any, loops: Any) -> Values:
    s, v = lax.scan(lambda s, e: (jnp.tanh(s + e), s * e), c["s"], c["v"])
    return c | {"s": s, "v": v}


def lax_fori(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": lax.fori_loop(0, 2, lambda i, v: jnp.sin(w @ v) + i * x, c["v"])}


def inner_loop(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": loops.inner(2, lambda v: jnp.sin(w @ v) + c["s"] * 0.2, c["v"])}


def inner_loop_of_any_length(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": loops.inner(c["n"] % 3, lambda v: jnp.tanh(w @ v + x), c["v"]), "n": c["n"] + 1}


def inner_while(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"s": loops.inner_while(lambda s: jnp.abs(s) > 0.3, lambda s: s * 0.6 * jnp.cos(x), c["s"])}


def checkpoint(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jax.checkpoint(lambda v, s: jnp.sin(w @ jnp.sin(v * s)))(c["v"], c["s"])}


def loop_in_checkpoint(c: Values, x: Any, w: Any, loops: Any) -> Values:
    function = lambda v: loops.inner(2, lambda v: jnp.tanh(w @ v), v)
    return c | {"v": jax.checkpoint(function)(c["v"])}


@jax.custom_jvp
def steep(x: Any) -> Any:
    return jnp.tanh(x)


@steep.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return steep(*primals), 0.7 * jnp.cos(primals[0]) * tangents[0]


def custom_jvp(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": steep(c["v"] + x)}


@jax.custom_vjp
def skewed(x: Any, y: Any) -> Any:
    return jnp.sin(x) * y


skewed.defvjp(
    lambda x, y: (skewed(x, y), (x, y)),
    lambda stored, ct: (0.8 * jnp.cos(stored[0]) * stored[1] * ct, (ct * jnp.sin(stored[0])).sum()),
)


def custom_vjp(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": skewed(c["v"], c["s"])}


@jax.custom_vjp
def squashed(x: Any) -> Any:
    return x


squashed.defvjp(lambda x: (x, x), lambda x, ct: (jnp.tanh(ct) * jnp.cos(x),))


def squash(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Its backward function is not linear in the cotangent, as where people clip gradients."""
    return c | {"v": squashed(jnp.sin(c["v"] + x))}


def stop_gradient(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": c["v"] * 0.5 + lax.stop_gradient(jnp.sin(c["v"]))}


def jit(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jax.jit(lambda v, s: jnp.sin(v) * s)(c["v"], c["s"])}


def batch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Inner loops in a batch, each with a length of its own."""
    ends = jax.vmap(lambda n, e: loops.inner(n, lambda e: jnp.sin(e) + 0.3 * x, e))(
        jnp.arange(3, dtype=jnp.int32), c["v"]
    )
    return c | {"v": ends}


def slope(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """A derivative of an inner loop."""
    return c | {"v": 0.5 * jax.grad(lambda v: loops.inner(2, lambda v: jnp.sin(w @ v), v).sum())(c["v"])}


def branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Of a few elementwise operations: lanes compute both and select. Its predicate is the row's."""
    v = loops.cond(x > 0, lambda v, s: jnp.sin(v) * s, lambda v, s: 0.5 * v + x, c["v"], c["s"])
    return c | {"v": v}


def branch_with_a_product(c: Values, x: Any, w: Any, loops: Any) -> Values:
    v, s = loops.cond(c["s"] > 0.1, lambda v, s: (jnp.sin(w @ v), s), lambda v, s: (v, s * 0.5), c["v"], c["s"])
    return c | {"v": v, "s": s}


def branch_with_a_domain(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Outside of it the function is NaN, or its derivative infinite; inside, also where `v` is zero, neither is."""
    far = lambda s, v: (0.3 * jnp.log(s), jnp.sqrt((0.1 + jnp.abs(v).sum()) * s) * v)
    s, v = loops.cond(c["s"] > 0.1, far, lambda s, v: (0.7 * s + 0.2, 0.8 * v), c["s"], c["v"])
    return c | {"s": s, "v": jnp.tanh(v)}


def one_of_three(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """The index may be out of range."""
    branches = [lambda v, n: (jnp.tanh(w @ v), n), lambda v, n: (v[::-1] * x, n + 1), lambda v, n: (jnp.cos(v), n - 2)]
    v, n = loops.switch(c["n"] - 1, branches, c["v"], c["n"])
    return c | {"v": v, "n": jnp.abs(n)}


def loop_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    long = lambda v, n: loops.inner(n % 3, lambda v: jnp.tanh(w @ v + x), v)
    return c | {"v": loops.cond(c["v"][0] > 0.1, long, lambda v, n: 0.9 * v, c["v"], c["n"])}


def branch_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    inner = lambda v, s: loops.cond(v[0] > s, lambda v: jnp.sin(w @ v), lambda v: v - 0.1, v)
    return c | {"v": 0.9 * loops.cond(c["s"] > 0.1, inner, lambda v, s: v * s, c["v"], c["s"])}


def complex_product(c: Values, x: Any, w: Any, loops: Any) -> Values:
    turn = lax.complex(0.8 * jnp.cos(c["s"]), 0.8 * jnp.sin(c["s"]))
    z = c["z"] * turn + lax.complex(0.1 * c["v"][:2], 0.2 * c["v"][1:])
    return c | {"z": z, "s": c["s"] * 0.5 + jnp.real(z * jnp.conj(z[::-1])).sum() * 0.1}


def float32(c: Values, x: Any, w: Any, loops: Any) -> Values:
    f = c["f"] * jnp.float32(0.5) + jnp.sin(c["v"][:2]).astype(jnp.float32)
    return c | {"f": f, "s": 0.5 * c["s"] + 0.2 * f.sum().astype(float)}


def doubles(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Of numbers of 64 bits alone, and none taken out of them: JAX's own derivatives of that end at 32 bits there."""
    d = jnp.sin(c["d"] * c["x64"]) - jnp.tanh(c["d"])[::-1]
    return c | {"d": d, "s": 0.5 * c["s"] + 0.2 * d.astype(jnp.float32)[0]}


def doubles_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"d": loops.cond(x > 0, lambda d: jnp.sin(d + d), lambda d: d * c["x64"], c["d"])}


def doubles_in_inner_loop(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"d": loops.inner(c["n"] % 3, lambda d: jnp.cos(d + c["x64"]), c["d"]), "n": c["n"] + 1}


def random(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return _drawn(c, "k")


def random_of_lanes(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """What a lane draws depends on its batch."""
    return _drawn(c, "g")


def _drawn(c: Values, name: str) -> Values:
    key, following = jax.random.split(c[name])
    return c | {name: following, "v": 0.8 * c["v"] + 0.2 * jax.random.normal(key, (3,), float)}


def random_in_inner_loop_of_lanes(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """As often as the lane says: what other lanes draw depends on it, also where the lane has finished."""

    def draw(carry: Any) -> Any:
        key, following = jax.random.split(jax.random.wrap_key_data(carry[0], impl=jax.random.key_impl(c["g"])))
        return jax.random.key_data(following), 0.8 * carry[1] + 0.2 * jax.random.normal(key, (3,), float)

    data, v = loops.inner(c["n"] % 3, draw, (jax.random.key_data(c["g"]), c["v"]))
    return c | {"g": jax.random.wrap_key_data(data, impl=jax.random.key_impl(c["g"])), "v": v, "n": c["n"] + 1}


def random_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return _drawn_in_branch(c, "k", loops)


def random_branch_of_lanes(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return _drawn_in_branch(c, "g", loops)


def _drawn_in_branch(c: Values, name: str, loops: Any) -> Values:
    """A lane that does not take it keeps its key."""

    def draw(key: Any, v: Any) -> Any:
        key, following = jax.random.split(key)
        return following, 0.8 * v + 0.2 * jax.random.uniform(key, (3,), float)

    key, v = loops.cond(c["s"] > 0.1, draw, lambda key, v: (key, 0.7 * v), c[name], c["v"])
    return c | {name: key, "v": v}


def random_of_loop(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": 0.8 * c["v"] + 0.2 * jax.random.normal(c["key"], (3,), float)}


def module(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": c["m"](c["v"])}


def trained_module(c: Values, x: Any, w: Any, loops: Any) -> Values:
    weight = 0.9 * c["m"].weight + 0.1 * jnp.outer(c["v"], c["v"])
    return c | {"m": Layer(weight, c["m"].rate)}


def module_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    halved = lambda m, v: (Layer(0.5 * m.weight, m.rate), m(v))
    m, v = loops.cond(c["s"] > 0.1, halved, lambda m, v: (m, 0.8 * v), c["m"], c["v"])
    return c | {"m": m, "v": v}


def append(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"b": loops.append(c["b"], c["s"] * x, c["v"][0] > -0.3)}


def newest_of_buffer(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"s": 0.6 * c["s"] + 0.3 * loops.newest(c["b"])}


def push(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"h": loops.push(c["h"], jnp.sin(c["s"] + c["h"][0]))}


def push_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    pushed = lambda h, s: loops.push(h, jnp.sin(s + h[0]))
    return c | {"h": loops.cond(x > 0, pushed, lambda h, s: h, c["h"], c["s"])}


def window(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"s": jnp.tanh(loops.rows(c["h"]).sum() * x), "v": c["v"] * c["h"][c["n"] % 3]}


def write(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"r": loops.write(c["r"], c["n"] % 2, lambda row: 0.8 * row + jnp.sin(c["s"]))}


def write_in_branch(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"r": loops.write_if(x > 0, c["r"], c["n"] % 2, lambda row: 0.8 * row + jnp.sin(c["s"]))}


def read(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"s": 0.5 * c["s"] + 0.4 * c["r"][...].sum() * x}


def compact(operation: Operation) -> Operation:
    """The operation with branches of compact lanes."""

    def compacted(c: Values, x: Any, w: Any, loops: Any) -> Values:
        return operation(c, x, w, loops.with_compact_branches())

    compacted.__name__ = f"compact_{operation.__name__}"
    return compacted
