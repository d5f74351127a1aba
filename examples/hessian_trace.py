"""How sharp is the minimum that a network has found? The trace of its Hessian, as exactly as is asked for.

The trace of the Hessian of the training loss is the sum of its curvatures in all directions. The Hessian has as many
rows as the network has parameters, and nobody writes it down; but its product with a vector costs about as much as
two gradients, and `loopax.stochtrace.estimate_trace` takes as many products as it needs for the standard error that
is asked for. Here that is done along the training of a small classifier of handwritten digits, small enough to have
the exact trace beside it. And since an estimate has derivatives, a network can be trained to have a small one.

`python examples/hessian_trace.py` trains for half a minute on two cores, prints the traces and their errors, compares
the estimators at the same number of products, and draws `examples/hessian_trace.png`. It fails if the exact trace is
outside of a 99.99% interval of an estimate, or if a penalty on the trace does not make it smaller.

The digits are those that scikit-learn brings along (E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository).
The trace as a measure of sharpness: Z. Yao, A. Gholami, K. Keutzer and M. W. Mahoney, "PyHessian: neural networks
through the lens of the Hessian", IEEE Big Data (2020). As a penalty: Y. Liu, S. Yu and T. Lin, "Regularizing deep
neural networks with stochastic estimators of Hessian trace", arXiv:2208.05924 (2022).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import loopax as lx
from loopax import stochtrace

FIGURE = Path(__file__).with_suffix(".png")

HIDDEN = 32  # 2410 parameters
LEARNING_RATE = 3e-3
IMAGES = 64  # in a batch
EPOCH, EPOCHS = 14, 40  # steps, epochs
SEED = 0

LOOKS = (0, 1, 2, 3, 5, 8, 12, 16, 20, 30, 40)  # epochs after which the trace is estimated
RTOL, MAX_MATVECS = 0.05, 1024
ALMOST_CERTAIN = 0.9999  # level of the intervals that must have the exact trace in them

BUDGETS = (24, 48, 96, 192)  # products
REPEATS = 16  # with other probes

STRENGTHS = (0.0, 1e-3, 3e-3, 1e-2)  # of the penalty
PROBES = 4  # of the penalty, in each step
NETWORKS = 8  # that begin with other weights


# The network ---------------------------------------------------------------------------------------------


class Digits(NamedTuple):
    """Images of 8 x 8 pixels, and the digits that they show."""

    images: Float[Array, "images 64"]
    labels: Int[Array, " images"]


def load() -> tuple[Digits, Digits]:
    """Half of the images for training, half for the test."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.5, random_state=SEED, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


class Classifier(eqx.Module):
    """The log-odds of ten digits. Its leaves are arrays, so that it is a vector of its own parameters as well."""

    inward: eqx.nn.Linear
    outward: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        """Initialize the weights."""
        inward, outward = jax.random.split(key)
        self.inward = eqx.nn.Linear(64, HIDDEN, key=inward)
        self.outward = eqx.nn.Linear(HIDDEN, 10, key=outward)

    def __call__(self, images: Float[Array, "images 64"]) -> Float[Array, "images 10"]:
        """For all images."""
        return jax.vmap(lambda image: self.outward(jnp.tanh(self.inward(image))))(images)


def entropy(logits: Float[Array, "images 10"], digits: Digits) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits.labels).mean()


def loss(model: Classifier, digits: Digits) -> Float[Array, ""]:
    return entropy(model(digits.images), digits)


def accuracy(model: Classifier, digits: Digits) -> Float[Array, ""]:
    return (model(digits.images).argmax(axis=1) == digits.labels).mean()


# Its curvature -------------------------------------------------------------------------------------------

Product = Callable[[Classifier], Classifier]  # v -> A v; vectors are like the model
Curvature = Callable[[Classifier, Digits], Product]


def hessian(model: Classifier, digits: Digits) -> Product:
    """The Hessian of the loss at this model."""
    gradient = jax.grad(partial(loss, digits=digits))
    return lambda v: jax.jvp(gradient, (model,), (v,))[1]


