"""Arrays in host memory: rows, carries, constants and operands, in every kind, in lanes and in derivatives.

The reference is the same program with all arrays in device memory. JAX's CPU backend has both memories in types only.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import loopax as lx

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Moves(NamedTuple):
    """To the host and back; JAX needs `src` for derivatives."""

    host: Callable[[Any], Any]
    dev: Callable[[Any], Any]


MOVING = Moves(lambda x: jax.device_put(x, HOST, src=DEVICE), lambda x: jax.device_put(x, DEVICE, src=HOST))
STAYING = Moves(lambda x: x, lambda x: x)

X = jnp.array([0.3, 0.5])
XS = jnp.array([[0.3, 0.5], [0.7, -0.2], [0.1, 0.9]])
LENGTHS = jnp.array([2, 4, 0])
KINDS = ["auto", "bounded", "residuals", "checkpointed", lx.Checkpointed(2)]


def scanned(to: Moves, x: Any, n: Any, **options: Any) -> Any:
    """Constants, a leaf of the carry, rows in and rows out on the host."""
    host, dev = to
    w, xs = host(jnp.sin(x)), host(jnp.stack([x * k for k in range(1, 6)]))

    def step(carry: Any, row: Any) -> Any:
        h, d = carry
        d = d * dev(w) + jnp.sin(dev(row)) + dev(h)
        return (host(0.5 * jnp.cos(d)), d), host(d * d)

    (h, d), ys = lx.scan(step, (host(x), x), xs, length=n, **options)
    return jnp.sin(dev(h)).sum() + d.sum() + jnp.sin(dev(ys)).sum()


def stepped(to: Moves, x: Any, n: Any, **options: Any) -> Any:
    return to.dev(_on_host(to, x, n, **options)).sum()


def _on_host(to: Moves, x: Any, n: Any, **options: Any) -> Any:
    """A loop within a loop, whose carry is on the host."""
    inner = lambda h: lx.fori_loop(0, n, lambda _, g: to.host(jnp.sin(to.dev(g)) * x), h, max_steps=4)
    return lx.fori_loop(0, 2, lambda _, h: inner(h), to.host(x), **options)


def branched(to: Moves, x: Any, n: Any, **options: Any) -> Any:
    host, dev = to
    w, h = host(jnp.sin(x)), host(x)
    a, b = lx.cond(n > 2, lambda h: (host(2 * dev(h)), dev(h)), lambda h: (h, dev(w)), h, **options)
    c = lx.switch(n, [lambda h: h, lambda h: host(dev(h) * dev(w)), lambda h: host(jnp.cos(dev(h)))], h, **options)
    return (dev(a) * b + dev(c)).sum()


def appended(to: Moves, x: Any, n: Any, **options: Any) -> Any:
    host, dev = to

    def step(i: Any, carry: Any) -> Any:
        buffer, history, h = carry
        buffer = buffer.append(host(jnp.sin(dev(h)) * x), when=i % 2 == 0)
        return buffer, history.push(host(dev(history[0]) + x)), host(dev(buffer[-1]) * dev(history[i % 2]))

    start = lx.Buffer(5, like=host(x)), lx.History(2, host(jnp.stack([x, 2 * x]))), host(x)
    buffer, history, h = lx.fori_loop(0, n, step, start, max_steps=5, **options)
    return dev(h).sum() + dev(buffer.rows).sum() + dev(history.rows).sum()


def truncated(to: Moves, x: Any, n: Any, **_: Any) -> Any:
    step = lambda _, h: to.host(jnp.sin(to.dev(h)) * x)
    last = lx.fori_loop(0, n, step, to.host(x), max_steps=5, derivative=lx.Truncated(last=2))
    windows = lx.fori_loop(0, 4, step, to.host(x), derivative=lx.Truncated(window=2))
    return to.dev(last).sum() + to.dev(windows).sum()


def reversed_(to: Moves, x: Any, n: Any, **_: Any) -> Any:
    kind = lx.Reversible(lambda _, h: to.host((to.dev(h) - x) / 2), rtol=1e-3)
    return to.dev(lx.fori_loop(0, n, lambda _, h: to.host(to.dev(h) * 2 + x), to.host(x), max_steps=5, kind=kind)).sum()


def converged(to: Moves, x: Any, n: Any, **_: Any) -> Any:
    step = lambda _, h: to.host(0.3 * jnp.sin(to.dev(h)) * x + x)
    return to.dev(lx.fori_loop(0, 40 + n, step, to.host(x), max_steps=50, derivative=lx.Implicit())).sum()


def _same(program: Any, run: Callable[[Callable[..., Any]], Any], **options: Any) -> None:
    got, expected = (run(partial(program, to, **options)) for to in (MOVING, STAYING))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def slopes(f: Any) -> Any:
    return jax.jit(jax.grad(f))(X, 3)


def slopes_of_lanes(f: Any) -> Any:
    """The gradient of a batch, and a batch of gradients."""
    of_batch = lambda x: jax.vmap(f)(x, LENGTHS).sum()
    return jax.jit(lambda x: jnp.stack([jax.grad(of_batch)(x), jax.vmap(jax.grad(f))(x, LENGTHS)]))(XS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradient_in_every_kind(kind: Any) -> None:
    _same(scanned, slopes, kind=kind)


@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential"])
@pytest.mark.parametrize("kind", ["residuals", lx.Checkpointed(2)], ids=str)
def test_lanes_and_their_gradients(kind: Any, lanes: Any) -> None:
    _same(scanned, slopes_of_lanes, kind=kind, lanes=lanes)


@pytest.mark.slow
def test_free_lanes() -> None:
    _same(stepped, slopes_of_lanes, lanes="free")


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_branches(lanes: Any) -> None:
    _same(branched, slopes, lanes=lanes)
    _same(branched, slopes_of_lanes, lanes=lanes)


@pytest.mark.parametrize("program", [appended, truncated, reversed_, converged])
def test_other_loops_and_kinds(program: Any) -> None:
    _same(program, slopes)


@pytest.mark.parametrize("run", [jax.jacfwd, jax.jacrev])
def test_second_derivatives(run: Any) -> None:
    _same(stepped, lambda f: jax.jit(run(jax.grad(f)))(X, 3), kind="bounded")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_results_are_where_the_body_leaves_them(wrap: Any) -> None:
    def run(scan: Any) -> Any:
        return wrap(lambda x: scan(lambda c, _: (2 * c, MOVING.host(c)), x, None, length=4))(X)

    (last, rows), (_, expected) = run(lx.scan), run(lax.scan)
    assert jax.typeof(last).memory_space is DEVICE
    assert jax.typeof(rows).memory_space is HOST
    np.testing.assert_array_equal(rows, expected)
    few = wrap(lambda x, n: lx.scan(lambda c, _: (c, MOVING.host(c)), x, length=n, max_steps=4)[1])(X, jnp.array(2))
    np.testing.assert_array_equal(few, [X, X, 0 * X, 0 * X])  # rows that no step has written
    empty = wrap(lambda x: lx.scan(lambda c, _: (c, MOVING.host(c)), x, length=0)[1])(X)
    assert (empty.shape, jax.typeof(empty).memory_space) == ((0, 2), HOST)
    chosen = wrap(lambda x: lx.cond(x[0] > 0, lambda h: MOVING.host(2 * x), lambda h: h, MOVING.host(x)))(X)
    assert jax.typeof(chosen).memory_space is HOST
    np.testing.assert_array_equal(chosen, 2 * X)


POLICIES = {
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["pre"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def layers(scan: Any, policy: str, **options: Any) -> Callable[[Any, Any], Any]:
    """A scan over layers, of which a policy says what to store."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(checkpoint_name(jnp.sin(w @ jnp.sin(h)), "pre")), None

    block = jax.checkpoint(layer, policy=POLICIES[policy])
    return lambda ws, x: scan(block, x, ws, **options)[0].sum()


