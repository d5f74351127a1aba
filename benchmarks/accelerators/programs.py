"""What is compiled for each device: every kind, way to run lanes, loop and derivative of loopax, on small arrays.

Checks at run time are callbacks to the host, which a compiler without a device refuses. So loops are written with
``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

import loopax as lx

UNITS, STEPS, LANES = 16, 20, 64
Loss = Callable[..., Array]  # of a state and of weights


class Program(NamedTuple):
    """A function that is compiled."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    on_mesh: bool = False  # it takes the mesh first
    is_quick: bool = False  # among those of `make accelerators`


def step(h: Array, w: Array) -> Array:
    """Two products and a function."""
    return jnp.tanh(w @ (w @ h))


def scan_of(**options: Any) -> Loss:
    """A scan of a static length with rows of inputs and results."""

    def loss(h: Array, w: Array) -> Array:
        xs = jnp.linspace(0.0, 1.0, STEPS)
        h, ys = lx.scan(lambda h, x: (step(h, w) + x, h.sum()), h, xs, **options)
        return h.sum() + ys.sum()

    return loss


def fori_of(**options: Any) -> Loss:
    """A loop of indices."""
    return lambda h, w: lx.fori_loop(0, STEPS, lambda i, h: step(h, w) + 0.1 * i, h, **options).sum()


def while_of(**options: Any) -> Loss:
    """A loop whose number of steps depends on its values."""
    return lambda h, w: lx.while_loop(lambda h: (h * h).sum() > 0.1, lambda h: 0.9 * step(h, w), h, **options).sum()


def nested_of(**options: Any) -> Loss:
    """A loop in a loop in a loop."""

    def loss(h: Array, w: Array) -> Array:
        inner = lambda i, h: lx.while_loop(
            lambda c: c[0] < 2 + (c[1][0] > 0), lambda c: (c[0] + 1, step(c[1], w)), (0, h), max_steps=4
        )[1]
        middle = lambda h, x: (lx.fori_loop(0, 3, inner, h, **options) + x, None)
        return lx.scan(middle, h, jnp.linspace(0.0, 1.0, 5), **options)[0].sum()

    return loss


def branches(**options: Any) -> Loss:
    """A condition and a switch in a loop."""

    def loss(h: Array, w: Array) -> Array:
        def body(i: Any, h: Array) -> Array:
            h = lx.cond(h[0] > 0.1, lambda h: step(h, w), lambda h: 0.5 * h, h, **options)
            return lx.switch(i % 3, [jnp.sin, lambda h: step(h, w), lambda h: h], h, **options)

        return lx.fori_loop(0, STEPS, body, h).sum()

    return loss


def history(h: Array, w: Array) -> Array:
    """A delay of three steps."""

    def body(i: Any, history: Any) -> Any:
        return history.push(step(history[0], w) + 0.1 * history[2])

    return lx.fori_loop(0, STEPS, body, lx.History(3, like=h, fill=0.5))[0].sum()


def buffer(h: Array, w: Array) -> Array:
    """Rows that are appended, and read again."""

    def body(i: Any, carry: Any) -> Any:
        h, rows = carry
        h = step(h, w) + 0.1 * rows[jnp.maximum(i - 2, 0)]
        return h, rows.append(h)

    rows = lx.Buffer(STEPS + 1, like=h).append(h)
    return lx.fori_loop(0, STEPS, body, (h, rows))[1].rows.sum()


def rollout(h: Array, w: Array) -> Array:
    """Steps of an environment."""
    return lx.scan(lambda c, key: (step(c, w) + 0.01 * jax.random.normal(key), c.sum()), h, _keys())[1].sum()


def _keys() -> Array:
    return jax.random.split(jax.random.key(0), STEPS)


def reversible(**options: Any) -> Loss:
    """A leapfrog, whose steps can be undone."""

    def kick(i: Any, c: Any, w: Array) -> Any:
        q, p = c
        p = p - 0.1 * jnp.sin(w @ q)
        return q + 0.1 * p, p

    def back(i: Any, c: Any, w: Array) -> Any:
        q, p = c
        q = q - 0.1 * p
        return q, p + 0.1 * jnp.sin(w @ q)

    def loss(h: Array, w: Array) -> Array:
        kind = lx.Reversible(lambda i, c: back(i, c, w), rtol=None)
        return lx.fori_loop(0, STEPS, lambda i, c: kick(i, c, w), (h, h), kind=kind, **options)[0].sum()

    return loss


def implicit(h: Array, w: Array) -> Array:
    """A fixed point."""
    derivative = lx.Implicit(unsolved="nan")
    contraction = lambda h: 0.1 * step(h, w) + 0.1
    moves = lambda c: jnp.abs(c[0] - c[1]).sum() > 1e-5
    fixed = lx.while_loop(moves, lambda c: (contraction(c[0]), c[0]), (h, h + 1), derivative=derivative)
    return fixed[0].sum()


def rewritten(h: Array, w: Array) -> Array:
    """Loops of `jax.lax`."""

    def program(h: Array, w: Array) -> Array:
        h = lax.while_loop(lambda h: (h * h).sum() > 0.1, lambda h: 0.9 * step(h, w), h)
        return lax.scan(lambda h, x: (lax.cond(x > 0.5, jnp.sin, lambda h: step(h, w), h), None), h, jnp.ones(3))[
            0
        ].sum()

    return lx.rewrite_loops(program, conds=True)(h, w)


