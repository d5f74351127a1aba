"""More operations of bodies: solves, sorts, gathers, slices, and functions with rules of their own."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp

from tests.fuzz.loops import Values

SPREAD = (3.0, 4.5, 6.0)  # a diagonal that no product of weights makes singular, and whose eigenvalues stay apart


def solve(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": 2.0 * jnp.linalg.solve(jnp.diag(jnp.array(SPREAD)) + 0.3 * jnp.tanh(w), c["v"])}


def cholesky(c: Values, x: Any, w: Any, loops: Any) -> Values:
    lower = jnp.linalg.cholesky(jnp.diag(jnp.array(SPREAD)) + 0.1 * jnp.outer(c["v"], c["v"]))
    return c | {"v": solve_triangular(lower, jnp.sin(c["v"]) + x, lower=True)}


def eigenvalues(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": 0.2 * jnp.linalg.eigvalsh(jnp.diag(jnp.array(SPREAD)) + 0.1 * jnp.sin(w + w.T) * c["s"]) - 0.7}


def linear_solve(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """By a loop of lax, with derivatives that solve again."""
    weights = 0.2 * jnp.tanh(w)
    solver = lambda f, b: lax.fori_loop(0, 30, lambda _, y: y + 0.25 * (b - f(y)), jnp.zeros_like(b))
    y = lax.custom_linear_solve(lambda y: 4.0 * y + weights @ y, c["v"], solver, solver)
    return c | {"v": 2.0 * y + 0.2 * x}


def root(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Of 2y + sin(y) = s, with the derivative of an implicit function."""
    f = lambda y: 2.0 * y + jnp.sin(y) - c["s"]
    newton = lambda f, y: lax.fori_loop(0, 6, lambda _, y: y - f(y) / (2.0 + jnp.cos(y)), y)
    y = lax.custom_root(f, jnp.zeros_like(c["s"]), newton, lambda g, y: y / g(jnp.ones_like(y)))
    return c | {"s": y + 0.5 * x}


def convolution(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.convolve(c["v"], jnp.array([0.3, -0.5, 0.2]), mode="same") + 0.2 * x}


def spectrum(c: Values, x: Any, w: Any, loops: Any) -> Values:
    turned = jnp.fft.fft(c["v"]) * jnp.array([0.5, 0.4j, -0.4j])
    return c | {"v": jnp.real(jnp.fft.ifft(turned)), "s": 0.3 * jnp.imag(turned)[1]}


def soft_choice(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jax.nn.softmax(c["v"]) @ jnp.tanh(w), "s": 0.5 * logsumexp(c["v"]) - 0.5}


def outer_product(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.tanh(jnp.einsum("i,j,ij->j", c["v"], jnp.cos(c["v"]), w))}


def length(c: Values, x: Any, w: Any, loops: Any) -> Values:
    size = jnp.sqrt((c["v"] ** 2).sum() + 0.1)
    return c | {"v": c["v"] / size, "s": size - 0.9}


def cumulative_product(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.cumprod(0.6 * jnp.cos(c["v"]) + 0.3)}


