"""Ten batches whose lanes take different numbers of steps, as people write them: by them, defaults are judged."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks.everyday import normal

Options = dict[str, Any]  # `kind` and `lanes` of a loop


@dataclass(frozen=True)
class Batch:
    """A loss of one lane: `lane(shared, *own, **options)`. The gradient is with respect to what lanes share."""

    lane: Callable[..., Array]
    shared: Any
    own: tuple[Any, ...]

    def value(self, **options: Any) -> Callable[..., Any]:
        """Of all lanes."""
        lane = partial(self.lane, **options)
        return lambda shared, *own: jax.vmap(lambda *own: lane(shared, *own))(*own).sum()

    def gradient(self, order: str = "gradient of lanes", **options: Any) -> Callable[..., Any]:
        """In one of the two orders of batch and gradient; the gradient is that of the sum over lanes."""
        if order == "gradient of lanes":
            return jax.value_and_grad(self.value(**options))
        lane = partial(self.lane, **options)

        def of_lanes(shared: Any, *own: Any) -> Any:
            found = jax.vmap(lambda *own: jax.value_and_grad(lane)(shared, *own))(*own)
            return jax.tree.map(lambda x: x.sum(0), found)

        return of_lanes

    @property
    def num_lanes(self) -> int:
        """How many lanes it has."""
        return len(jax.tree.leaves(self.own)[0])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of these functions."""
        return (self.shared, *self.own)


def log_normal(lanes: int, mean: float, most: int, sigma: float = 1.0, seed: int = 0) -> Array:
    """Numbers of steps."""
    counts = np.random.RandomState(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, lanes)
    return jnp.asarray(np.clip(np.ceil(counts), 1, most), jnp.int32)


def exponential(lanes: int, mean: float, most: int, seed: int = 0) -> Array:
    """Numbers of steps."""
    return jnp.asarray(np.clip(np.ceil(np.random.RandomState(seed).exponential(mean, lanes)), 1, most), jnp.int32)


def sequences(hidden: int, lanes: int, most: int, mean: float) -> Batch:
    """A GRU over sequences of their own lengths."""

    def lane(w: Any, xs: Array, n: Array, **options: Any) -> Array:
        def step(h: Array, x: Array) -> Any:
            both = jnp.concatenate([x, h])
            z, r = jax.nn.sigmoid(both @ w["z"]), jax.nn.sigmoid(both @ w["r"])
            return (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h]) @ w["h"]), None

        return (lx.scan(step, jnp.zeros(hidden), xs, length=n, throw=False, **options)[0] ** 2).sum()

    weights = {name: normal(16 + hidden, hidden, scale=0.2, seed=i) for i, name in enumerate("zrh")}
    return Batch(lane, weights, (normal(lanes, most, 16), log_normal(lanes, mean, most)))


def stiff(lanes: int = 64) -> Batch:
    """Implicit steps of a stiff equation, each by three steps of Newton's method; lanes need different numbers."""

    def lane(p: Array, y: Array, rate: Array, **options: Any) -> Array:
        velocity = lambda y: -rate * (y - jnp.cos(p[0] * y)) + p[1] * jnp.roll(y, 1)

        def goes_on(c: Any) -> Any:
            return c[0] < 1.0

        def step(c: Any) -> Any:
            t, y, h = c
            new = y
            for _ in range(3):
                matrix = jnp.eye(4) - h * jax.jacobian(velocity)(new)
                new = new - jnp.linalg.solve(matrix, new - y - h * velocity(new))
            change = jnp.max(jnp.abs(new - y))
            return t + h, new, lax.stop_gradient(jnp.clip(h * 0.02 / (change + 1e-6), 0.5 * h, 1.5 * h) + 2e-5)

        start = (jnp.float32(0), y, jnp.float32(1e-3) / rate)
        return (lx.while_loop(goes_on, step, start, max_steps=1000, throw=False, **options)[1] ** 2).sum()

    rates = jnp.asarray(np.random.RandomState(0).lognormal(1.5, 1.0, lanes), jnp.float32)
    return Batch(lane, jnp.array([1.3, 0.2], jnp.float32), (normal(lanes, 4), rates))


def adaptive(lanes: int = 128) -> Batch:
    """A neural ODE with steps of its own size."""

    def lane(w: Any, y: Array, end: Array, **options: Any) -> Array:
        velocity = lambda y: jnp.tanh(y @ w["in"]) @ w["out"]

        def step(c: Any) -> Any:
            t, y, h = c
            a = velocity(y)
            b = velocity(y + 0.5 * h * a)
            error = lax.stop_gradient(jnp.max(jnp.abs(a - b))) * h
            fits, last = error < 0.02, end - t
            t, y = jnp.where(fits, t + h, t), jnp.where(fits, y + h * b, y)
            return t, y, jnp.minimum(h * jnp.clip(0.9 * jnp.sqrt(0.02 / (error + 1e-6)), 0.3, 2.0), last + 1e-3)

        start = (jnp.float32(0), y, jnp.float32(0.01))
        return (lx.while_loop(lambda c: c[0] < end, step, start, max_steps=300, throw=False, **options)[1] ** 2).sum()

    ends = jnp.asarray(np.random.RandomState(1).exponential(3.0, lanes), jnp.float32)
    return Batch(lane, {"in": normal(8, 64, scale=0.5), "out": normal(64, 8, scale=0.5)}, (normal(lanes, 8), ends))


