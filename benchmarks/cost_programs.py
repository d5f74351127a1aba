"""Programs that the constants of the cost model are fitted on, and others that the choice of `Auto` is judged on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks import choices, workloads
from benchmarks.short.bodies import random
from benchmarks.workloads import Workload, runge_kutta

Loop = Callable[..., Array]


@dataclass(frozen=True)
class Program:
    """A program with one loop whose gradient is taken with a kind to be chosen."""

    name: str
    of_kind: Callable[[lx.Kind], Loop]
    arguments: tuple[Any, ...]
    differentiated: tuple[int, ...]

    def gradient(self, kind: lx.Kind) -> Callable[..., Any]:
        """The gradient with this kind."""
        return jax.grad(self.of_kind(kind), self.differentiated)


def of_workload(workload: Workload, static: bool = True) -> Program:
    """A recurrence; with `static`, its number of steps is a constant."""
    return Program(
        workload.name,
        lambda kind: workloads.with_loopax(workload, kind, static),
        workload.arguments,
        workload.differentiated,
    )


def steps(name: str, step: workloads.Step, parameters: Any, start: Array, n: int) -> Program:
    """So many steps without rows."""
    return of_workload(Workload(f"{name}, n = {n}", step, parameters, start, None, n, (0, 1)))


# ---- programs to fit on


def two_flops(lanes: int) -> Program:
    """Two floating-point operations in a batched while loop."""

    def of_kind(kind: lx.Kind) -> Loop:
        def lane(rate: Array, y: Array, n: Array) -> Array:
            loop = lx.while_loop(
                lambda state: state[1] < n,
                lambda state: (state[0] - rate * state[0] * state[0], state[1] + 1),
                (y, jnp.int32(0)),
                max_steps=5000,
                kind=kind,
            )
            return loop[0]

        return lambda rate, ys, ns: jax.vmap(lane, (None, 0, 0))(rate, ys, ns).sum()

    starts, counts = jnp.linspace(0.1, 0.9, lanes), jnp.full(lanes, 5000, jnp.int32)
    name = f"Two operations, {lanes} lanes, while_loop, n = 5000"
    return Program(name, of_kind, (jnp.float32(0.01), starts, counts), (0, 1))


def pendulum() -> Program:
    """A tiny differential equation."""
    field = lambda k, y: jnp.stack([y[1], -k * jnp.sin(y[0])])
    step = lambda k, y, _: runge_kutta(lambda y: field(k, y), y, 1e-2)
    return steps("Pendulum, RK4", step, jnp.float32(9.8), jnp.array([0.3, 0.0]), 10_000)


def predators() -> Program:
    """The Lotka-Volterra equations: a tiny differential equation with four parameters."""

    def field(p: Array, y: Array) -> Array:
        return jnp.stack([p[0] * y[0] - p[1] * y[0] * y[1], p[2] * y[0] * y[1] - p[3] * y[1]])

    step = lambda p, y, _: runge_kutta(lambda y: field(p, y), y, 1e-2)
    return steps("Lotka-Volterra, RK4", step, jnp.array([1.1, 0.4, 0.1, 0.4]), jnp.array([10.0, 5.0]), 10_000)


def logistic() -> Program:
    """A map of one number."""
    return steps("Logistic map", lambda r, y, _: r * y * (1 - y), jnp.float32(3.7), jnp.float32(0.3), 20_000)


def pendulums() -> Program:
    """Many pendulums, of elementwise functions."""
    field = lambda k, y: jnp.stack([y[1], -k * jnp.sin(y[0])])
    step = lambda k, y, _: runge_kutta(lambda y: field(k, y), y, 1e-2)
    return steps("4096 pendulums, RK4", step, jnp.float32(9.8), random(2, 4096), 500)


def rigid_bodies() -> Program:
    """Balls on a floor for 64 episodes: contacts are solved by an inner loop."""

    def contact(stiffness: Array, x: Array, v: Array) -> Array:
        relax = lambda f, _: (0.5 * f + 0.5 * jnp.maximum(0.0, -stiffness * (x + 0.01 * (v + 0.01 * f))), None)
        return lax.scan(relax, jnp.zeros_like(x), None, length=8)[0]

    def step(stiffness: Array, state: Array, _: None) -> Array:
        one = lambda s: jnp.stack([s[0] + 0.01 * s[1], 0.999 * s[1] + 0.01 * (contact(stiffness, *s) - 9.8)])
        return jax.vmap(one)(state)

    return steps("Balls with contacts, 64 x 2 x 12", step, jnp.float32(300.0), 1 + random(64, 2, 12, scale=0.1), 300)


def implicit_steps() -> Program:
    """Implicit Euler steps: Newton iterations until a tolerance, whose number is not known."""

    def step(k: Array, y: Array, _: None) -> Array:
        change = lambda k, y, z: (z - y + 0.05 * k * z**3) / (1 + 0.15 * k * z**2)
        constants = lax.stop_gradient((k, y))

        def newton(state: tuple[Array, Array]) -> tuple[Array, Array]:
            found = change(*constants, state[0])
            return state[0] - found, jnp.abs(found).max()

        z = lax.while_loop(lambda state: state[1] > 1e-5, newton, (constants[1], jnp.float32(1.0)))[0]
        return z - change(k, y, z)

    return steps("Implicit Euler with Newton, 256", step, jnp.float32(2.0), random(256), 1000)


def planets() -> Program:
    """Pairwise forces: intermediate values much larger than the state."""

    def field(g: Array, y: Array) -> Array:
        x, v = y
        apart = x[:, None] - x[None]
        near = ((apart**2).sum(-1) + 0.1) ** -1.5
        return jnp.stack([v, -g * (apart * near[..., None]).sum(1)])

    step = lambda g, y, _: y + 1e-3 * field(g, y + 5e-4 * field(g, y))
    return steps("64 bodies with pairwise forces", step, jnp.float32(1.0), random(2, 64, 3), 300)


def images() -> Program:
    """A convolutional network that refines images."""

    def step(kernels: list[Array], u: Array, _: None) -> Array:
        convolve = lambda u, kernel: lax.conv_general_dilated(
            u, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return u + 0.1 * convolve(jax.nn.relu(convolve(u, kernels[0])), kernels[1])

    kernels = [random(3, 3, 4, 16, scale=0.1), random(3, 3, 16, 4, scale=0.1)]
    return steps("Convolutions, 2 x 32 x 32 x 4", step, kernels, random(2, 32, 32, 4), 100)


def matrix_and_vector() -> Program:
    """A network of one sample: products of a matrix and a vector."""
    step = lambda w, h, _: jnp.tanh(w @ h)
    return steps("Recurrent, 256, one sample", step, random(256, 256, scale=0.06), random(256), 2000)


def training() -> Program:
    """Gradient descent, differentiated: the carry is the weights of a network."""
    inputs, targets = random(32, 16), random(32, 4)

    def step(rate: Array, flat: Array, _: None) -> Array:
        def loss(flat: Array) -> Array:
            a, b = flat[: 16 * 32].reshape(16, 32), flat[16 * 32 :].reshape(32, 4)
            return ((jnp.tanh(inputs @ a) @ b - targets) ** 2).mean()

        return flat - rate * jax.grad(loss)(flat)

    return steps("Training of 16-32-4", step, jnp.float32(0.1), random(16 * 32 + 32 * 4, scale=0.2), 500)


def wide_elementwise() -> Program:
    """Cheap elementwise operations on a large state."""
    step = lambda k, y, _: y + 0.01 * k * y * (1 - y) * (y - 0.3)
    return steps("Bistable, 65536", step, jnp.float32(2.0), random(65_536, scale=0.1), 300)


def special_functions() -> Program:
    """Functions that are slow on a CPU."""
    step = lambda k, y, _: jnp.arctan2(lax.erf(k * y), 1.0 + y**2) + jnp.log1p(jnp.abs(y)) ** 1.5
    return steps("erf, atan2, log1p, power, 1024", step, jnp.float32(0.7), random(1024), 500)


def normalised() -> Program:
    """Layers with a normalisation: reductions between products."""

    def step(weights: list[Array], h: Array, _: None) -> Array:
        centred = h - h.mean(-1, keepdims=True)
        scaled = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return h + jax.nn.silu(scaled @ weights[0]) @ weights[1]

    weights = [random(128, 256, scale=0.05), random(256, 128, scale=0.05)]
    return steps("Residual layers with normalisation, 16 x 128", step, weights, random(16, 128), 500)


def to_fit() -> list[Program]:
    """The programs whose times the constants explain."""
    named = [
        two_flops(64),
        two_flops(1024),
        pendulum(),
        predators(),
        logistic(),
        pendulums(),
        rigid_bodies(),
        implicit_steps(),
        planets(),
    ]
    named += [images(), matrix_and_vector(), training(), wide_elementwise(), special_functions(), normalised()]
    tiny = [of_workload(workloads.lorenz_indexed())]
    return [*map(of_workload, choices.programs()), *tiny, *named]


# ---- programs to judge on: nothing was fitted on them


def double_pendulum() -> Program:
    """A tiny differential equation with divisions."""

    def field(m: Array, y: Array) -> Array:
        a, b, u, v = y
        s, c = jnp.sin(a - b), jnp.cos(a - b)
        d = 1 + m * s**2
        du = (-m * s * (v**2 + u**2 * c) + 9.8 * (m * jnp.sin(b) * c - (1 + m) * jnp.sin(a))) / d
        dv = (s * ((1 + m) * u**2 + m * v**2 * c) + (1 + m) * 9.8 * (jnp.sin(a) * c - jnp.sin(b))) / d
        return jnp.stack([u, v, du, dv])

    step = lambda m, y, _: runge_kutta(lambda y: field(m, y), y, 1e-3)
    return steps("Double pendulum, RK4", step, jnp.float32(1.5), jnp.array([0.5, 0.7, 0.0, 0.0]), 5000)


def nerve() -> Program:
    """The FitzHugh-Nagumo equations on a cable."""

    def step(k: Array, y: Array, _: None) -> Array:
        v, w = y
        around = jnp.roll(v, 1) + jnp.roll(v, -1) - 2 * v
        return jnp.stack([v + 0.05 * (v - v**3 / 3 - w + k * around), w + 0.004 * (v + 0.7 - 0.8 * w)])

    return steps("FitzHugh-Nagumo, 1024 cells", step, jnp.float32(0.5), random(2, 1024), 2000)


def memory_cells() -> Program:
    """An LSTM over rows."""

    def step(weights: list[Array], state: Array, x: Array) -> Array:
        h, c = state
        i, f, g, o = jnp.split(x @ weights[0] + h @ weights[1], 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jnp.stack([jax.nn.sigmoid(o) * jnp.tanh(c), c])

    rows = jnp.asarray(np.random.RandomState(2).randn(600, 16, 64), jnp.float32)
    weights = [random(64, 256, scale=0.1), random(64, 256, scale=0.1)]
    name = "LSTM 64, batch 16, n = 600"
    return of_workload(Workload(name, step, weights, jnp.zeros((2, 16, 64)), rows, 600, (0, 1)))


def transport() -> Program:
    """Sinkhorn iterations between two clouds of points."""
    costs = ((random(200, 1, 2) - random(1, 160, 2)[:, ::-1]) ** 2).sum(-1)

    def step(sharpness: Array, g: Array, _: None) -> Array:
        scaled = -sharpness * costs
        f = -jax.nn.logsumexp(scaled + g[None], axis=1)
        return -jax.nn.logsumexp(scaled + f[:, None], axis=0)

    return steps("Sinkhorn, 200 x 160", step, jnp.float32(2.0), jnp.zeros(160), 100)


def ragged_descent() -> Program:
    """A batch of descents, each until its own gradient is small, at most 500 steps."""
    matrix = random(24, 24, scale=0.2)

    def of_kind(kind: lx.Kind) -> Loop:
        def lane(rate: Array, x: Array) -> Array:
            slope = lambda x: matrix.T @ jnp.tanh(matrix @ x) + 0.1 * x
            loop = lx.while_loop(
                lambda x: jnp.abs(slope(x)).max() > 1e-3,
                lambda x: x - rate * slope(x),
                x,
                max_steps=500,
                throw=False,
                kind=kind,
            )
            return (loop**2).sum()

        return lambda rate, xs: jax.vmap(lane, (None, 0))(rate, xs).sum()

    return Program("Ragged descents, 32 x 24, n <= 500", of_kind, (jnp.float32(0.3), random(32, 24)), (0, 1))


def automaton() -> Program:
    """A neural cellular automaton."""

    def step(weights: list[Array], u: Array, _: None) -> Array:
        around = jnp.concatenate([jnp.roll(u, shift, axis) for shift in (-1, 1) for axis in (0, 1)] + [u], -1)
        return u + 0.1 * jnp.tanh(around @ weights[0]) @ weights[1]

    weights = [random(40, 48, scale=0.2), random(48, 8, scale=0.1)]
    return steps("Neural cellular automaton, 48 x 48 x 8", step, weights, random(48, 48, 8), 100)


def kalman() -> Program:
    """A Kalman filter: small linear algebra."""
    observations = random(1000, 2)

    def step(noise: Array, state: Array, z: Array) -> Array:
        mean, cov = state[0], state[1:]
        motion = jnp.eye(4) + 0.1 * jnp.eye(4, k=2)
        mean, cov = motion @ mean, motion @ cov @ motion.T + noise * jnp.eye(4)
        gain = jnp.linalg.solve(cov[:2, :2] + jnp.eye(2), cov[:2]).T
        return jnp.concatenate([(mean + gain @ (z - mean[:2]))[None], cov - gain @ cov[:2]])

    start = jnp.concatenate([jnp.zeros((1, 4)), jnp.eye(4)])
    name = "Kalman filter, 4 states, n = 1000"
    return of_workload(Workload(name, step, jnp.float32(0.1), start, observations, 1000, (0, 1)))


def springs() -> Program:
    """Chains of masses on springs, a batch, with an inner loop of small steps."""

    def step(k: Array, y: Array, _: None) -> Array:
        def small(y: Array, _: None) -> tuple[Array, None]:
            x, v = y
            stretch = jnp.diff(x, axis=1)
            tension = k * stretch * (1 - 0.5 / jnp.sqrt(1 + stretch**2))
            force = jnp.pad(tension, ((0, 0), (0, 1))) - jnp.pad(tension, ((0, 0), (1, 0)))
            v = 0.999 * v + 0.01 * force
            return jnp.stack([x + 0.01 * v, v]), None

        return lax.scan(small, y, None, length=5)[0]

    return steps("Spring chains, 16 x 40, 5 small steps", step, jnp.float32(3.0), random(2, 16, 40), 400)


def unseen() -> list[Program]:
    """The eight programs to judge on."""
    return [double_pendulum(), nerve(), memory_cells(), transport(), ragged_descent(), automaton(), kalman(), springs()]
