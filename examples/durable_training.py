"""A training run that survives: killed in the middle, it goes on and ends with the same bits.

A classifier of handwritten digits is trained by one `loopax.durable.scan` over all updates. The carry is the model, an
Equinox module, together with the state of its optimiser; the losses go to disk as they come. This script starts that
run in a process of its own, kills it (SIGKILL, as when a machine goes down) when it is half done, reads from outside
how far it had come, and starts it again: it goes on from its newest save. A run that nobody interrupts is beside it.

`python examples/durable_training.py` takes about half a minute, prints what was lost and compares the results, and
draws `examples/durable_training.png`. It fails if the two runs end with other weights, losses or accuracy, or if the
kill has cost more updates than `checkpoint_every` allows.

`python examples/durable_training.py DIRECTORY` is the training run alone: interrupt it with Ctrl-C, and call it again.
(`DIRECTORY UPDATES CHECKPOINT_EVERY` for a run of another length.)

The digits are those that scikit-learn brings along (E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository).
"""

import subprocess
import sys
import tempfile
import time
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
from sklearn.model_selection import train_test_split

from loopax import durable

FIGURE = Path(__file__).with_suffix(".png")

WIDTH = 256
UPDATES = 6000
IMAGES = 128  # in a batch
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-2
NOISE = 0.3  # added to images, whose pixels are between 0 and 1
CHECKPOINT_EVERY = 500  # updates
KILLED_AT = 0.5  # of the updates
SEED = 0

Images = Float[Any, "n 64"]
Labels = Int[Any, " n"]


class Digits(NamedTuple):
    """Images and what they show."""

    images: Images
    labels: Labels


class Classifier(eqx.Module):
    """Two hidden layers, and dropout of inputs by noise."""

    layers: list[eqx.nn.Linear]

    def __init__(self, key: PRNGKeyArray):
        sizes = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
        keys = jax.random.split(key, len(sizes))
        self.layers = [eqx.nn.Linear(*size, key=key) for size, key in zip(sizes, keys, strict=True)]

    def __call__(self, image: Float[Array, " 64"]) -> Float[Array, " 10"]:
        """The logits."""
        *hidden, last = self.layers
        for layer in hidden:
            image = jax.nn.gelu(layer(image))
        return last(image)


class Result(NamedTuple):
    """What a training run ends with."""

    accuracy: float  # on digits that it has not seen
    losses: Float[np.ndarray, " updates"]
    weights: Float[np.ndarray, " w"]


def load() -> tuple[Digits, Digits]:
    """Digits to train with, and others to test with."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    found = train_test_split(images, labels, test_size=0.5, stratify=labels, random_state=SEED)
    return Digits(found[0], found[2]), Digits(found[1], found[3])


def loss(model: Classifier, images: Images, labels: Labels) -> Float[Array, ""]:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(directory: Path) -> Result:
    """The run: the same call begins it, and goes on with it."""
    digits, test = load()
    images, labels = jnp.asarray(digits.images), jnp.asarray(digits.labels)
    optimizer = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, UPDATES), weight_decay=WEIGHT_DECAY)
    model = Classifier(jax.random.key(SEED))

    def update(carry: Any, _: None, key: PRNGKeyArray) -> tuple[Any, Float[Array, ""]]:
        model, state = carry
        for_batch, for_noise = jax.random.split(key)
        batch = jax.random.randint(for_batch, (IMAGES,), 0, len(images))
        noisy = images[batch] + NOISE * jax.random.normal(for_noise, (IMAGES, 64))
        value, gradient = eqx.filter_value_and_grad(loss)(model, noisy, labels[batch])
        changes, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, changes), state), value

    (model, _), losses = durable.scan(
        update,
        (model, optimizer.init(eqx.filter(model, eqx.is_array))),
        length=UPDATES,
        key=jax.random.key(SEED + 1),
        directory=directory,
        checkpoint_every=CHECKPOINT_EVERY,
    )
    guesses = jax.vmap(model)(test.images).argmax(1)
    weights = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))])
    return Result(float((guesses == test.labels).mean()), np.asarray(losses), weights)


def start(directory: Path) -> subprocess.Popen[str]:
    """The run in a process of its own."""
    numbers = [str(UPDATES), str(CHECKPOINT_EVERY)]
    return subprocess.Popen([sys.executable, __file__, str(directory), *numbers], stdout=subprocess.PIPE, text=True)


def losses_so_far(directory: Path) -> Float[np.ndarray, " updates"]:
    """What a run that may still go on has written, read from outside; updates that it has not taken have none."""
    try:
        (losses,) = durable.outputs(directory).values()
        return np.trim_zeros(np.asarray(losses), "b")
    except FileNotFoundError:
        return np.zeros(0)


def kill_in_the_middle(directory: Path) -> tuple[int, int]:
    """Start the run and kill it; returns the updates that it had written by then, and those that were saved."""
    with start(directory) as process:
        try:
            while len(losses_so_far(directory)) < KILLED_AT * UPDATES:
                assert process.poll() is None, "the run has ended before it could be killed"
                time.sleep(0.01)
        finally:
            process.kill()
    return len(losses_so_far(directory)), durable.steps_saved(directory)


def draw(alone: Result, written: int, saved: int) -> Figure:
    """The losses, and where the run was killed and went on."""
    figure = Figure(figsize=(5, 3.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    smooth = np.convolve(alone.losses, np.ones(50) / 50, "valid")
    axes.plot(np.arange(len(smooth)) + 25, smooth, lw=1.2, label="both runs, the same bits")
    axes.axvspan(saved, written, color="C3", alpha=0.35, lw=0, label="lost, and taken again")
    axes.axvline(written, color="C3", lw=1.5, label="killed")
    for step in range(CHECKPOINT_EVERY, UPDATES, CHECKPOINT_EVERY):
        axes.axvline(step, color="k", lw=0.5, alpha=0.15, zorder=0)
    axes.set(title="A training run that is killed and resumed", xlabel="update", ylabel="loss", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Train twice, once with a kill in the middle, and compare."""
    with tempfile.TemporaryDirectory() as path:
        alone = train(Path(path) / "alone")
        killed = Path(path) / "killed"
        written, saved = kill_in_the_middle(killed)
        resumed = train(killed)
    table = Table("run", "accuracy", "last loss", title=f"{UPDATES} updates, checkpoint_every={CHECKPOINT_EVERY}")
    table.add_row("never interrupted", f"{alone.accuracy:.4f}", f"{alone.losses[-1]:.6f}")
    table.add_row(f"killed after {written}, resumed at {saved}", f"{resumed.accuracy:.4f}", f"{resumed.losses[-1]:.6f}")
    Console().print(table)
    same = np.array_equal(alone.weights, resumed.weights) and np.array_equal(alone.losses, resumed.losses)
    print(f"The {len(alone.weights)} weights and all losses have the same bits: {same}")
    draw(alone, written, saved).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    assert same
    assert alone.accuracy == resumed.accuracy
    assert saved > 0
    assert written - saved <= CHECKPOINT_EVERY


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if len(sys.argv) > 2:
            UPDATES, CHECKPOINT_EVERY = map(int, sys.argv[2:])
        print(f"Accuracy: {train(Path(sys.argv[1])).accuracy:.4f}")
    else:
        main()
