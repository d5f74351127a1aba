"""Random programs: a loop of a few operations on a state of any size, alone or in a batch, whose gradient is taken.

They judge what `Auto` foretells. Nothing is fitted on them but what a fit says it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import loopax as lx

Values = dict[str, Array]
Operation = Callable[[Array, Array, Values], Array]  # the state [rows, width], a row of the input [width], weights


def _normal(number: int, *shape: int, scale: float = 1.0) -> Array:
    return jnp.asarray(scale * np.random.RandomState(number).randn(*shape), jnp.float32)


def _gate(h: Array, x: Array, w: Values) -> Array:
    update = jax.nn.sigmoid(h @ w["a"] + x)
    return (1 - update) * h + update * jnp.tanh(h @ w["b"])


def _normalise(h: Array, x: Array, w: Values) -> Array:
    centred = h - h.mean(-1, keepdims=True)
    return h + 0.1 * centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 0.1)


def _runge_kutta(h: Array, x: Array, w: Values) -> Array:
    velocity = lambda h: jnp.sin(jnp.roll(h, 1, -1)) - 0.5 * h * h + w["c"]
    a = velocity(h)
    b = velocity(h + 0.005 * a)
    return h + 0.01 * velocity(h + 0.005 * b)


def _lookup(h: Array, x: Array, w: Values) -> Array:
    place = (jnp.abs(h[:, 0]) * 100).astype(jnp.int32) % w["table"].shape[0]
    return 0.9 * h + 0.1 * w["table"][place]


OPERATIONS: dict[str, Operation] = {
    "product": lambda h, x, w: h @ w["a"],
    "layer": lambda h, x, w: jnp.tanh(h @ w["a"] + w["c"]),
    "two layers": lambda h, x, w: h + 0.1 * jax.nn.silu(h @ w["up"]) @ w["down"],
    "gate": _gate,
    "logistic": lambda h, x, w: h + 0.01 * h * (1 - h) * w["c"],
    "tanh": lambda h, x, w: jnp.tanh(1.1 * h) + 0.1 * x,
    "exponentials": lambda h, x, w: jnp.exp(-h * h) + 0.5 * jnp.log1p(h * h),
    "sine": lambda h, x, w: jnp.sin(h + w["c"]) + 0.1 * h,
    "normalise": _normalise,
    "softmax": lambda h, x, w: h + jax.nn.softmax(h + x, -1),
    "neighbours": lambda h, x, w: h + 0.1 * (jnp.roll(h, 1, -1) + jnp.roll(h, -1, -1) - 2 * h) * w["c"],
    "sorted": lambda h, x, w: 0.5 * h + 0.1 * jnp.sort(h, -1),
    "table": _lookup,
    "Runge-Kutta": _runge_kutta,
    "input": lambda h, x, w: 0.9 * h + x * w["c"],
}
WITH_PRODUCTS = {"product", "layer", "two layers", "gate"}
ORDERS = ("alone", "alone", "alone", "gradient of lanes", "lanes of gradients", "ragged", "ragged", "compact")


@dataclass(frozen=True)
class Drawn:
    """A program of this number."""

    number: int
    order: str
    operations: tuple[str, ...]
    rows: int
    width: int
    steps: int
    lanes: int
    is_static: bool  # the number of steps is a constant
    returns_rows: bool

    @property
    def name(self) -> str:
        """What it does."""
        lanes = f", {self.order}: {self.lanes}" if self.lanes > 1 else ""
        steps = f"{self.steps}" if self.is_static else f"at most {self.steps}"
        return f"{self.number}: {', '.join(self.operations)}; {self.rows} x {self.width}, {steps} steps{lanes}"

    def weights(self) -> Values:
        """What the gradient is taken of."""
        d, wide, scale = self.width, 2 * self.width, 0.7 * self.width**-0.5
        made = {"c": _normal(2, d, scale=0.5)}
        if {*self.operations} & WITH_PRODUCTS:
            made |= {"a": _normal(0, d, d, scale=scale), "b": _normal(1, d, d, scale=scale)}
            made |= {"up": _normal(3, d, wide, scale=scale), "down": _normal(4, wide, d, scale=scale)}
        if "table" in self.operations:
            made["table"] = _normal(5, 1000, d)
        return made

    def lane(self, weights: Values, start: Array, inputs: Array, n: Array, kind: Any, lanes: Any) -> Array:
        """A loss of one lane."""

        def step(h: Array, x: Array) -> tuple[Array, Any]:
            for name in self.operations:
                h = OPERATIONS[name](h, x, weights)
            return h, h[0] if self.returns_rows else None

        length = None if self.is_static else n
        end, ys = lx.scan(step, start, inputs, length=length, throw=False, kind=kind, lanes=lanes)
        return (end**2).mean() + (0.0 if ys is None else (ys**2).mean())

    def gradient(self, kind: Any, lanes: Any = None) -> Callable[..., Any]:
        """The value and the gradient of the mean loss, with this kind and these lanes."""
        how = lanes or ("compact" if self.order == "compact" else "lockstep")
        lane = partial(self.lane, kind=kind, lanes=how)
        axes = (None, 0, 0, 0)
        if self.order == "alone":
            return jax.value_and_grad(lane)
        if self.order == "lanes of gradients":
            of_lanes = jax.vmap(jax.value_and_grad(lane), axes)
            return lambda *given: jax.tree.map(lambda x: x.mean(0), of_lanes(*given))
        return jax.value_and_grad(lambda *given: jax.vmap(lane, axes)(*given).mean())

    def arguments(self) -> tuple[Any, ...]:
        """Weights, starts, inputs and lengths."""
        of_lanes = () if self.order == "alone" else (self.lanes,)
        starts = _normal(6, *of_lanes, self.rows, self.width)
        inputs = _normal(7, *of_lanes, self.steps, self.width, scale=0.3)
        random = np.random.RandomState(self.number)
        share = random.exponential(0.25, of_lanes) if self.order in ("ragged", "compact") else np.full(of_lanes, 0.7)
        lengths = np.clip(np.ceil(share * self.steps), 1, self.steps)
        return self.weights(), starts, inputs, jnp.asarray(lengths, jnp.int32)


WORK = 3e6  # roughly the elements that all operations of a program compute, and the additions in products / 10


def drawn(number: int) -> Drawn:
    """The program of this number."""
    random = Random(number)
    order = random.choice(ORDERS)
    operations = tuple(random.choice(list(OPERATIONS)) for _ in range(random.choice([1, 1, 2, 2, 3, 4])))
    rows, width = random.choice([1, 1, 1, 4, 16, 64]), int(2 ** random.uniform(1, 9))
    lanes = 1 if order == "alone" else int(2 ** random.uniform(2, 8))
    of_lane = rows * width * (len(operations) + len({*operations} & WITH_PRODUCTS) * width / 10)
    steps = int(min(max(random.uniform(0.3, 2) * WORK / (of_lane * lanes), 10), 2000))
    is_static = order not in ("ragged", "compact") and random.random() < 0.7
    return Drawn(number, order, operations, rows, width, steps, lanes, is_static, random.random() < 0.3)
