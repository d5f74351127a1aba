"""A deep-equilibrium model: a layer that is repeated until it changes nothing, learned on handwritten digits.

The layer is z -> tanh(W z + U x + b), for an image x. It is a contraction, so repeating it converges to one z, from
which ten numbers are read. An image is a lane of a batch, and takes the steps that it needs. The example trains the
same model three times: with `loopax.Implicit`, whose gradient solves one linear system at the fixed point; with
`loopax.Residuals`, whose gradient goes back through all steps; and with a `jax.lax.scan` of so many steps that all
images converge. It also measures `loopax.Checkpointed`, whose gradient is that of all steps, too, in less memory.

`python examples/deep_equilibrium.py` trains, prints accuracies, the steps of images forward and backward, times, errors
and memory, and draws `examples/deep_equilibrium.png`, in half a minute on two cores. It fails if the models are not
equally good, if the implicit gradient is less exact than that of all steps or takes many more steps, or if its memory
grows with the bound.

The model: S. Bai, J. Z. Kolter and V. Koltun, "Deep equilibrium models", NeurIPS (2019). The digits: E. Alpaydin and
C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository (1998), which come with
scikit-learn.
"""

import timeit
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

PIXELS, UNITS, CLASSES = 64, 64, 10
CONTRACTION, POWER_STEPS = 0.9, 30  # the most that the layer may stretch, and the steps that estimate how much it does
TOLERANCE = 1e-5  # the last change of z, relative to z
BOUND = 100  # steps that a loop may take
BY_HAND = 40  # steps of the scan, enough for each of the images
BATCH, UPDATES, LEARNING_RATE, SEED = 128, 300, 3e-3, 0
BOUNDS = (BY_HAND, BOUND, 1000)  # of which memory is measured
EXACT = 500  # steps in float64, after which nothing changes
AT_ONCE = 25  # images that one program evaluates

# What the example claims of its models: how good they are, and by how much they may differ. Of the implicit gradient:
# its relative error; and as ratios, its steps backward over those forward, and its memory over that of the least bound.
ACCURACY, APART = 0.975, 0.01
ERROR, MORE, GROWTH = 3e-4, 1.3, 1.02

State = Float[Array, " units"]
Layer = Callable[[State], State]
Found = tuple[State, Int[Array, ""]]  # a fixed point, and the steps to it


class Tally(NamedTuple):
    """Counts products with the layer's transposed Jacobian, of one image among others."""

    products: Counter[int]  # by the image's place
    place: Int[Array, ""]

    def add(self, number: Any) -> None:
        """So many more, when the program runs."""
        jax.debug.callback(lambda place, number: self.products.update({int(place): int(number)}), self.place, number)


Search = Callable[[Layer, State, Tally | None], Found]


# Ways to a fixed point -----------------------------------------------------------------------------------


def until_converged(
    layer: Layer,
    start: State,
    tally: Tally | None,
    kind: lx.Kind | None = None,
    max_steps: int = BOUND,
    lanes: Any = "compact",
) -> Found:
    """Repeat the layer until it changes little. Without a kind, the derivative is that of the fixed point."""

    def goes_on(state: tuple[State, Array]) -> Array:
        return state[1] > TOLERANCE

    def step(state: tuple[State, Array]) -> tuple[State, Array]:
        z, _ = state
        after = layer(z)
        return after, jnp.linalg.norm(after - z) / jnp.linalg.norm(after)

    implicit = lx.Implicit(partial(solve, tally=tally), fixed_point=lambda state: state[0])
    derivative = implicit if kind is None else None
    state = start, jnp.full((), jnp.inf, start.dtype)
    (z, _), info = lx.while_loop(
        goes_on, step, state, max_steps=max_steps, kind=kind or "auto", derivative=derivative, lanes=lanes, info=True
    )
    return z, info.num_steps


def solve(matvec: Callable[[State], State], b: State, tally: Tally | None) -> State:
    """The x with matvec(x) = b, where matvec(x) is x - J^T x on the way back: x <- J^T x + b."""

    def goes_on(pair: tuple[State, State]) -> Array:
        return jnp.linalg.norm(pair[1]) > TOLERANCE * jnp.linalg.norm(b)

    def step(pair: tuple[State, State]) -> tuple[State, State]:
        x, residual = pair
        x = x + residual
        return x, b - matvec(x)

    (x, _), info = lx.while_loop(goes_on, step, (b, b - matvec(b)), lanes="compact", info=True)
    if tally is not None:
        tally.add(info.num_steps + 1)
    return x


