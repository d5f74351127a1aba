"""Ways to run a batch: masked steps, stages by default and others, one lane after another, and `lanes="auto"`."""

from collections.abc import Callable
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks import lanes
from benchmarks.groups import Findings, Group, Target
from benchmarks.measure import Case
from loopax._command import cores

Step = Callable[[Array], Array]
VMAPPED, LOCKSTEP, COMPACT = "vmapped lax.while_loop", "loopax lockstep", "loopax compact"
SEQUENTIAL, AUTO, VMAP = "loopax sequential", "loopax auto", "vmapped lax loops"
WAYS: dict[str, lx.Lanes] = {
    LOCKSTEP: lx.Lockstep(),
    COMPACT: lx.Compact(),
    SEQUENTIAL: lx.Sequential(),
    AUTO: lx.AutoLanes(),
}
STEPS = 1000
MEAN, MOST = 60, 120
LANES = 1024
GRID = [lx.Compact(shrink, size) for shrink in (2, 3, 4) for size in (4, 16, 32)]


def random(*shape: int, scale: float = 1.0) -> Array:
    return jnp.asarray(scale * np.random.RandomState(0).randn(*shape), jnp.float32)


# ---- bodies


def perceptron() -> Step:
    weights = lanes.weights()
    return lambda h: lanes.step(weights, h)


def gated() -> Step:
    """A gated recurrent unit of 32 states, without inputs."""
    gates = random(3, 32, 32, scale=0.15)

    def step(h: Array) -> Array:
        update, reset = jax.nn.sigmoid(gates[0] @ h), jax.nn.sigmoid(gates[1] @ h)
        return (1 - update) * h + update * jnp.tanh(gates[2] @ (reset * h))

    return step


def few_operations() -> Step:
    return lambda h: 0.99 * h + 0.01 * jnp.sin(h)


def layer() -> Step:
    weights = random(256, 256, scale=0.06)
    return lambda h: jnp.tanh(weights @ h)


def regression() -> Step:
    """A step of gradient descent on 1000 rows."""
    rows = random(1000, 25)
    return lambda h: h - 1e-3 * (jax.nn.sigmoid(rows @ h) @ rows)


def with_inner_loop() -> Step:
    step = perceptron()
    return lambda h: lx.while_loop(lambda c: c[0] < 3 + (c[1][0] > 0), lambda c: (c[0] + 1, step(c[1])), (0, h))[1]


BODIES: dict[str, tuple[Step, int]] = {
    "MLP 16-64-64-16": (perceptron(), 16),
    "GRU 32": (gated(), 32),
    "four operations": (few_operations(), 4),
}


def batch(step: Step, how: Any) -> Callable[..., Array]:
    """A batch of loops with counts of their own."""
    loop = lx.while_loop if how is not None else lax.while_loop
    options = {} if how is None else {"lanes": how}

    def lane(h: Array, n: Array) -> Array:
        return loop(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (jnp.int32(0), h), **options)[1]

    return jax.vmap(lane)


def exponential_counts(size: int) -> Array:
    return jnp.asarray(np.ceil(np.random.RandomState(2).exponential(MEAN, size)), jnp.int32)


def counts(name: str) -> Array:
    """Numbers of steps of 1024 lanes, 60 in the mean."""
    if name == "log-normal":
        return lanes.log_normal_counts(LANES)
    if name == "exponential":
        return exponential_counts(LANES)
    if name == "uniform":
        return jnp.asarray(np.random.RandomState(2).randint(1, MOST, LANES), jnp.int32)
    return jnp.full(LANES, MEAN, jnp.int32)


# ---- what masks cost


def masks() -> list[Group]:
    """Small batches in which a step is soon done."""
    found = []
    bodies = {"MLP 16-64-64-16": BODIES["MLP 16-64-64-16"], "two flops": (lambda h: 0.999 * h + 0.001, 1)}
    for body, (step, units) in bodies.items():
        for size in (8, 32, 64, 256):
            every = jnp.full(size, STEPS, jnp.int32)
            half = jnp.where(jnp.arange(size) % 2 == 0, every, 1)
            for which, n, bound in (("all", every, 1.15), ("half", half, 1.25)):
                cases = [
                    Case(name, batch(step, how), (jnp.ones((size, units)), n))
                    for name, how in ((LOCKSTEP, "lockstep"), (VMAPPED, None))
                ]
                title = f"Masks: {body}, {size} lanes, {which} active, n = {STEPS}"
                found.append(Group(title, cases, [Target("time", LOCKSTEP, VMAPPED, bound)], rounds=21))
    return found


# ---- stages


def stages() -> list[Group]:
    """The default beside a grid of others, forward."""
    bounds = {"log-normal": 1 / 8, "exponential": 1 / 5, "uniform": 0.65, "equal": 1.05}
    found = []
    for body, (step, units) in BODIES.items():
        for name, bound in bounds.items():
            programs = {COMPACT: "compact", **{repr(how): how for how in GRID}, LOCKSTEP: "lockstep", VMAPPED: None}
            start = random(LANES, units)
            cases = [Case(key, batch(step, how), (start, counts(name))) for key, how in programs.items()]
            targets = [
                Target("time", COMPACT, tuple(repr(how) for how in GRID), 1.08),
                Target("trace and compile", COMPACT, LOCKSTEP, 4, "compile_seconds"),
            ]
            if body == "MLP 16-64-64-16":
                targets.append(Target("time", COMPACT, VMAPPED, bound))
            found.append(Group(f"Stages: {body}, {name} counts, forward", cases, targets, rounds=15))
    return found