WEIGHTS = 0.3 * jnp.sin(jnp.arange(4.0 * 8 * 8)).reshape(4, 8, 8)


def test_offloaded_residuals_are_rows_on_the_host() -> None:
    def rows_on_host(scan: Any, **options: Any) -> list[Any]:
        slope = jax.make_jaxpr(jax.grad(layers(scan, "offload", **options)))(WEIGHTS, jnp.ones(8))
        forward = next(eqn for eqn in slope.jaxpr.eqns if eqn.primitive.name in ("scan", "loop"))
        return [out.aval.shape for out in forward.outvars if out.aval.memory_space is HOST]

    assert rows_on_host(lx.scan, kind="residuals") == rows_on_host(lax.scan) == [(4, 8)]


def test_the_other_memory_is_another_type() -> None:
    with pytest.raises(TypeError, match=r"got float64<host>\[2\], expected float64\[2\]\nConvert .*`jax.device_put"):
        lx.fori_loop(0, 3, lambda _, c: MOVING.host(c), X)
    with pytest.raises(
        TypeError, match=r"the result itself: float64<host>\[2\] and float64\[2\]\nConvert .*device_put"
    ):
        lx.cond(X[0] > 0, lambda x: x, MOVING.host, X)
    with pytest.raises(TypeError, match=r"got float64<host>\[2\], expected float64\[2\]\nMove it"):
        lx.Buffer(2, like=X).append(MOVING.host(X))