def gauss_newton(model: Classifier, digits: Digits) -> Product:
    """The Hessian of the loss with the network linearized (Schraudolph 2002): positive semidefinite."""
    logits, pushforward = jax.linearize(lambda model: model(digits.images), model)
    pullback = jax.linear_transpose(pushforward, model)
    gradient = jax.grad(partial(entropy, digits=digits))
    return lambda v: pullback(jax.jvp(gradient, (logits,), (pushforward(v),))[1])[0]


def exact_trace(product: Product, model: Classifier) -> Float[Array, ""]:
    """From one product for each parameter, 64 of them together."""
    flat, unravel = ravel_pytree(model)

    def diagonal(i: Int[Array, ""]) -> Float[Array, ""]:
        return ravel_pytree(product(unravel(jnp.zeros_like(flat).at[i].set(1))))[0][i]

    return jax.lax.map(diagonal, jnp.arange(flat.size), batch_size=64).sum()


# Training ------------------------------------------------------------------------------------------------


def penalized_loss(
    model: Classifier, digits: Digits, key: PRNGKeyArray, strength: Any, curvature: Curvature
) -> Float[Array, ""]:
    """The loss, and a rough estimate of a trace: the gradient goes through both."""
    product = curvature(model, digits)
    trace = stochtrace.estimate_trace(product, key, num_matvecs=PROBES, batch=PROBES, size=model)
    return loss(model, digits) + strength * trace.value


def plain_loss(model: Classifier, digits: Digits, key: PRNGKeyArray) -> Float[Array, ""]:
    del key
    return loss(model, digits)


def train(digits: Digits, key: PRNGKeyArray, objective: Any) -> Classifier:
    """The models before training and after each epoch, stacked; `objective(model, digits, key)` is minimized."""
    model_key, key = jax.random.split(key)
    model, optimizer = Classifier(model_key), optax.adam(LEARNING_RATE)

    def step(state: Any, key: PRNGKeyArray) -> Any:
        model, memory = state
        choice_key, key = jax.random.split(key)
        chosen = jax.random.choice(choice_key, len(digits.labels), (IMAGES,), replace=False)
        batch = jax.tree.map(lambda rows: rows[chosen], digits)
        changes, memory = optimizer.update(jax.grad(objective)(model, batch, key), memory)
        model = eqx.apply_updates(model, changes)
        return (model, memory), model

    state = model, optimizer.init(eqx.filter(model, eqx.is_array))
    models = lx.rollout(step, state, EPOCH * EPOCHS, save_every=EPOCH, key=key).outputs
    return jax.tree.map(lambda first, rows: jnp.concatenate([first[None], rows]), model, models)


def after(epochs: int, models: Classifier) -> Classifier:
    return jax.tree.map(lambda rows: rows[epochs], models)


# Three questions -----------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What is known of the network after some epochs."""

    epoch: int
    loss: float
    accuracy: float  # on images that were not used in training
    exact: float
    estimate: stochtrace.TraceEstimate


def follow(models: dict[int, Classifier], digits: Digits, test: Digits) -> list[Look]:
    """How does the trace change while the network learns? The keys are epochs."""

    @jax.jit
    def look(model: Classifier, key: PRNGKeyArray) -> Any:
        product = hessian(model, digits)
        options = {"rtol": RTOL, "max_matvecs": MAX_MATVECS, "batch": 16, "size": model}
        estimate = stochtrace.estimate_trace(product, key, **options)
        return loss(model, digits), accuracy(model, test), exact_trace(product, model), estimate

    keys = jax.random.split(jax.random.key(SEED), len(models))
    return [
        Look(epoch, *jax.device_get(look(model, key))) for (epoch, model), key in zip(models.items(), keys, strict=True)
    ]


class Errors(NamedTuple):
    """Of an estimator, relative to the exact trace, for each number of products."""

    actual: tuple[float, ...]  # root mean square
    stated: tuple[float, ...]  # standard errors, root mean square


ESTIMATORS: dict[str, tuple[stochtrace.Estimator, Curvature]] = {
    "Hutchinson": (stochtrace.Hutchinson(), hessian),
    "HutchPlusPlus": (stochtrace.HutchPlusPlus(), hessian),
    "XTrace": (stochtrace.XTrace(), hessian),
    "XNysTrace, Gauss-Newton": (stochtrace.XNysTrace(positive_semidefinite=True), gauss_newton),
}


