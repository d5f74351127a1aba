"""Scans as people write them, with `lx.scan` in place of `lax.scan` and nothing named: the gradient beside `lax`.

The first twenty are those by which defaults are judged. The other ten are for the choice of `Auto` alone.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks.groups import Findings
from benchmarks.measure import Case, measure

Scan = Callable[..., tuple[Any, Any]]
# Of a scan: a loss, whose gradient with respect to the first argument is taken.
Program = Callable[[Scan], Callable[..., Array]]
ROUNDS = 9


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    """Random numbers, the same in every run."""
    return jnp.asarray(scale * np.random.RandomState(seed).randn(*shape), jnp.float32)


def whole(*shape: int, below: int, seed: int = 0) -> Array:
    """Random whole numbers."""
    return jnp.asarray(np.random.RandomState(seed).randint(0, below, shape), jnp.int32)


def lstm(scan: Scan) -> Callable[..., Array]:
    def loss(weights: Array, xs: Array) -> Array:
        def step(state: Any, x: Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ weights, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((xs.shape[1], weights.shape[1] // 4))
        return (scan(step, (start, start), xs)[1] ** 2).mean()

    return loss


def transformer(scan: Scan) -> Callable[..., Array]:
    """Its layers are the rows."""

    def loss(layers: dict[str, Array], x: Array) -> Array:
        def layer(x: Array, w: dict[str, Array]) -> Any:
            y = x - x.mean(-1, keepdims=True)
            q, k, v = (y @ w[name] for name in "qkv")
            x = x + jax.nn.softmax(q @ k.T / 8) @ v
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        return (scan(layer, x, layers)[0] ** 2).mean()

    return loss


def embedding(scan: Scan) -> Callable[..., Array]:
    def loss(weights: dict[str, Array], tokens: Array) -> Array:
        def step(h: Array, token: Array) -> Any:
            h = jnp.tanh(weights["table"][token] + h @ weights["w"])
            return h, h @ weights["out"]

        return (scan(step, jnp.zeros(64), tokens)[1] ** 2).mean()

    return loss


def forward_algorithm(scan: Scan) -> Callable[..., Array]:
    def loss(logits: Array, emissions: Array) -> Array:
        moves = jax.nn.log_softmax(logits)
        step = lambda a, e: (jax.nn.logsumexp(a[:, None] + moves, 0) + e, None)
        return jax.nn.logsumexp(scan(step, jnp.zeros(moves.shape[0]), emissions)[0])

    return loss


def kalman(scan: Scan) -> Callable[..., Array]:
    def loss(a: Array, ys: Array) -> Array:
        h, eye = jnp.eye(2, a.shape[0]), jnp.eye(a.shape[0])

        def step(state: Any, y: Array) -> Any:
            m, p = state
            m, p = a @ m, a @ p @ a.T + 0.1 * eye
            s = h @ p @ h.T + 0.1 * jnp.eye(2)
            gain = jnp.linalg.solve(s, h @ p).T
            error = y - h @ m
            return (m + gain @ error, (eye - gain @ h) @ p), error @ jnp.linalg.solve(s, error)

        return scan(step, (jnp.zeros(a.shape[0]), eye), ys)[1].mean()

    return loss


def laplace(u: Array) -> Array:
    return sum((jnp.roll(u, by, axis) for by in (1, -1) for axis in (0, 1)), -4 * u)


def heat(scan: Scan) -> Callable[..., Array]:
    step = lambda k: lambda u, _: (u + 0.2 * k * laplace(u), None)
    return lambda k, u: (scan(step(k), u, None, length=200)[0] ** 2).mean()


def wave(scan: Scan) -> Callable[..., Array]:
    def loss(speed: Array, u: Array) -> Array:
        step = lambda s, _: ((2 * s[0] - s[1] + 0.1 * speed**2 * laplace(s[0]), s[0]), s[0][5, 5])
        return (scan(step, (u, u), None, length=300)[1] ** 2).mean()

    return loss


def convolutions(scan: Scan) -> Callable[..., Array]:
    def loss(kernel: Array, x: Array) -> Array:
        step = lambda h, _: (jnp.tanh(lax.conv(h, kernel, (1, 1), "SAME") + x), None)
        return (scan(step, x, None, length=20)[0] ** 2).mean()

    return loss


def sinkhorn(scan: Scan) -> Callable[..., Array]:
    def loss(costs: Array) -> Array:
        def step(f: Any, _: None) -> Any:
            f, g = f
            f = -jax.nn.logsumexp(g[None] - costs, 1)
            return (f, -jax.nn.logsumexp(f[:, None] - costs, 0)), None

        f, g = scan(step, (jnp.zeros(costs.shape[0]), jnp.zeros(costs.shape[1])), None, length=100)[0]
        return (jnp.exp(f[:, None] + g - costs) * costs).sum()

    return loss


def conjugate_gradients(scan: Scan) -> Callable[..., Array]:
    def loss(b: Array, matrix: Array) -> Array:
        def step(state: Any, _: None) -> Any:
            x, r, p, rr = state
            ap = matrix @ p
            alpha = rr / (p @ ap)
            x, r = x + alpha * p, r - alpha * ap
            new = r @ r
            return (x, r, r + new / rr * p, new), None

        return (scan(step, (0 * b, b, b, b @ b), None, length=10)[0][0] ** 2).sum()

    return loss


def selective(scan: Scan) -> Callable[..., Array]:
    """A state space of 16 numbers for each of 64 channels."""

    def loss(weights: dict[str, Array], xs: Array) -> Array:
        def step(h: Array, x: Array) -> Any:
            dt = jax.nn.softplus(x @ weights["dt"])[:, None]
            h = jnp.exp(-dt * jnp.exp(weights["a"])) * h + dt * x[:, None] * (x @ weights["b"])
            return h, h @ (x @ weights["c"])

        return (scan(step, jnp.zeros((64, 16)), xs)[1] ** 2).mean()

    return loss


def paths(scan: Scan) -> Callable[..., Array]:
    """A stochastic differential equation: 4096 paths."""

    def loss(p: Array, keys: Array) -> Array:
        def step(x: Array, key: Array) -> Any:
            return x + 0.01 * p[0] * (p[1] - x) + 0.1 * p[2] * jnp.sqrt(jnp.abs(x) + 0.1) * jax.random.normal(
                key, x.shape
            ), None

        return scan(step, jnp.ones(4096), keys)[0].mean()

    return loss


def edit_distance(scan: Scan) -> Callable[..., Array]:
    """Of two sequences of vectors, with soft minima: a scan in a scan."""

    def loss(xs: Array, ys: Array) -> Array:
        def row(above: Array, x: Array) -> Any:
            def cell(left: Array, pair: Any) -> Any:
                up, corner, y = pair
                cost = ((x - y) ** 2).sum()
                new = -jax.nn.logsumexp(-jnp.stack([left + 1, up + 1, corner + cost]))
                return new, new

            first = above[0] + 1
            _, rest = scan(cell, first, (above[1:], above[:-1], ys))
            return jnp.concatenate([first[None], rest]), None

        return scan(row, jnp.arange(1.0 + ys.shape[0]), xs)[0][-1]

    return loss


def controlled(scan: Scan) -> Callable[..., Array]:
    """A cart with a pole, pushed by a network."""

    def loss(weights: dict[str, Array], start: Array) -> Array:
        def step(s: Array, _: None) -> Any:
            force = (jnp.tanh(s @ weights["in"]) @ weights["out"])[0]
            x, v, angle, w = s
            swing = (9.8 * jnp.sin(angle) - jnp.cos(angle) * (force + 0.05 * w**2 * jnp.sin(angle))) / 0.7
            s = s + 0.02 * jnp.stack([v, force, w, swing])
            return s, x**2 + angle**2 + 0.01 * force**2

        return scan(step, start, None, length=300)[1].mean()

    return loss


def trajectory(scan: Scan) -> Callable[..., Array]:
    """It stands in the carry."""

    def loss(w: Array, x: Array) -> Array:
        step = lambda s, i: ((jnp.tanh(s[0] @ w), s[1].at[i].set(s[0])), None)
        return (scan(step, (x, jnp.zeros((1000, x.shape[0]))), jnp.arange(1000))[0][1] ** 2).mean()

    return loss


def lookup(scan: Scan) -> Callable[..., Array]:
    """Interpolation in a table of 200 000 numbers."""

    def loss(table: Array, xs: Array) -> Array:
        def step(y: Array, x: Array) -> Any:
            place = (0.5 + 0.5 * jnp.sin(x)) * (table.shape[0] - 2)
            i = place.astype(jnp.int32)
            part = place - i
            return 0.9 * y + (1 - part) * table[i] + part * table[i + 1], None

        return scan(step, jnp.float32(0), xs)[0]

    return loss


def leapfrogs(scan: Scan) -> Callable[..., Array]:
    def loss(scales: Array, q: Array) -> Array:
        force = jax.grad(lambda q: -0.5 * jnp.sum((q / scales) ** 2) - jnp.logaddexp(q, -q).sum())

        def step(state: Any, _: None) -> Any:
            q, p = state
            p = p + 0.05 * force(q)
            q = q + 0.1 * p
            return (q, p + 0.05 * force(q)), None

        return (scan(step, (q, jnp.cos(q)), None, length=200)[0][0] ** 2).mean()

    return loss


def viterbi(scan: Scan) -> Callable[..., Array]:
    def loss(scores: Array, emissions: Array) -> Array:
        def step(best: Array, e: Array) -> Any:
            candidates = best[:, None] + scores
            return candidates.max(0) + e, candidates.argmax(0)

        return scan(step, jnp.zeros(scores.shape[0]), emissions)[0].max()

    return loss


def odes(scan: Scan) -> Callable[..., Array]:
    """256 Lorenz systems by Runge-Kutta."""

    def loss(p: Array, start: Array) -> Array:
        def velocity(s: Array) -> Array:
            x, y, z = s
            return jnp.stack([p[0] * (y - x), x * (p[1] - z) - y, x * y - p[2] * z])

        def step(s: Array, _: None) -> Any:
            a = velocity(s)
            b = velocity(s + 0.005 * a)
            c = velocity(s + 0.005 * b)
            d = velocity(s + 0.01 * c)
            return s + 0.01 / 6 * (a + 2 * b + 2 * c + d), None

        return (scan(step, start, None, length=100)[0] ** 2).mean()

    return loss


def denoiser(scan: Scan) -> Callable[..., Array]:
    def loss(weights: dict[str, Array], noise: Array, target: Array) -> Array:
        def step(x: Array, t: Array) -> Any:
            h = jax.nn.silu(x @ weights["in"] + jnp.sin(t * weights["time"]))
            return x - 0.02 * (h @ weights["out"]), None

        return ((scan(step, noise, jnp.linspace(1.0, 0.0, 50))[0] - target) ** 2).mean()

    return loss


def gru(scan: Scan) -> Callable[..., Array]:
    def loss(weights: dict[str, Array], xs: Array) -> Array:
        def step(h: Array, x: Array) -> Any:
            both = jnp.concatenate([x, h])
            z, r = jax.nn.sigmoid(both @ weights["z"]), jax.nn.sigmoid(both @ weights["r"])
            return (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h]) @ weights["h"]), None

        return (scan(step, jnp.zeros(32), xs)[0] ** 2).sum()

    return loss


def reaction(scan: Scan) -> Callable[..., Array]:
    """Two substances on a plane."""

    def loss(p: Array, u: Array) -> Array:
        def step(s: Any, _: None) -> Any:
            u, v = s
            uvv = u * v * v
            return (u + 0.16 * laplace(u) - uvv + p[0] * (1 - u), v + 0.08 * laplace(v) + uvv - (p[0] + p[1]) * v), None

        return (scan(step, (u, 1 - u), None, length=200)[0][1] ** 2).mean()

    return loss


def smoothing(scan: Scan) -> Callable[..., Array]:
    def loss(p: Array, ys: Array) -> Array:
        def step(s: Any, y: Array) -> Any:
            level, trend = s
            new = p[0] * y + (1 - p[0]) * (level + trend)
            return (new, p[1] * (new - level) + (1 - p[1]) * trend), (y - level - trend) ** 2

        return scan(step, (ys[0], jnp.float32(0)), ys)[1].mean()

    return loss


def powers(scan: Scan) -> Callable[..., Array]:
    def loss(matrix: Array, x: Array) -> Array:
        step = lambda x, _: ((y := matrix @ x) / jnp.linalg.norm(y), None)
        x = scan(step, x, None, length=100)[0]
        return x @ matrix @ x

    return loss


def inner_adam(scan: Scan) -> Callable[..., Array]:
    """Steps of Adam, differentiated with respect to what it is trained on."""

    def loss(xs: Array, ys: Array) -> Array:
        gradient = jax.grad(lambda w: ((jnp.tanh(xs @ w) - ys) ** 2).mean())

        def step(s: Any, i: Array) -> Any:
            w, m, v = s
            g = gradient(w)
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            return (w - 0.05 * m / (1 - 0.9**i) / jnp.sqrt(v / (1 - 0.99**i) + 1e-8), m, v), None

        zeros = jnp.zeros(xs.shape[1])
        return ((xs @ scan(step, (zeros + 0.1, zeros, zeros), jnp.arange(1.0, 51.0))[0][0] - ys) ** 2).mean()

    return loss


def bodies(scan: Scan) -> Callable[..., Array]:
    def loss(masses: Array, start: Array) -> Array:
        def step(s: Any, _: None) -> Any:
            x, v = s
            apart = x[:, None] - x
            v = v - 0.01 * (masses[None, :, None] * apart / ((apart**2).sum(-1, keepdims=True) + 0.1) ** 1.5).sum(1)
            return (x + 0.01 * v, v), None

        return (scan(step, (start, 0 * start), None, length=100)[0][0] ** 2).mean()

    return loss


def attention(scan: Scan) -> Callable[..., Array]:
    """Over blocks of keys, with a running maximum."""

    def loss(q: Array, blocks: tuple[Array, Array]) -> Array:
        def step(s: Any, block: tuple[Array, Array]) -> Any:
            most, total, out = s
            scores = q @ block[0].T / 8
            new = jnp.maximum(most, scores.max(-1))
            scale, weights = jnp.exp(most - new), jnp.exp(scores - new[:, None])
            return (new, total * scale + weights.sum(-1), out * scale[:, None] + weights @ block[1]), None

        start = jnp.full(q.shape[0], -1e9), jnp.zeros(q.shape[0]), jnp.zeros_like(q)
        _, total, out = scan(step, start, blocks)[0]
        return ((out / total[:, None]) ** 2).mean()

    return loss


def ring(scan: Scan) -> Callable[..., Array]:
    """A delay equation, whose last thousand values stand in the carry."""

    def loss(p: Array, last: Array) -> Array:
        def step(last: Array, i: Array) -> Any:
            past, now = last[(i + 1) % last.shape[0]], last[i % last.shape[0]]
            new = now + 0.1 * (p[0] * past / (1 + past**2) - p[1] * now)
            return last.at[(i + 1) % last.shape[0]].set(new), new

        return (scan(step, last, jnp.arange(2000))[1] ** 2).mean()

    return loss


def annealing(scan: Scan) -> Callable[..., Array]:
    def loss(logits: Array, noise: Array) -> Array:
        def step(x: Array, given: Any) -> Any:
            i, u = given
            p = jax.nn.softmax((logits + jax.nn.softmax(x)) / (1 + 0.05 * i))
            return x + p * u, (p * x).sum()

        return scan(step, jnp.zeros_like(logits), (jnp.arange(200.0), noise))[1].mean()

    return loss


def predictor(scan: Scan) -> Callable[..., Array]:
    """A network that corrects its own output."""

    def loss(weights: dict[str, Array], x: Array) -> Array:
        def step(y: Array, _: None) -> Any:
            return y + 0.1 * jnp.tanh(jnp.tanh(jnp.concatenate([x, y], -1) @ weights["in"]) @ weights["out"]), None

        return (scan(step, jnp.zeros_like(x), None, length=30)[0] ** 2).mean()

    return loss


_SYMMETRIC = normal(64, 64, scale=0.1)
TWENTY: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "LSTM": (lstm, (normal(96, 256, scale=0.1), normal(100, 16, 32))),
    "layers of a transformer as rows": (
        transformer,
        (
            {
                **{name: normal(8, 64, 64, scale=0.1, seed=i) for i, name in enumerate("qkv")},
                "up": normal(8, 64, 256, scale=0.05),
                "down": normal(8, 256, 64, scale=0.05),
            },
            normal(64, 64),
        ),
    ),
    "recurrent net with an embedding": (
        embedding,
        (
            {"table": normal(50_000, 64), "w": normal(64, 64, scale=0.1), "out": normal(64, 32, scale=0.1)},
            whole(400, below=50_000),
        ),
    ),
    "forward algorithm": (forward_algorithm, (normal(16, 16), normal(300, 16))),
    "Kalman filter": (kalman, (0.9 * jnp.eye(4) + normal(4, 4, scale=0.02), normal(200, 2))),
    "heat equation": (heat, (jnp.float32(1), normal(64, 64))),
    "wave equation": (wave, (jnp.float32(1), normal(64, 64))),
    "convolutions": (convolutions, (normal(8, 8, 3, 3, scale=0.1), normal(2, 8, 24, 24))),
    "Sinkhorn": (sinkhorn, (normal(64, 64),)),
    "conjugate gradients": (conjugate_gradients, (normal(64), _SYMMETRIC @ _SYMMETRIC.T + jnp.eye(64))),
    "selective state space": (
        selective,
        (
            {
                "dt": normal(64, 64, scale=0.1),
                "a": normal(64, 16, scale=0.1),
                "b": normal(64, 16, scale=0.1),
                "c": normal(64, 16, scale=0.1),
            },
            normal(200, 64),
        ),
    ),
    "SDE of 4096 paths": (paths, (jnp.array([1.0, 1.0, 0.5]), jax.random.split(jax.random.key(0), 100))),
    "edit distance": (edit_distance, (normal(40, 4), normal(40, 4, seed=1))),
    "controlled rollout": (
        controlled,
        ({"in": normal(4, 32, scale=0.3), "out": normal(32, 1, scale=0.3)}, jnp.array([0.1, 0.0, 0.1, 0.0])),
    ),
    "trajectory in the carry": (trajectory, (normal(32, 32, scale=0.2), normal(32))),
    "table lookup": (lookup, (jnp.sin(1e-4 * jnp.arange(200_000.0)), normal(1000))),
    "leapfrogs of HMC": (leapfrogs, (1.0 + normal(100) ** 2, normal(100))),
    "Viterbi": (viterbi, (normal(16, 16), normal(300, 16))),
    "256 ODEs": (odes, (jnp.array([10.0, 28.0, 8 / 3]), normal(3, 256))),
    "denoiser": (
        denoiser,
        (
            {"in": normal(32, 128, scale=0.2), "time": normal(128), "out": normal(128, 32, scale=0.2)},
            normal(64, 32),
            normal(64, 32, seed=1),
        ),
    ),
}


TEN: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "GRU": (gru, ({name: normal(48, 32, scale=0.2, seed=i) for i, name in enumerate("zrh")}, normal(200, 16))),
    "reaction and diffusion": (reaction, (jnp.array([0.04, 0.06]), 0.5 + normal(48, 48, scale=0.1))),
    "exponential smoothing": (smoothing, (jnp.array([0.3, 0.1]), normal(1000))),
    "power iteration": (powers, (_SYMMETRIC + _SYMMETRIC.T, normal(64))),
    "steps of Adam": (inner_adam, (normal(128, 16), normal(128))),
    "64 bodies": (bodies, (jnp.ones(64), normal(64, 3))),
    "attention over blocks": (attention, (normal(128, 64), (normal(16, 128, 64), normal(16, 128, 64, seed=1)))),
    "delay equation": (ring, (jnp.array([0.2, 0.1]), normal(1000) ** 2)),
    "annealing": (annealing, (normal(100), normal(200, 100))),
    "network that corrects itself": (
        predictor,
        ({"in": normal(64, 64, scale=0.2), "out": normal(64, 32, scale=0.2)}, normal(16, 32)),
    ),
}


def default(step: Any, carry: Any, xs: Any, length: int | None = None, **options: Any) -> Any:
    """`lx.scan` of the arguments of `lax.scan`."""
    return lx.scan(step, carry, xs, length=length, **options)


def rows() -> list[dict[str, Any]]:
    """The gradient of each of the twenty, beside `lax.scan`, and the means."""
    found = []
    for name, (program, arguments) in TWENTY.items():
        scans = {"lax": lax.scan, "loopax": default}
        cases = [Case(of, jax.grad(program(scan)), arguments) for of, scan in scans.items()]
        of = measure(cases, ROUNDS)
        row = {"scan": name} | {f"{library}, ms": round(found.milliseconds, 3) for library, found in of.items()}
        row["time / lax"] = round(of["loopax"].milliseconds / of["lax"].milliseconds, 2)
        row["memory / lax"] = round(of["loopax"].temporary_mib / max(of["lax"].temporary_mib, 2**-10), 2)
        found.append(row)
    ratios = ("time / lax", "memory / lax")
    means = {name: round(prod(max(row[name], 0.01) for row in found) ** (1 / len(found)), 2) for name in ratios}
    return [*found, {"scan": "geometric mean", "lax, ms": "", "loopax, ms": "", **means}]


def choices() -> list[dict[str, Any]]:
    """What `Auto` takes, beside each kind: of the twenty, and of ten more."""
    kinds = {"Auto()": "auto", "Residuals()": "residuals", "Bounded()": "bounded", "Checkpointed()": "checkpointed"}
    found = []
    for name, (program, arguments) in (TWENTY | TEN).items():
        cases = [Case(of, jax.grad(program(partial(default, kind=kind))), arguments) for of, kind in kinds.items()]
        of = {kind: measured.milliseconds for kind, measured in measure(cases, ROUNDS).items()}
        auto = round(of["Auto()"] / min(list(of.values())[1:]), 2)
        found.append(
            {"scan": name} | {f"{kind}, ms": round(ms, 3) for kind, ms in of.items()} | {"Auto() / fastest": auto}
        )
    return found


def tables() -> list[Findings]:
    """The twenty, and the ten others."""
    remark = "Bounds: 0.85 of the time in the geometric mean and 1.25 at most, 0.4 of the memory."
    return [
        Findings("Everyday scans: the gradient by default beside lax.scan", rows, remark),
        Findings("Everyday scans: what Auto takes, the last ten unseen", choices),
    ]
