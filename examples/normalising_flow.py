"""A continuous normalising flow: its log-density is an integral of traces, estimated in the loop of its solver.

A network says how fast a point moves at any time. Carried along for a unit of time, data become normally distributed,
and the logarithm of their density is the normal one's at the end plus the integral of the divergence on the way,
the trace of the network's Jacobian. Points and integral are computed together, in one `loopax.fori_loop` of Runge-Kutta
steps. In d dimensions a trace costs d products with the Jacobian; `loopax.stochtrace.estimate_trace` takes one to
train, and to evaluate as many as a tolerance asks for, a number of its own for each point and time.

`python examples/normalising_flow.py` trains on handwritten digits, once with exact and once with estimated traces, for
half a minute on two cores, prints what both cost and find, and draws `examples/normalising_flow.png`. It fails if
the estimate leads to a worse density, if memory grows with the number of products, or if errors exceed a tolerance.

The flow: W. Grathwohl, R. T. Q. Chen, J. Bettencourt, I. Sutskever and D. Duvenaud, "FFJORD: Free-form continuous
dynamics for scalable reversible generative models", ICLR (2019). The digits: E. Alpaydin and C. Kaynak, "Optical
recognition of handwritten digits", UCI Machine Learning Repository (1998), which come with scikit-learn.
"""

import math
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import loopax as lx
from loopax import stochtrace

FIGURE = Path(__file__).with_suffix(".png")

DIMENSIONS = 16  # principal components
UNKNOWN = 4  # a digit that the flow does not see
HIDDEN = 64
STEPS = 4  # of the solver, the classical Runge-Kutta method of order 4
STAGES = ((0.0, 1 / 6), (0.5, 1 / 3), (0.5, 1 / 3), (1.0, 1 / 6))  # when they are, and what they weigh
BATCH, UPDATES, UPDATES_PER_TEST = 128, 400, 20
LEARNING_RATE, DECAY = 1e-2, 0.3
SEED = 0
TOLERANCES = (1.0, 0.5, 0.25)  # nats
MOST_PRODUCTS = 4096

# What the example claims. In nats: what estimated traces may cost, and what a flow gains over a normal distribution.
# As ratios: the memory of 64 products over that of 16, and the errors within a tolerance over the tolerance.
COST, GAIN, GROWTH, ERROR = 0.5, 4.0, 1.2, 1.2

Point = Float[Array, " d"]
Points = Float[Any, "n d"]
Weights = list[tuple[Float[Array, "out in"], Float[Array, " out"]]]
Jacobian = Callable[[Point], Point]  # v -> J v
Counted = tuple[Float[Array, ""], Int[Array, ""]]  # a trace, and the products that it took
Trace = Callable[[Jacobian, Point, PRNGKeyArray], Counted]


# The flow ------------------------------------------------------------------------------------------------


def initial(key: PRNGKeyArray) -> Weights:
    """A network that moves nothing, so that the flow begins as the normal distribution."""
    sizes = (DIMENSIONS + 1, HIDDEN, HIDDEN, DIMENSIONS)
    scales = sizes[0] ** -0.5, sizes[1] ** -0.5, 0.0
    layers = zip(jax.random.split(key, 3), scales, sizes[1:], sizes[:-1], strict=True)
    return [(scale * jax.random.normal(key, (after, before)), jnp.zeros(after)) for key, scale, after, before in layers]


def velocity(weights: Weights, t: Float[Array, ""], x: Point) -> Point:
    *hidden, (matrix, shift) = weights
    units = jnp.append(x, t)
    for inward, bias in hidden:
        units = jnp.tanh(inward @ units + bias)
    return matrix @ units + shift


def exact(jacobian: Jacobian, x: Point, _: PRNGKeyArray) -> Counted:
    return jnp.trace(jax.vmap(jacobian)(jnp.eye(len(x), dtype=x.dtype))), jnp.int32(len(x))


def estimated(jacobian: Jacobian, x: Point, key: PRNGKeyArray, **options: Any) -> Counted:
    """With `num_matvecs=` products, or with `atol=` and at most `max_matvecs=`."""
    estimate = stochtrace.estimate_trace(jacobian, key, size=x, **options)
    return estimate.value, estimate.num_matvecs


class Flow(NamedTuple):
    """The carry of the solver: where a point has come to, and what is known of its way there."""

    x: Point
    gain: Float[Array, ""]  # the integral of the divergence
    products: Int[Array, ""]  # with the Jacobian, in all evaluations


class LogDensity(NamedTuple):
    """The logarithm of a density, in nats, and the mean number of products per evaluation."""

    value: Float[Array, "..."]
    products: Float[Array, "..."]