def logistic(lanes: int = 1024) -> Batch:
    """Two operations a step."""
    body = lambda r: lambda _, y: y + r * y * (1 - y)

    def lane(r: Array, y: Array, n: Array, **options: Any) -> Array:
        return lx.fori_loop(0, n, body(r), y, max_steps=1000, throw=False, **options)

    starts = jnp.linspace(0.1, 0.9, lanes, dtype=jnp.float32)
    return Batch(lane, jnp.float32(0.01), (starts, exponential(lanes, 100, 1000)))


def refinement(lanes: int = 128) -> Batch:
    """A network that refines its output until this changes little."""

    def lane(w: Array, x: Array, few: Array, **options: Any) -> Array:
        def goes_on(c: Any) -> Any:
            return c[1] > few

        def step(c: Any) -> Any:
            new = 0.5 * c[0] + 0.5 * jnp.tanh(c[0] @ w + x)
            return new, lax.stop_gradient(jnp.abs(new - c[0]).max())

        start = (jnp.zeros(64), jnp.float32(1))
        return (lx.while_loop(goes_on, step, start, max_steps=60, throw=False, **options)[0] ** 2).sum()

    few = jnp.asarray(10.0 ** -np.random.RandomState(2).uniform(0.5, 6, lanes), jnp.float32)
    return Batch(lane, normal(64, 64, scale=0.06), (normal(lanes, 64), few))


def table(lanes: int = 64) -> Batch:
    """Elementwise functions of a state of 64, row by row of what all lanes share."""

    def lane(rows: Array, y: Array, n: Array, **options: Any) -> Array:
        body = lambda i, y: jnp.sin(rows[i] * y) + 0.5 * y
        return (lx.fori_loop(0, n, body, y, max_steps=400, throw=False, **options) ** 2).sum()

    return Batch(lane, normal(400, 64), (normal(lanes, 64), log_normal(lanes, 60, 400)))


def forward_algorithm(lanes: int = 64) -> Batch:
    """Of a hidden Markov model with 16 states."""

    def lane(logits: Array, emissions: Array, n: Array, **options: Any) -> Array:
        moves = jax.nn.log_softmax(logits)
        step = lambda a, e: (jax.nn.logsumexp(a[:, None] + moves, 0) + e, None)
        return jax.nn.logsumexp(lx.scan(step, jnp.zeros(16), emissions, length=n, throw=False, **options)[0])

    return Batch(lane, normal(16, 16), (normal(lanes, 200, 16), exponential(lanes, 50, 200)))


def convolutions(lanes: int = 16) -> Batch:
    """Images that are smoothed so many times."""

    def lane(kernel: Array, image: Array, n: Array, **options: Any) -> Array:
        def body(_: Any, u: Array) -> Array:
            return jnp.tanh(u + 0.3 * lax.conv(u[None], kernel, (1, 1), "SAME")[0])

        return (lx.fori_loop(0, n, body, image, max_steps=40, throw=False, **options) ** 2).sum()

    counts = jnp.asarray(np.random.RandomState(3).randint(1, 41, lanes), jnp.int32)
    return Batch(lane, normal(4, 4, 3, 3, scale=0.2), (normal(lanes, 4, 24, 24), counts))


def pendulums(lanes: int = 256) -> Batch:
    """Each until it has swung far enough."""

    def lane(k: Array, y: Array, far: Array, **options: Any) -> Array:
        velocity = lambda y: jnp.stack([y[1], -k * jnp.sin(y[0])])

        def step(c: Any) -> Any:
            y, way = c
            a = velocity(y)
            b = velocity(y + 0.01 * a)
            return y + 0.02 * b, way + lax.stop_gradient(0.02 * jnp.abs(y[1]))

        start = (y, jnp.float32(0))
        return lx.while_loop(lambda c: c[1] < far, step, start, max_steps=2000, throw=False, **options)[0].sum()

    far = jnp.asarray(np.random.RandomState(4).exponential(2.0, lanes), jnp.float32)
    return Batch(lane, jnp.float32(4.0), (normal(lanes, 2), far))


BATCHES: dict[str, Callable[[], Batch]] = {
    "GRU 64, 256 sequences": lambda: sequences(64, 256, 400, 49),
    "GRU 16, 32 sequences": lambda: sequences(16, 32, 200, 40),
    "64 stiff equations by Newton": stiff,
    "128 neural ODEs with adaptive steps": adaptive,
    "1024 logistic maps": logistic,
    "128 networks that refine": refinement,
    "64 elementwise, rows of a table": table,
    "64 forward algorithms": forward_algorithm,
    "16 images, convolutions": convolutions,
    "256 pendulums": pendulums,
}