def gradients_after_stages() -> list[Group]:
    """Of shared weights, in groups of so many lanes: the default beside others."""
    grid = [lx.Compact(2, size) for size in (16, 32, 64, 128)]

    def gradient(how: lx.Lanes) -> Callable[..., Any]:
        def lane(weights: Any, h: Array, n: Array) -> Array:
            body = lambda c: (c[0] + 1, lanes.step(weights, c[1]))
            return lx.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), h), lanes=how, kind="checkpointed")[1]

        return jax.grad(lambda weights, hs, n: (jax.vmap(lane, (None, 0, 0))(weights, hs, n) ** 2).sum())

    ways = {COMPACT: lx.Compact(), **{repr(how): how for how in grid}}
    return [
        Group(
            f"Stages: MLP 16-64-64-16, {name} counts, gradient of shared weights",
            [Case(key, gradient(how), (lanes.weights(), random(LANES, 16), counts(name))) for key, how in ways.items()],
            [Target("time", COMPACT, tuple(repr(how) for how in grid), 1.1)],
            rounds=5,
        )
        for name in ("log-normal", "exponential", "uniform", "equal")
    ]


# ---- chains of NUTS


def chains() -> list[Group]:
    """Chains of a logistic regression with step sizes of their own."""
    rows, size = random(1000, 25), 32
    truth = jnp.linspace(-1.0, 1.0, 25)
    labels = (jax.random.uniform(jax.random.key(8), (1000,)) < jax.nn.sigmoid(rows @ truth)).astype(jnp.float32)

    def log_density(x: Array) -> Array:
        score = rows @ x
        return jnp.sum(labels * score - jnp.logaddexp(0.0, score)) - 0.5 * jnp.sum(x**2)

    def chain(key: Array, x: Array, step_size: Array) -> Array:
        nuts = blackjax.nuts(log_density, step_size=step_size, inverse_mass_matrix=jnp.ones(25))
        one = lambda state, key: (nuts.step(key, state)[0], None)
        start = nuts.init(x)  # pyright: ignore[reportCallIssue] - NUTS needs no key here
        last: Any = lax.scan(one, start, jax.random.split(key, 6))[0]
        return last.position

    programs = {VMAP: jax.vmap(chain)}
    programs |= {name: jax.vmap(lx.rewrite_loops(chain, lanes=how)) for name, how in WAYS.items()}
    step_sizes = jnp.asarray(np.geomspace(0.001, 0.1, size), jnp.float32)
    arguments = (jax.random.split(jax.random.key(0), size), random(size, 25, scale=0.1), step_sizes)
    targets = [
        Target("time", COMPACT, VMAP, 0.55),
        Target("time", SEQUENTIAL, VMAP, 0.4),
        Target("time", AUTO, (LOCKSTEP, COMPACT, SEQUENTIAL), 1.1),
    ]
    cases = [Case(name, program, arguments) for name, program in programs.items()]
    return [Group("32 chains of NUTS, 6 transitions", cases, targets, rounds=7)]


# ---- the choice among them


def choices() -> list[Group]:
    """Programs for which each of the ways is the best; numbers of steps are exponential."""
    programs = {
        "MLP 16-64-64-16, 1024 lanes": (*BODIES["MLP 16-64-64-16"], 1024),
        "GRU 32, 64 lanes": (*BODIES["GRU 32"], 64),
        "four operations, 1024 lanes": (*BODIES["four operations"], 1024),
        "layer of 256, 32 lanes": (layer(), 256, 32),
        "inner loop, 8 lanes": (with_inner_loop(), 16, 8),
        "regression of 1000 rows, 32 lanes": (regression(), 25, 32),
    }
    return [
        Group(
            f"Auto lanes: {title}",
            [
                Case(name, batch(step, how), (random(size, units), exponential_counts(size)))
                for name, how in WAYS.items()
            ],
            [Target("time", AUTO, (LOCKSTEP, COMPACT, SEQUENTIAL), 1.1)],
            rounds=11,
        )
        for title, (step, units, size) in programs.items()
    ]


# ---- cores


def over_cores() -> list[dict[str, Any]]:
    """Lanes on one CPU device and on two, in a process with two."""
    return [
        {
            "lanes": gain.lanes,
            "one device, ms": gain.alone * 1e3,
            "two devices, ms": gain.together * 1e3,
            "two / one": gain.together / gain.alone,
            "within the bound of 0.6": gain.together <= 0.6 * gain.alone,
        }
        for gain in cores.gains(2)
    ]


def tables() -> list[Findings]:
    remark = f"{cores.LANES} lanes of {cores.STEPS} steps of a layer with {cores.UNITS} units, by `sharded_lanes`."
    return [Findings("Lanes over two cores", over_cores, remark)]


def groups() -> list[Group]:
    return [*masks(), *stages(), *gradients_after_stages(), *chains(), *choices()]