def log_density(weights: Weights, x: Point, key: PRNGKeyArray, trace: Trace) -> LogDensity:
    """Of one point. All evaluations have the same key and so the same probes: they are of one smooth function."""
    dt = 1 / STEPS

    def slopes(t: Float[Array, ""], x: Point) -> tuple[Point, Float[Array, ""], Int[Array, ""]]:
        speed, jacobian = jax.linearize(partial(velocity, weights, t), x)  # the network once, whatever the products
        return speed, *trace(jacobian, x, key)

    def step(i: Int[Array, ""], now: Flow) -> Flow:
        end, speed = now, jnp.zeros_like(now.x)
        for share, weight in STAGES:
            speed, divergence, products = slopes((i + share) * dt, now.x + share * dt * speed)
            end = Flow(end.x + weight * dt * speed, end.gain + weight * dt * divergence, end.products + products)
        return end

    end = lx.fori_loop(0, STEPS, step, Flow(x, jnp.zeros((), x.dtype), jnp.int32(0)))
    return LogDensity(normal_log_density(end.x) + end.gain, end.products / (STEPS * len(STAGES)))


def normal_log_density(x: Float[Any, "... d"]) -> Float[Any, "..."]:
    return -((x**2).sum(-1) + x.shape[-1] * math.log(2 * math.pi)) / 2


def log_densities(weights: Weights, xs: Points, key: PRNGKeyArray, trace: Trace) -> LogDensity:
    """Of many points, each with a key of its own."""
    of_point = partial(log_density, trace=trace)
    return jax.vmap(of_point, in_axes=(None, 0, 0))(weights, xs, jax.random.split(key, len(xs)))


@jax.jit
def exactly(weights: Weights, xs: Points, key: PRNGKeyArray) -> LogDensity:
    return log_densities(weights, xs, key, exact)


@jax.jit
def within(weights: Weights, xs: Points, key: PRNGKeyArray, atol: float | Float[Array, ""]) -> LogDensity:
    """With a standard error of at most `atol` in each trace and so, in a unit of time, in the log-density."""
    return log_densities(weights, xs, key, partial(estimated, atol=atol, max_matvecs=MOST_PRODUCTS, batch=16))


# Learning ------------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Images as points, whose coordinates are uncorrelated and of variance one in the training data."""

    train: Points
    test: Points
    unknown: Points  # of the digit that is in neither