def by_steps(
    layer: Layer, start: State, tally: Tally | None, kind: lx.Kind | None = None, max_steps: int = BOUND
) -> Found:
    """The model's loop with a derivative that goes through its steps. It is fastest with lanes in lockstep."""
    return until_converged(counted(layer, tally), start, None, kind or lx.Residuals(), max_steps, "lockstep")


def by_hand(layer: Layer, start: State, tally: Tally | None, num_steps: int = BY_HAND) -> Found:
    """As many steps for each image."""
    layer = counted(layer, tally)
    return jax.lax.scan(lambda z, _: (layer(z), None), start, length=num_steps)[0], jnp.int32(num_steps)


def counted(layer: Layer, tally: Tally | None) -> Layer:
    """The layer, which counts the cotangents that go back through it."""
    if tally is None:
        return layer
    marked = jax.custom_vjp(lambda z, _: z)

    def back(place: Array, cotangent: State) -> tuple[State, None]:
        tally._replace(place=place).add(1)
        return cotangent, None

    marked.defvjp(lambda z, place: (z, place), back)
    return lambda z: layer(marked(z, tally.place))


WAYS: dict[str, Search] = {
    "Implicit()": until_converged,
    "Residuals()": by_steps,
    "Checkpointed()": partial(by_steps, kind=lx.Checkpointed()),
    f"lax.scan, {BY_HAND} steps": by_hand,
}
IMPLICIT, RESIDUALS, CHECKPOINTED, SCAN = WAYS
TRAINED = IMPLICIT, RESIDUALS, SCAN


# The model -----------------------------------------------------------------------------------------------


class Equilibrium(eqx.Module):
    """The layer, and what is read from its fixed point."""

    recurrent: Float[Array, "units units"]
    inward: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        """Random weights."""
        recurrent, inward, readout = jax.random.split(key, 3)
        self.recurrent = 0.5 * UNITS**-0.5 * jax.random.normal(recurrent, (UNITS, UNITS))
        self.inward = eqx.nn.Linear(PIXELS, UNITS, key=inward)
        self.readout = eqx.nn.Linear(UNITS, CLASSES, key=readout)

    def matrix(self) -> Float[Array, "units units"]:
        """W: the recurrent weights, made smaller where they would stretch a vector more than CONTRACTION."""
        return self.recurrent * jnp.minimum(1, CONTRACTION / spectral_norm(self.recurrent))

    def __call__(self, images: Float[Array, "n pixels"], search: Search) -> tuple[Float[Array, "n classes"], Array]:
        """Ten numbers of each image, and the steps that it took."""
        matrix = self.matrix()
        return jax.vmap(lambda image: self.of_image(matrix, image, search, None))(images)

    def of_image(self, matrix: Array, image: Array, search: Search, tally: Tally | None) -> tuple[Array, Array]:
        """Ten numbers of one image, and its steps."""
        shift = self.inward(image)
        z, steps = search(lambda z: jnp.tanh(matrix @ z + shift), jnp.zeros_like(shift), tally)
        return self.readout(z), steps


def spectral_norm(matrix: Float[Array, "units units"]) -> Float[Array, ""]:
    """Estimated from below, by power iteration. Its derivative holds the singular vector fixed."""
    fixed = jax.lax.stop_gradient(matrix)

    def step(_: Any, v: State) -> State:
        v = fixed.T @ (fixed @ v)
        return v / jnp.linalg.norm(v)

    start = jnp.ones(len(matrix), matrix.dtype)
    return jnp.linalg.norm(matrix @ lx.fori_loop(0, POWER_STEPS, step, start))


class Digits(NamedTuple):
    """Images of 8 x 8 pixels between 0 and 1, and what they show."""

    images: Float[Any, "n pixels"]
    labels: Int[Any, " n"]


