"""A mixture of experts: for each image a router chooses one of several networks, and only this one is evaluated.

The images are handwritten digits. The router and the experts are learned together: what an expert returns is multiplied
by the probability that the router gives it, and a second loss asks that all experts get about as many images. An expert
is a branch of `loopax.switch(lanes="compact")`, which gathers its images from the batch. The example trains the same
model in this way and with all experts evaluated for all images (one einsum), and once without the second loss.

`python examples/mixture_of_experts.py` trains, prints accuracies, evaluations, times and memory, and draws
`examples/mixture_of_experts.png`, in 40 seconds on two busy cores. It fails if the two ways do not learn the same, if
the choice is not faster or takes more memory, or if the second loss does not spread the images.

The model: W. Fedus, B. Zoph and N. Shazeer, "Switch Transformers: scaling to trillion parameter models with simple and
efficient sparsity", JMLR 23(120) (2022). The digits: E. Alpaydin and C. Kaynak, "Optical recognition of handwritten
digits", UCI Machine Learning Repository (1998), which come with scikit-learn.
"""

import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

PIXELS, UNITS, CLASSES = 64, 256, 10  # of which the units are those of an expert's hidden layer
EXPERTS = 8
BALANCE = 0.1  # the weight of the second loss, ten times that of the paper: there are few updates
GATHERED = 32  # images that an expert evaluates at once
LANES = lx.Compact(min_lanes=GATHERED)
BATCH, UPDATES, LEARNING_RATE, SEED = 512, 300, 3e-3, 0
NUMBERS = (4, 8, 16)  # of experts, for which a step of training is measured

# What the example claims: how good the models are, and by how much they may differ; the share of images that the
# busiest expert gets with the second loss and without it; and the memory of a step over that with all experts.
ACCURACY, APART = 0.96, 0.01
SPREAD, NOT_SPREAD, MEMORY = 0.2, 0.35, 0.3

Images = Float[Array, "n pixels"]
Routes = Int[Array, " n"]


class Experts(NamedTuple):
    """The weights of all, in stacks."""

    inward: Float[Array, "experts units pixels"]
    outward: Float[Array, "experts pixels units"]


Way = Callable[[Experts, Images, Routes], Images]
"""(experts, images, the number of the expert of each image) -> what the expert of each image returns."""


# Ways to evaluate experts --------------------------------------------------------------------------------


def expert(inward: Array, outward: Array, image: Float[Array, " pixels"]) -> Float[Array, " pixels"]:
    return outward @ jax.nn.relu(inward @ image)


def by_switch(experts: Experts, images: Images, routes: Routes) -> Images:
    """The expert of each image, and no other."""
    return _switched(partial(lx.switch, lanes=LANES), experts, images, routes)


def by_lax(experts: Experts, images: Images, routes: Routes) -> Images:
    """All experts, as JAX evaluates branches in a batch."""
    return _switched(jax.lax.switch, experts, images, routes)


def _switched(switch: Callable[..., Array], experts: Experts, images: Images, routes: Routes) -> Images:
    # Taken out of the stacks before the choice: a branch reads the weights of its expert alone.
    branches = [partial(expert, *weights) for weights in zip(*map(jnp.unstack, experts), strict=True)]
    return jax.vmap(lambda image, route: switch(route, branches, image))(images, routes)


def by_einsum(experts: Experts, images: Images, routes: Routes) -> Images:
    """All experts for all images, of which one is taken."""
    hidden = jax.nn.relu(jnp.einsum("eup,np->neu", experts.inward, images))
    found = jnp.einsum("epu,neu->nep", experts.outward, hidden)
    return jnp.take_along_axis(found, routes[:, None, None], 1)[:, 0]


SWITCH, EINSUM, LAX = 'switch(lanes="compact")', "einsum over all experts", "vmapped lax.switch"
WAYS: dict[str, Way] = {SWITCH: by_switch, EINSUM: by_einsum, LAX: by_lax}


# The model -----------------------------------------------------------------------------------------------