def compare(estimator: stochtrace.Estimator, curvature: Curvature, model: Classifier, digits: Digits) -> Errors:
    """How exact is an estimator? One compilation serves all numbers of products."""
    product = curvature(model, digits)
    options = {"max_matvecs": max(BUDGETS), "batch": 8, "size": model}

    exact, keys = exact_trace(product, model), jax.random.split(jax.random.key(SEED + 1), REPEATS)

    @jax.jit
    def errors(number: Int[Array, ""]) -> Any:
        def estimate(key: PRNGKeyArray) -> stochtrace.TraceEstimate:
            return stochtrace.estimate_trace(product, key, estimator=estimator, num_matvecs=number, **options)

        found = jax.lax.map(estimate, keys)  # one after another: a basis for each at once would take more memory
        return root_mean_square((found.value - exact) / exact), root_mean_square(found.std_error / exact)

    return Errors(*zip(*(jax.device_get(errors(number)) for number in map(jnp.int32, BUDGETS)), strict=True))


def root_mean_square(x: Float[Array, " repeats"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean(x**2))


PENALTIES = {"Hessian": hessian, "Gauss-Newton": gauss_newton}


class Flattened(NamedTuple):
    """Of networks that were trained with a penalty: a row for each strength, a column for each network."""

    loss: Float[Array, "strengths networks"]
    trace: Float[Array, "strengths networks"]  # of the Hessian, whatever the penalty
    accuracy: Float[Array, "strengths networks"]


def flatten(curvature: Curvature, digits: Digits, test: Digits) -> Flattened:
    """What comes of a penalty on the trace? All strengths and networks are lanes of one program."""

    def outcome(strength: Float[Array, ""], key: PRNGKeyArray) -> Flattened:
        models = train(digits, key, partial(penalized_loss, strength=strength, curvature=curvature))
        model = after(EPOCHS, models)
        estimate = stochtrace.estimate_trace(hessian(model, digits), key, num_matvecs=512, batch=16, size=model)
        return Flattened(loss(model, digits), estimate.value, accuracy(model, test))

    keys = jax.random.split(jax.random.key(SEED + 2), NETWORKS)
    lanes = jax.vmap(jax.vmap(outcome, (None, 0)), (0, None))
    return jax.device_get(jax.jit(lanes)(jnp.array(STRENGTHS), keys))


# The results ---------------------------------------------------------------------------------------------


def print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_results(looks: list[Look], errors: dict[str, Errors], flattened: dict[str, Flattened]) -> None:
    rows = [
        (f"{epoch}", f"{loss:.3f}", f"{accuracy:.1%}", f"{exact:.2f}", *texts(estimate))
        for epoch, loss, accuracy, exact, estimate in looks
    ]
    columns = "epoch", "loss", "accuracy", "exact", "estimate", "95% interval", "products"
    print_table("Test accuracy; exact trace of the Hessian, and its estimate", columns, rows)
    rows = [
        (name, *(f"{100 * a:.2f} ({100 * s:.2f})" for a, s in zip(*found, strict=True)))
        for name, found in errors.items()
    ]
    columns = "estimator", *map(str, BUDGETS)
    print_table("Errors in % by number of products, in brackets the stated ones", columns, rows)
    rows = [
        (name, f"{strength:g}", spread(loss, ".3f"), spread(trace, ".2f"), spread(accuracy, ".1%"))
        for name, found in flattened.items()
        for strength, loss, trace, accuracy in zip(STRENGTHS, *found, strict=True)
    ]
    columns = "penalty", "strength", "loss", "trace of the Hessian", "test accuracy"
    print_table(f"{NETWORKS} networks trained with a penalty on a trace, mean±standard deviation", columns, rows)


def texts(estimate: stochtrace.TraceEstimate) -> tuple[str, str, str]:
    low, high = estimate.interval(0.95)
    return f"{estimate.value:.2f}", f"{low:.2f}-{high:.2f}", f"{estimate.num_matvecs}"


def spread(values: Float[Array, " networks"], form: str) -> str:
    return f"{values.mean():{form}}±{values.std():{form}}"


def draw(looks: list[Look], errors: dict[str, Errors], flattened: dict[str, Flattened]) -> Figure:
    """The trace along the training, the errors of the estimators, and what the penalty does."""
    figure = Figure(figsize=(5, 9), layout="constrained", dpi=150)
    along, estimators, outcomes = figure.subplots(3, 1)
    draw_looks(along, looks)
    draw_errors(estimators, errors)
    draw_flattened(outcomes, flattened)
    return figure


def draw_looks(axes: Axes, looks: list[Look]) -> None:
    epochs, estimates = [look.epoch for look in looks], [look.estimate for look in looks]
    values = np.array([estimate.value for estimate in estimates])
    lows, highs = np.transpose([estimate.interval() for estimate in estimates])
    axes.plot(epochs, [look.exact for look in looks], color="darkgray", lw=4, label="exact")
    bars = values - lows, highs - values
    axes.errorbar(epochs, values, bars, fmt="o", ms=4, capsize=3, color="C0", label="estimate, 95% interval")
    for epoch, high, estimate in zip(epochs, highs, estimates, strict=True):
        where = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right" if epoch < 4 else "center"}
        axes.annotate(f"{estimate.num_matvecs}", (epoch, high), fontsize=8, **where)
    axes.set(title="Trace of the Hessian, and products taken", xlabel="epoch", ylim=(0, None))
    axes.margins(x=0.08, y=0.1)
    axes.legend(frameon=False)


def draw_errors(axes: Axes, errors: dict[str, Errors]) -> None:
    for name, (actual, stated) in errors.items():
        (line,) = axes.loglog(BUDGETS, actual, "o-", ms=4, label=name)
        axes.loglog(BUDGETS, stated, ":", color=line.get_color())
    axes.plot([], [], ":k", label="stated")
    axes.set(title="Relative error of an estimate", xlabel="products", ylim=(4e-4, 0.12))
    axes.set_xticks(BUDGETS, [str(number) for number in BUDGETS])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    axes.legend(frameon=False)


def draw_flattened(axes: Axes, flattened: dict[str, Flattened]) -> None:
    for (name, found), below in zip(flattened.items(), (True, False), strict=True):
        traces, accuracies = found.trace.mean(1), 100 * found.accuracy.mean(1)
        bars = {"xerr": found.trace.std(1), "yerr": 100 * found.accuracy.std(1), "elinewidth": 0.7}
        axes.errorbar(traces, accuracies, fmt="o-", ms=4, label=name, **bars)
        for strength, x, y in zip(STRENGTHS[1:], traces[1:], accuracies[1:], strict=True):
            axes.annotate(f"{strength:g}", (x, y), (2, -12 if below else 6), textcoords="offset points", fontsize=8)
    axes.set(title=f"{NETWORKS} networks trained with a penalty", xlabel="trace of the Hessian", ylim=(95.5, 97.5))
    axes.set_ylabel("test accuracy, %, ± deviation")
    axes.legend(frameon=False, title="penalty on the trace of", ncols=2)


def check(looks: list[Look], flattened: dict[str, Flattened]) -> None:
    """An error where the results are not what this file says."""
    for look in looks:
        low, high = look.estimate.interval(ALMOST_CERTAIN)
        if not low <= look.exact <= high:
            raise SystemExit(f"epoch {look.epoch}: the exact trace is outside of {low:.2f} to {high:.2f}")
    if any((np.diff(found.trace.mean(1)) > 0).any() for found in flattened.values()):
        raise SystemExit("a stronger penalty on the trace does not make it smaller")


def main() -> None:
    """Train and look, compare, train with a penalty, draw."""
    digits, test = load()
    models = jax.jit(partial(train, digits, objective=plain_loss))(jax.random.key(SEED))
    looks = follow({epoch: after(epoch, models) for epoch in LOOKS}, digits, test)
    errors = {name: compare(*pair, after(EPOCHS, models), digits) for name, pair in ESTIMATORS.items()}
    flattened = {name: flatten(curvature, digits, test) for name, curvature in PENALTIES.items()}
    print_results(looks, errors, flattened)
    draw(looks, errors, flattened).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    check(looks, flattened)


if __name__ == "__main__":
    main()