def load() -> tuple[Digits, Digits]:
    """Three quarters to train, a quarter to test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    parts = np.split(order, [len(order) * 3 // 4])
    train, test = (Digits((images[part] / 16).astype(np.float32), labels[part].astype(np.int32)) for part in parts)
    return train, test


def loss(model: Equilibrium, digits: Digits, search: Search) -> Float[Array, ""]:
    logits, _ = model(digits.images, search)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits.labels).mean()


def train(digits: Digits, search: Search, updates: int = UPDATES) -> tuple[Equilibrium, list[float]]:
    """The model, and its losses on the way."""
    optimiser = optax.adam(LEARNING_RATE)
    model, random = Equilibrium(jax.random.key(SEED)), np.random.default_rng(SEED)
    memory, losses = optimiser.init(eqx.filter(model, eqx.is_array)), []

    @jax.jit
    def improve(model: Equilibrium, memory: Any, digits: Digits) -> tuple[Equilibrium, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(model, digits, search)
        changes, memory = optimiser.update(gradient, memory)
        return eqx.apply_updates(model, changes), memory, value

    for _ in range(updates):
        batch = random.integers(len(digits.labels), size=BATCH)
        model, memory, value = improve(model, memory, Digits(digits.images[batch], digits.labels[batch]))
        losses.append(value)
    return model, [float(value) for value in losses]


# What it costs -------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """Of each image: whether it is recognised, steps of the layer, and products with its transposed Jacobian."""

    correct: Bool[np.ndarray, " n"]
    forward: Int[np.ndarray, " n"]
    backward: Int[np.ndarray, " n"]


def evaluate(model: Equilibrium, digits: Digits, search: Search) -> Evaluation:
    """Each image has a gradient of its own, whose callbacks tell of what is evaluated on the way back."""
    products = Counter()

    def value(matrix: Array, image: Array, label: Array, place: Array) -> tuple[Array, tuple[Array, Array]]:
        logits, steps = model.of_image(matrix, image, search, Tally(products, place))
        of_image = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return of_image, (logits.argmax() == label, steps)

    gradients = jax.jit(jax.vmap(jax.grad(value, has_aux=True), (None, 0, 0, 0)))
    matrix, places = model.matrix(), np.arange(len(digits.labels))
    parts = [places[start : start + AT_ONCE] for start in places[::AT_ONCE]]
    found = [gradients(matrix, digits.images[part], digits.labels[part], part)[1] for part in parts]
    jax.effects_barrier()
    correct, forward = map(np.concatenate, zip(*found, strict=True))
    return Evaluation(correct, forward, np.array([products[place] for place in places]))


def compile_gradient(search: Search, model: Equilibrium, digits: Digits) -> Any:
    return jax.jit(jax.grad(partial(loss, search=search))).lower(model, digits).compile()


def temporary_kib(gradient: Any) -> float:
    return gradient.memory_analysis().temp_size_in_bytes / 1024


def milliseconds(program: Callable[[], Any], times: int = 100) -> float:
    """The median of some evaluations, after one that is not counted."""
    seconds = timeit.repeat(lambda: jax.block_until_ready(program()), number=1, repeat=times + 1)
    return 1e3 * float(np.median(seconds[1:]))


def bounded(name: str, bound: int) -> Search:
    """With another bound, which is the number of steps of the scan."""
    return partial(WAYS[name], **{"num_steps" if name == SCAN else "max_steps": bound})


def exact_gradient(model: Equilibrium, digits: Digits) -> Equilibrium:
    """Through so many steps in float64 that neither the fixed point nor its derivative changes any more."""
    with jax.enable_x64(True):
        model, digits = jax.tree.map(
            lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, jax.device_get((model, digits))
        )
        gradient = jax.jit(jax.grad(partial(loss, search=partial(by_hand, num_steps=EXACT))))(model, digits)
        return jax.device_get(gradient)


def relative_error(found: Equilibrium, expected: Equilibrium) -> float:
    """Of a gradient: the norm of the difference over the norm."""
    found_leaves, leaves = (list(map(np.asarray, jax.tree.leaves(model))) for model in (found, expected))
    apart = sum(((a - b) ** 2).sum() for a, b in zip(found_leaves, leaves, strict=True))
    return float(np.sqrt(apart / sum((leaf**2).sum() for leaf in leaves)))


# The results ---------------------------------------------------------------------------------------------


def in_words(numbers: Int[np.ndarray, " n"]) -> str:
    return f"{numbers.mean():.1f} ({numbers.min()}-{numbers.max()})"


def print_models(found: dict[str, Evaluation]) -> None:
    title, caption = f"{len(found)} trained models", "Steps of a test image: mean (fewest-most)"
    table = Table("gradient", "test accuracy", "steps forward", "steps backward", title=title, caption=caption)
    for name, (correct, *numbers) in found.items():
        table.add_row(name, f"{correct.mean():.3f}", *map(in_words, numbers))
    Console().print(table)


def print_gradients(times: dict[str, float], errors: dict[str, float], stored: dict[str, list[float]]) -> None:
    title = f"A gradient of {BATCH} images, and its memory by the bound on steps"
    table = Table("gradient", "ms", "error", *(f"KiB, {bound}" for bound in BOUNDS), title=title)
    for name, sizes in stored.items():
        table.add_row(name, f"{times[name]:.2f}", f"{errors[name]:.0e}", *(f"{size:.0f}" for size in sizes))
    Console().print(table)


def draw(found: Evaluation, stored: dict[str, list[float]]) -> Figure:
    """The steps of images, and memory by the bound."""
    figure = Figure(figsize=(5, 5.4), layout="constrained", dpi=150)
    steps, memory = figure.subplots(2, 1)
    bins = np.arange(found.forward.min(), found.backward.max() + 2) - 0.5
    for numbers, label in zip(found[1:], ("forward", "backward"), strict=True):
        steps.hist(numbers, bins, alpha=0.6, label=label)
    steps.axvline(BY_HAND, ymax=0.65, color="black", linestyle=":", label="the scan, both ways")
    steps.set(title="Steps of the test images, Implicit()", xlabel="steps", ylabel="images")
    steps.legend(loc="upper right", frameon=False)
    for name, sizes in stored.items():
        memory.loglog(BOUNDS, sizes, "o-", label=name.split(",")[0])
    memory.set(title="Temporary memory of a gradient", xlabel="bound on the steps", ylabel="KiB")
    memory.set_xticks(BOUNDS, map(str, BOUNDS))
    memory.yaxis.set_major_formatter("{x:g}")
    memory.legend(frameon=False)
    return figure


def main() -> None:
    """Train, count, measure, draw."""
    digits, test = load()
    models = {name: train(digits, WAYS[name])[0] for name in TRAINED}
    found = {name: evaluate(model, test, WAYS[name]) for name, model in models.items()}
    one_step = partial(by_hand, num_steps=1)
    of_one_step = evaluate(train(digits, one_step)[0], test, one_step).correct.mean()

    model, batch = models[IMPLICIT], Digits(digits.images[:BATCH], digits.labels[:BATCH])
    programs = {name: {n: compile_gradient(bounded(name, n), model, batch) for n in BOUNDS} for name in WAYS}
    stored = {name: [temporary_kib(program) for program in of_way.values()] for name, of_way in programs.items()}
    used = {name: of_way[BY_HAND if name == SCAN else BOUND] for name, of_way in programs.items()}
    times = {name: milliseconds(partial(program, model, batch)) for name, program in used.items()}
    exact = exact_gradient(model, batch)
    errors = {name: relative_error(program(model, batch), exact) for name, program in used.items()}
    norm = float(np.linalg.norm(model.matrix(), 2))

    print_models(found)
    print_gradients(times, errors, stored)
    print(f"Accuracy of a model of one step: {of_one_step:.3f}. Norm of the layer's matrix: {norm:.3f}.")
    draw(found[IMPLICIT], stored).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    accuracies, implicit = [of_way.correct.mean() for of_way in found.values()], found[IMPLICIT]
    assert min(accuracies) > ACCURACY
    assert max(accuracies) - min(accuracies) < APART
    assert norm < 1
    assert implicit.forward.max() <= BY_HAND
    assert implicit.backward.mean() < MORE * implicit.forward.mean()
    assert all((found[name].forward == found[name].backward).all() for name in (RESIDUALS, SCAN))
    assert errors[IMPLICIT] < min(ERROR, errors[RESIDUALS], errors[CHECKPOINTED])
    assert stored[IMPLICIT][-1] < GROWTH * stored[IMPLICIT][0]


if __name__ == "__main__":
    main()