class Mixture(eqx.Module):
    """A router, experts, and what is read from an image and what its expert adds."""

    router: eqx.nn.Linear
    experts: Experts
    readout: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray, number: int = EXPERTS) -> None:
        """Random weights of so many experts."""
        router, inward, outward, readout = jax.random.split(key, 4)
        self.router = eqx.nn.Linear(PIXELS, number, key=router)
        self.experts = Experts(
            (2 / PIXELS) ** 0.5 * jax.random.normal(inward, (number, UNITS, PIXELS)),
            UNITS**-0.5 * jax.random.normal(outward, (number, PIXELS, UNITS)),
        )
        self.readout = eqx.nn.Linear(PIXELS, CLASSES, key=readout)

    def routed(self, images: Images) -> tuple[Float[Array, "n experts"], Routes]:
        """The probabilities of experts, and the most probable one."""
        probabilities = jax.nn.softmax(jax.vmap(self.router)(images))
        return probabilities, probabilities.argmax(-1)

    def __call__(self, images: Images, way: Way) -> tuple[Float[Array, "n classes"], Array, Routes]:
        """Ten numbers of each image, the probabilities of experts, and the expert that was chosen."""
        probabilities, routes = self.routed(images)
        gate = jnp.take_along_axis(probabilities, routes[:, None], 1)
        return jax.vmap(self.readout)(images + gate * way(self.experts, images, routes)), probabilities, routes


class Digits(NamedTuple):
    """Images of 8 x 8 pixels, each minus its mean in the images to train, and what they show."""

    images: Float[Any, "n pixels"]
    labels: Int[Any, " n"]


def load() -> tuple[Digits, Digits]:
    """Three quarters to train, a quarter to test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    parts = np.split(order, [len(order) * 3 // 4])
    centred = ((images - images[parts[0]].mean(0)) / 16).astype(np.float32)
    train, test = (Digits(centred[part], labels[part].astype(np.int32)) for part in parts)
    return train, test


def imbalance(probabilities: Float[Array, "n experts"], routes: Routes) -> Float[Array, ""]:
    """1 where all experts get as many images with the same probability, and up to their number where one gets all.

    The number of experts times the sum of the share of images of each times its mean probability: equations 4 to 6 of
    Fedus, Zoph and Shazeer (2022).
    """
    number = probabilities.shape[1]
    shares = jax.nn.one_hot(routes, number, dtype=probabilities.dtype).mean(0)
    return number * (shares * probabilities.mean(0)).sum()


def loss(model: Mixture, digits: Digits, way: Way, balance: float = BALANCE) -> Float[Array, ""]:
    logits, probabilities, routes = model(digits.images, way)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, digits.labels).mean()
    return cross_entropy + balance * imbalance(probabilities, routes)


OPTIMISER = optax.adam(LEARNING_RATE)


def update(
    model: Mixture, memory: Any, digits: Digits, way: Way, balance: float = BALANCE
) -> tuple[Mixture, Any, Float[Array, ""]]:
    """A step of training: the model, what Adam remembers, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(model, digits, way, balance)
    changes, memory = OPTIMISER.update(gradient, memory)
    return eqx.apply_updates(model, changes), memory, value


def train(
    digits: Digits, way: Way, balance: float = BALANCE, number: int = EXPERTS, updates: int = UPDATES
) -> tuple[Mixture, list[float]]:
    """A model of so many experts, and its losses on the way."""
    model, random, losses = Mixture(jax.random.key(SEED), number), np.random.default_rng(SEED), []
    memory, improve = (
        OPTIMISER.init(eqx.filter(model, eqx.is_array)),
        jax.jit(partial(update, way=way, balance=balance)),
    )
    for _ in range(updates):
        batch = random.integers(len(digits.labels), size=BATCH)
        model, memory, value = improve(model, memory, Digits(digits.images[batch], digits.labels[batch]))
        losses.append(value)
    return model, [float(value) for value in losses]


# What it costs -------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """The share of digits that are recognised, and how many go to each expert."""

    accuracy: float
    images: Int[np.ndarray, " experts"]

    @property
    def busiest(self) -> float:
        """The share of images of the expert that gets most."""
        return float(self.images.max() / self.images.sum())


def evaluate(model: Mixture, digits: Digits) -> Evaluation:
    logits, _, routes = jax.jit(lambda model, images: model(images, by_einsum))(model, digits.images)
    return Evaluation(float((logits.argmax(-1) == digits.labels).mean()), _of_each(model, routes))


def _of_each(model: Mixture, routes: Routes) -> Int[np.ndarray, " experts"]:
    return np.bincount(routes, minlength=len(model.experts.inward))