LOSSES: dict[str, Loss] = {
    "scan": scan_of(),
    "scan, reverse": scan_of(reverse=True),
    "fori_loop": fori_of(),
    "while_loop": while_of(),
    "while_loop, max_steps": while_of(max_steps=STEPS),
    **{f"scan, {kind!r}": scan_of(kind=kind) for kind in (lx.Residuals(), lx.Bounded(), lx.Checkpointed(), lx.Lax())},
    "scan, Checkpointed(4)": scan_of(kind=lx.Checkpointed(4)),
    "scan, Checkpointed(12)": scan_of(kind=lx.Checkpointed(12)),
    "while_loop, Checkpointed(4)": while_of(kind=lx.Checkpointed(4)),
    "while_loop, Residuals()": while_of(kind="residuals", max_steps=STEPS),
    "while_loop, Bounded()": while_of(kind="bounded", max_steps=STEPS),
    "scan, unroll": scan_of(unroll=4),
    "scan, finite": scan_of(finite=True),
    "scan, Truncated(last=5)": scan_of(derivative=lx.Truncated(last=5)),
    "scan, Truncated(window=5)": scan_of(derivative=lx.Truncated(window=5)),
    "nested": nested_of(),
    "nested, Checkpointed()": nested_of(kind="checkpointed"),
    "branches": branches(),
    "branches, compact": branches(lanes="compact"),
    "History": history,
    "Buffer": buffer,
    "random keys": rollout,
    "Reversible": reversible(),
    "Implicit": implicit,
    "rewrite_loops": rewritten,
}
LANES_OF = {
    f"while_loop, lanes={lanes}, {kind}": while_of(lanes=lanes, kind=kind, max_steps=bound)
    for lanes in ("lockstep", "compact", "sequential", "auto")
    for kind, bound in (("auto", STEPS), ("checkpointed", None))
}
ORDERS: dict[str, Callable[[Loss], Callable[..., Any]]] = {
    "forward": lambda f: f,
    "forward of a batch": lambda f: jax.vmap(f, (0, None)),
    "gradient": lambda f: jax.grad(f, (0, 1)),
    "gradient of a batch": lambda f: jax.grad(lambda h, w: jax.vmap(f, (0, None))(h, w).sum(), (0, 1)),
    "batch of gradients": lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None)),
    "tangent": lambda f: lambda h, w: jax.jvp(f, (h, w), (h, w)),
    "Hessian": jax.hessian,
}


def free(h: Array, w: Array) -> Array:
    """A loop in a loop whose lanes do not wait for each other."""
    inner = lambda h: lx.while_loop(lambda h: (h * h).sum() > 0.1, lambda h: 0.9 * step(h, w), h)
    return lx.fori_loop(0, 3, lambda i, h: inner(h) + 1.0, h, lanes="free").sum()


def lanes_map(h: Array, w: Array) -> Array:
    """Items that take the lanes of those that are done."""
    return lx.lanes_map(lambda h: while_of()(h, w), h, num_lanes=8)


def trace_estimate(h: Array, w: Array) -> Array:
    """The trace of a product."""
    estimate = lx.stochtrace.estimate_trace(lambda v: w @ v, jax.random.key(0), num_matvecs=9, size=UNITS)
    return jnp.asarray(estimate.value) + 0 * h.sum()


def over_devices(mesh: Mesh, h: Array, w: Array) -> Any:
    """Lanes on four devices."""
    loss = while_of(lanes="compact", max_steps=STEPS)
    return lx.sharded_lanes(loss, mesh, "devices", in_axes=(0, None))(h, w)


def in_shards(mesh: Mesh, h: Array, w: Array) -> Any:
    """A loop whose steps communicate."""

    def shard(h: Array, w: Array) -> Array:
        body = lambda i, h: jax.vmap(step, (0, None))(h, w) + lax.pmean(h.mean(), "devices")
        return lx.fori_loop(0, STEPS, body, h).sum(keepdims=True)

    spec = PartitionSpec("devices")
    return jax.shard_map(shard, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)(h, w).sum()


def programs() -> Iterator[Program]:
    """All."""
    w = 0.1 * jax.random.normal(jax.random.key(1), (UNITS, UNITS))
    one, batch = jnp.linspace(0.5, 1.0, UNITS), jnp.linspace(0.5, 1.0, LANES * UNITS).reshape(LANES, UNITS)
    of = lambda order: (batch if "batch" in order else one, w)
    quick = {"gradient"}
    for name, loss in LOSSES.items():
        for order, make in ORDERS.items():
            yield Program(f"{name}: {order}", make(loss), of(order), is_quick=order in quick)
    for name, loss in LANES_OF.items():
        for order, make in ORDERS.items():
            if "batch" in order:
                yield Program(f"{name}: {order}", make(loss), of(order), is_quick=order == "gradient of a batch")
    for order in ("forward of a batch", "tangent"):
        yield Program(f"Free: {order}", ORDERS[order](free), of(order), is_quick=True)
    yield Program("lanes_map: forward", lanes_map, (batch, w), is_quick=True)
    for order in ("forward", "gradient"):
        yield Program(f"trace estimate: {order}", ORDERS[order](trace_estimate), (one, w), is_quick=True)
    for name, function in (("sharded_lanes", over_devices), ("shard_map", in_shards)):
        total = lambda mesh, h, w, f=function: f(mesh, h, w).sum()
        gradient = lambda mesh, h, w, f=total: jax.grad(partial(f, mesh), (0, 1))(h, w)
        yield Program(f"{name}: forward", function, (batch, w), on_mesh=True, is_quick=True)
        yield Program(f"{name}: gradient", gradient, (batch, w), on_mesh=True, is_quick=True)