def running_sums(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": jnp.tanh(lax.associative_scan(jnp.add, c["v"], reverse=True))}


def sort_by(c: Values, x: Any, w: Any, loops: Any) -> Values:
    _, v = lax.sort((jnp.sin(3.0 * c["v"] + x), c["v"]), num_keys=1)
    return c | {"v": 0.9 * v}


def order(c: Values, x: Any, w: Any, loops: Any) -> Values:
    places = jnp.argsort(c["v"] * jnp.array([1.0, -0.7, 0.4]))
    return c | {"v": c["v"][places], "n": c["n"] + places[0].astype(jnp.int32)}


def best_two(c: Values, x: Any, w: Any, loops: Any) -> Values:
    best, places = lax.top_k(c["v"], 2)
    return c | {"v": 0.7 * c["v"].at[places].add(0.3 * best[::-1])}


def place_of_largest(c: Values, x: Any, w: Any, loops: Any) -> Values:
    hot = jax.nn.one_hot(jnp.argmax(c["v"]), 3, dtype=float)
    return c | {"v": 0.8 * c["v"] - 0.3 * hot, "n": jnp.argmin(c["v"]).astype(jnp.int32)}


def take_along(c: Values, x: Any, w: Any, loops: Any) -> Values:
    places = (jnp.arange(3, dtype=jnp.int32) + c["n"])[:, None] % 3
    return c | {"v": jnp.sin(jnp.take_along_axis(w, places, axis=1)[:, 0] * c["v"])}


def slice_of_weights(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": 0.5 * c["v"] + 0.4 * lax.dynamic_index_in_dim(w, c["n"] % 3, keepdims=False)}


def update_slice(c: Values, x: Any, w: Any, loops: Any) -> Values:
    new = jnp.stack([c["s"], 0.5 * x])
    return c | {"v": lax.dynamic_update_slice(c["v"], new, (c["n"] % 2,)), "n": c["n"] + 1}


def sums_by_place(c: Values, x: Any, w: Any, loops: Any) -> Values:
    places = (jnp.arange(3, dtype=jnp.int32) * c["n"]) % 3
    return c | {"v": jnp.tanh(jax.ops.segment_sum(c["v"] * w[0], places, 3) + c["v"])}


def place_among(c: Values, x: Any, w: Any, loops: Any) -> Values:
    place = jnp.searchsorted(jnp.array([-0.5, 0.0, 0.5]), c["s"]).astype(jnp.int32)
    return c | {"n": (c["n"] ^ place) + lax.population_count(c["n"]), "v": 0.9 * jnp.roll(c["v"], place)}


def rows_of_map(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": lax.map(lambda row: jnp.sin(row @ c["v"]), w)}


def inner_rows(c: Values, x: Any, w: Any, loops: Any) -> Values:
    s, v = loops.inner_scan(lambda s, row: (jnp.tanh(s + row @ c["v"]), jnp.sin(s)), c["s"], w)
    return c | {"s": s, "v": v}


def inner_solves(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """A step of Newton's method in a loop of any length."""
    system = jnp.diag(jnp.array(SPREAD)) + 0.2 * jnp.tanh(w)
    improved = lambda v: v - jnp.linalg.solve(system, jnp.sin(v) + system @ v - 1.0)
    return c | {"v": loops.inner(c["n"] % 3, improved, c["v"]), "n": c["n"] + 1}


def inner_stages(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Steps of a Runge-Kutta method, which loopax compiles once where a step with a derivative is as large."""

    def stages(v: Any) -> Any:
        slope = lambda v: jnp.tanh(w @ v + x) - 0.2 * v
        k1 = slope(v)
        k2 = slope(v + 0.1 * k1)
        k3 = slope(v + 0.1 * k2)
        return v + 0.2 / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + slope(v + 0.2 * k3))

    return c | {"v": loops.inner(2, stages, c["v"])}


def wide(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """On as many numbers as make room for what a derivative stores of a step."""
    a = jnp.sin(c["a"] + c["s"]) * 0.9
    return c | {"a": a, "s": 0.5 * c["s"] + a.mean()}


def wide_products(c: Values, x: Any, w: Any, loops: Any) -> Values:
    a = jnp.tanh(c["a"].reshape(-1, 3) @ w + c["v"][None])
    return c | {"a": a.reshape(-1), "v": 0.6 * c["v"] + a.mean(0) * 0.4}


def loop_in_loop(c: Values, x: Any, w: Any, loops: Any) -> Values:
    shrunk = lambda s: loops.inner_while(lambda s: jnp.abs(s) > 0.4, lambda s: 0.7 * s * jnp.cos(x), s)
    return c | {"s": loops.inner(2, lambda s: shrunk(jnp.sin(2.0 * s) + 0.5), c["s"])}


def pure_callback(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Of what is not differentiated."""
    seen = lax.stop_gradient(c["s"])
    found = jax.pure_callback(lambda s: s * 0.5, jax.ShapeDtypeStruct((), seen.dtype), seen, vmap_method="sequential")
    return c | {"s": 0.5 * c["s"] + found}


@jax.custom_batching.custom_vmap
def turned(x: Any) -> Any:
    return jnp.sin(2.0 * x)


@turned.def_vmap
def _(size: int, is_batched: list[bool], x: Any) -> Any:
    return jnp.sin(x + x), True


def rule_for_lanes(c: Values, x: Any, w: Any, loops: Any) -> Values:
    return c | {"v": 0.6 * c["v"] + 0.3 * turned(lax.stop_gradient(c["v"]))}


@jax.custom_batching.custom_vmap
def centred(x: Any) -> Any:
    return x * 0.5


@centred.def_vmap
def _(size: int, is_batched: list[bool], x: Any) -> Any:
    return x - jnp.broadcast_to(x.mean(0), x.shape), True


def rule_that_mixes_lanes(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Also of those that have finished."""
    own = lax.stop_gradient(jnp.tanh(c["s"])) + c["lane"].astype(float)
    return c | {"s": 0.6 * c["s"] + 0.1 * centred(own)}


def inner_rule_that_mixes_lanes(c: Values, x: Any, w: Any, loops: Any) -> Values:
    """Of lanes that take different numbers of steps in the inner loop, too."""
    own = lambda s: lax.stop_gradient(jnp.tanh(s)) + c["lane"].astype(float)
    return c | {"s": loops.inner(c["n"] % 3, lambda s: 0.6 * s + 0.1 * centred(own(s)), c["s"]), "n": c["n"] + 1}