def evaluations(images: Int[np.ndarray, " experts"]) -> int:
    """Of experts by the switch: the images of each, rounded up to full batches."""
    return int((-(-images // GATHERED) * GATHERED).sum())


class Cost(NamedTuple):
    """Of a step of training."""

    milliseconds: float
    mib: float  # temporary memory, as the compiler reports it


def cost(model: Mixture, digits: Digits, way: Way, times: int) -> Cost:
    arguments = model, OPTIMISER.init(eqx.filter(model, eqx.is_array)), digits
    program: Any = jax.jit(partial(update, way=way)).lower(*arguments).compile()
    seconds = timeit.repeat(lambda: jax.block_until_ready(program(*arguments)), number=1, repeat=times + 1)
    return Cost(1e3 * float(np.median(seconds[1:])), program.memory_analysis().temp_size_in_bytes / 2**20)


# The results ---------------------------------------------------------------------------------------------


def print_models(found: dict[str, Evaluation]) -> None:
    table = Table("model", "test accuracy", "images of each expert, sorted", title=f"{len(found)} trained models")
    for name, (accuracy, images) in found.items():
        table.add_row(name, f"{accuracy:.3f}", " ".join(map(str, sorted(images, reverse=True))))
    Console().print(table)


def print_costs(costs: dict[str, dict[int, Cost]], counts: dict[str, int]) -> None:
    title, columns = f"A step of training, {BATCH} images", [f"{n} experts" for n in NUMBERS]
    table = Table("way", "evaluations", *columns, title=title, caption=f"Evaluations: of {EXPERTS} experts")
    for name, of_way in costs.items():
        cells = [f"{of_way[n].milliseconds:.1f} ms, {of_way[n].mib:.0f} MiB" if n in of_way else "" for n in NUMBERS]
        table.add_row(name, str(counts[name]), *cells)
    Console().print(table)


def draw(balanced: Evaluation, not_balanced: Evaluation, costs: dict[str, dict[int, Cost]]) -> Figure:
    """How images spread over experts, and the time of a step by their number."""
    figure = Figure(figsize=(5, 5.2), layout="constrained", dpi=150)
    spread, times = figure.subplots(2, 1)
    places = np.arange(1, EXPERTS + 1)
    for shift, of_model, label in ((-0.2, balanced, "with the second loss"), (0.2, not_balanced, "without")):
        spread.bar(places + shift, sorted(of_model.images, reverse=True), 0.4, label=label)
    spread.axhline(balanced.images.mean(), color="black", linestyle=":", label="as many for each")
    spread.set(title="Test images of each expert", xlabel="experts, the busiest first", ylabel="images")
    spread.legend(frameon=False)
    for name in (EINSUM, SWITCH):
        times.plot(NUMBERS, [costs[name][n].milliseconds for n in NUMBERS], "o-", label=name)
    times.set(title=f"A step of training, {BATCH} images", xlabel="experts", ylabel="ms", xticks=NUMBERS)
    times.set_ylim(bottom=0)
    times.legend(frameon=False)
    return figure


def main() -> None:
    """Train, measure, draw."""
    digits, test = load()
    models = {name: train(digits, WAYS[name])[0] for name in (SWITCH, EINSUM)}
    alone = "without the second loss"
    models[alone] = train(digits, by_switch, balance=0.0)[0]
    models["one expert"] = train(digits, by_switch, number=1)[0]
    found = {name: evaluate(model, test) for name, model in models.items()}

    batch = Digits(digits.images[:BATCH], digits.labels[:BATCH])
    untrained = {number: Mixture(jax.random.key(SEED), number) for number in NUMBERS if number != EXPERTS}
    of_experts = untrained | {EXPERTS: models[SWITCH]}
    costs = {
        name: {number: cost(model, batch, WAYS[name], 20) for number, model in of_experts.items()}
        for name in (SWITCH, EINSUM)
    }
    costs[LAX] = {EXPERTS: cost(models[SWITCH], batch, by_lax, 2)}
    counts = {SWITCH: evaluations(evaluate(models[SWITCH], batch).images), EINSUM: EXPERTS * BATCH}
    counts[LAX] = counts[EINSUM]

    print_models(found)
    print_costs(costs, counts)
    draw(found[SWITCH], found[alone], costs).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    accuracies = [found[name].accuracy for name in (SWITCH, EINSUM)]
    assert min(accuracies) > ACCURACY
    assert max(accuracies) - min(accuracies) < APART
    assert found[SWITCH].busiest < SPREAD
    assert found[alone].busiest > NOT_SPREAD
    assert counts[SWITCH] < BATCH + EXPERTS * GATHERED
    assert costs[SWITCH][EXPERTS].milliseconds < costs[EINSUM][EXPERTS].milliseconds
    assert costs[SWITCH][EXPERTS].mib < MEMORY * costs[EINSUM][EXPERTS].mib


if __name__ == "__main__":
    main()