def load() -> Digits:
    """The first principal components of the images, on a scale on which the normal distribution fits `train` best."""
    images, labels = load_digits(return_X_y=True)
    known = np.random.default_rng(SEED).permutation(images[labels != UNKNOWN])
    train, test = np.split(known, [len(known) * 3 // 4])
    mean = train.mean(axis=0)
    _, sizes, directions = np.linalg.svd(train - mean, full_matrices=False)
    whiten = directions[:DIMENSIONS].T / sizes[:DIMENSIONS] * np.sqrt(len(train))
    return Digits(*(((x - mean) @ whiten).astype(np.float32) for x in (train, test, images[labels == UNKNOWN])))


def loss(weights: Weights, xs: Points, key: PRNGKeyArray, trace: Trace) -> Float[Array, ""]:
    return -log_densities(weights, xs, key, trace).value.mean()


class Program(NamedTuple):
    """The compiled gradient of the loss, and what it costs."""

    gradient: Callable[[Weights, Points, PRNGKeyArray], Weights]
    milliseconds: float
    memory: float  # temporary, MiB


def compile_gradient(trace: Trace) -> Program:
    key = jax.random.key(SEED)
    arguments = initial(key), jnp.ones((BATCH, DIMENSIONS)), key
    gradient = jax.jit(jax.grad(partial(loss, trace=trace))).lower(*arguments).compile()
    analysis: Any = gradient.memory_analysis()
    return Program(gradient, milliseconds(lambda: gradient(*arguments)), analysis.temp_size_in_bytes / 2**20)


def milliseconds(program: Callable[[], Any], times: int = 5) -> float:
    """The median of some evaluations, after one that is not counted."""
    seconds = timeit.repeat(lambda: jax.block_until_ready(program()), number=1, repeat=times + 1)
    return 1e3 * float(np.median(seconds[1:]))


def train(program: Program, data: Digits) -> tuple[Weights, Float[np.ndarray, " tests"]]:
    """The weights, and how dense the test data were on the way to them: the mean of the exact log-densities."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, UPDATES), weight_decay=DECAY)
    key, weights, curve = jax.random.key(SEED), initial(jax.random.key(SEED)), []
    memory, random = optimizer.init(weights), np.random.default_rng(SEED)

    @jax.jit
    def descend(weights: Weights, gradient: Weights, memory: Any) -> tuple[Weights, Any]:
        changes, memory = optimizer.update(gradient, memory, weights)
        return jax.tree.map(jnp.add, weights, changes), memory

    for number in range(1, UPDATES + 1):
        xs = jnp.asarray(data.train[random.integers(len(data.train), size=BATCH)])
        gradient = program.gradient(weights, xs, jax.random.fold_in(key, number))
        weights, memory = descend(weights, gradient, memory)
        if number % UPDATES_PER_TEST == 0:
            curve.append(exactly(weights, data.test, key).value.mean())
    return weights, np.array(curve)


# The results ---------------------------------------------------------------------------------------------


def separation(known: Float[Any, " m"], unknown: Float[Any, " k"]) -> float:
    """How often a digit that the flow knows is denser than an unknown one (the area under the ROC curve)."""
    is_known = np.repeat([True, False], [len(known), len(unknown)])
    return float(roc_auc_score(is_known, np.concatenate([known, unknown])))


class Evaluation(NamedTuple):
    """Log-densities of the test data and the unknown digit within a tolerance."""

    errors: Float[np.ndarray, " n"]  # estimated less exact
    products: Float[np.ndarray, " n"]  # per evaluation
    separation: float
    milliseconds: float

    @property
    def error(self) -> float:
        """Root mean square."""
        return float(np.sqrt(np.mean(self.errors**2)))


def evaluate(weights: Weights, data: Digits, atol: float | None) -> Evaluation:
    """Without a tolerance: exactly."""
    xs = np.concatenate([data.test, data.unknown])
    arguments = weights, xs, jax.random.key(SEED)
    program = partial(exactly, *arguments) if atol is None else partial(within, *arguments, atol)
    values, products = jax.device_get(program())
    errors = values - exactly(*arguments).value
    apart = separation(*np.split(values, [len(data.test)]))
    return Evaluation(errors, products, apart, milliseconds(program, times=1))


def print_training(programs: dict[str, Program], curves: dict[str, Any], normal: float) -> None:
    title = f"Training in {DIMENSIONS} dimensions, n products per trace"
    table = Table("traces", "gradient, ms", "memory, MiB", "test log-density", title=title)
    for name, program in programs.items():
        found = f"{curves[name][-1]:.2f}" if name in curves else ""
        table.add_row(name, f"{program.milliseconds:.1f}", f"{program.memory:.1f}", found)
    table.add_row("(normal distribution)", "", "", f"{normal:.2f}")
    Console().print(table)


def print_evaluations(found: dict[float | None, Evaluation]) -> None:
    title, caption = (
        "Evaluation within a tolerance, in nats",
        f"Separation: how often digits are denser than a {UNKNOWN}",
    )
    columns = "tolerance", "rms error", "products", "of a point", "separation", "ms"
    table = Table(*columns, title=title, caption=caption)
    for atol, e in found.items():
        products = f"{e.products.mean():.0f}", f"{e.products.min():.0f} to {e.products.max():.0f}"
        name = f"{atol or '(exact)'}"
        table.add_row(name, f"{e.error:.2f}", *products, f"{e.separation:.3f}", f"{e.milliseconds:.0f}")
    Console().print(table)


def draw(curves: dict[str, Any], found: dict[float | None, Evaluation], weights: Weights, data: Digits) -> Figure:
    """How training went, what tolerances cost, and how dense known and unknown digits are."""
    figure = Figure(figsize=(5, 7.4), layout="constrained", dpi=150)
    learning, products, densities = figure.subplots(3, 1)
    for (name, curve), color in zip(curves.items(), ["gray", "C0"], strict=True):
        learning.plot(UPDATES_PER_TEST * np.arange(1, len(curve) + 1), curve, color=color, label=name)
    learning.axhline(normal_log_density(data.test).mean(), color="k", ls=":", lw=1, label="normal distribution")
    learning.set(title="Log-density of test data", xlabel="update", ylabel="nats")
    learning.legend(frameon=False)
    draw_products(products, found)
    for xs, name in [(data.test, "digits that it has seen"), (data.unknown, f"the digit {UNKNOWN}, unseen")]:
        densities.hist(exactly(weights, xs, jax.random.key(SEED)).value, 25, density=True, alpha=0.6, label=name)
    densities.set(title="What the flow has seen and what not", xlabel="log-density, nats", yticks=[])
    densities.margins(y=0.25)
    densities.legend(frameon=False, loc="upper left")
    return figure


def draw_products(axes: Axes, found: dict[float | None, Evaluation]) -> None:
    for atol, evaluation in found.items():
        if atol is not None:
            axes.plot(evaluation.products, evaluation.errors, ".", ms=3, alpha=0.6, label=f"{atol}")
    axes.axvline(DIMENSIONS, color="k", ls=":", lw=1, label="exact")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(title="Points within a tolerance", xlabel="products per evaluation", ylabel="error, nats")
    axes.margins(y=0.2)
    axes.legend(title="tolerance, nats", loc="upper right", markerscale=3, ncols=4, frameon=False)


def main() -> None:
    """Train, evaluate, draw."""
    data = load()
    normal = float(normal_log_density(data.test).mean())
    traces = {"exact": exact, **{f"estimated, n = {n}": partial(estimated, num_matvecs=n) for n in (1, 16, 64)}}
    programs = {name: compile_gradient(trace) for name, trace in traces.items()}
    first, one, some, most = programs
    (_, from_exact), (weights, from_one) = train(programs[first], data), train(programs[one], data)
    curves = {first: from_exact, one: from_one}
    print_training(programs, curves, normal)
    found = {atol: evaluate(weights, data, atol) for atol in (None, *TOLERANCES)}
    print_evaluations(found)
    draw(curves, found, weights, data).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    assert from_one[-1] > max(from_exact[-1] - COST, normal + GAIN)
    assert programs[most].memory < GROWTH * programs[some].memory
    assert all(found[atol].error < ERROR * atol for atol in TOLERANCES)


if __name__ == "__main__":
    main()
