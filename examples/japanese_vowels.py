"""Which of nine speakers said it? A recurrent classifier of utterances of different lengths.

Every utterance is scanned for exactly its own number of frames: `loopax.scan` is given a `length` that is
known only at run time and differs between the utterances of a batch. The rows that fill a batch up do not
enter the result, and nobody has to mask them; dropout and noise draw from the key of the step; the gradient
stores checkpoints in place of everything that happened. At the end, one gradient is set against that of the
padded and masked `jax.lax.scan`, which computes the same, and against the one that `loopax.scan` takes by default,
which is faster and stores more.

`python examples/japanese_vowels.py` trains, prints the accuracy on utterances that were not used in
training, and draws `examples/japanese_vowels.png`. It fails if the accuracy is below 0.95, or if the
gradients differ.

The data are the Japanese Vowels of the UCI Machine Learning Repository (CC BY 4.0): M. Kudo, J. Toyama and
M. Shimbo, "Multidimensional curve classification using passing-through regions", Pattern Recognition
Letters 20 (1999). See `examples/data/README.md`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import loopax as lx

HERE = Path(__file__).parent
DATA = HERE / "data" / "japanesevowels.npz"
FIGURE = HERE / "japanese_vowels.png"

# Chosen by the accuracy on held-out thirds of the training utterances.
SPEAKERS = 9
HIDDEN = 64
DROPOUT = 0.3
NOISE = 0.6
LABEL_SMOOTHING = 0.1
WEIGHT_DECAY = 0.1
LEARNING_RATE = 3e-3
EPOCHS = 40
BATCH = 30

SEED = 0
NEEDED_ACCURACY = 0.95
TOLERANCE = 1e-4  # between two gradients in float32, relative to the largest entry of each weight's gradient
TIMINGS = 15


# The data ------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Utterances:
    """A batch of utterances, each filled up with zeros to the longest of all."""

    frames: Float[Any, "utterances longest features"]
    lengths: Int[Any, " utterances"]  # how many frames are the utterance's own
    labels: Int[Any, " utterances"]  # the speaker, from 0

    def __len__(self) -> int:
        """How many utterances there are."""
        return len(self.lengths)

    def take(self, chosen: Any) -> "Utterances":
        """Some of the utterances, by index or mask."""
        return jax.tree.map(lambda x: x[chosen], self)


def load(path: Path = DATA) -> tuple[Utterances, Utterances]:
    """The utterances for training and those for the test, on the scale of the training frames."""
    with np.load(path) as file:
        values, lengths, labels, is_train = (file[name] for name in ("values", "lengths", "labels", "is_train"))
    training_frames = values[np.repeat(is_train, lengths)]
    values = (values - training_frames.mean(axis=0)) / training_frames.std(axis=0)
    longest = lengths.max()
    frames = np.zeros((len(lengths), longest, values.shape[1]), np.float32)
    frames[np.arange(longest) < lengths[:, None]] = values
    utterances = Utterances(frames, lengths, labels - 1)
    return utterances.take(is_train), utterances.take(~is_train)


# Ways to scan the frames of one utterance -----------------------------------------------------------------

Scan = Callable[[Callable[..., Any], Any, Array, Any, bool, PRNGKeyArray], Any]


def ragged_scan(step: Callable[..., Any], init: Any, frames: Array, length: Any, reverse: bool, key: Any) -> Any:
    """The carry after `length` frames: what loopax is for. Its gradient recomputes steps, and draws again for them."""
    kind = lx.Checkpointed()
    carry, _ = lx.scan(step, init, frames, length=length, reverse=reverse, kind=kind, key=key)
    return carry


def stored_scan(step: Callable[..., Any], init: Any, frames: Array, length: Any, reverse: bool, key: Any) -> Any:
    """The same with the kind that loopax takes by default, which stores what the gradient needs of each step here."""
    carry, _ = lx.scan(step, init, frames, length=length, reverse=reverse, key=key)
    return carry


def masked_scan(step: Callable[..., Any], init: Any, frames: Array, length: Any, reverse: bool, key: Any) -> Any:
    """The same without loopax: compute all frames, and keep the old carry where they are not the utterance's.

    The usual form, which stores what every step computes. With `jax.checkpoint` around `masked_step` its
    gradient takes about a sixth of the memory, which is still twice that of `ragged_scan`.
    """

    def masked_step(carry: Any, row: Any) -> tuple[Any, None]:
        i, frame = row
        new, _ = step(carry, frame, key=jax.random.fold_in(key, i))
        return jax.tree.map(lambda new, old: jnp.where(i < length, new, old), new, carry), None

    carry, _ = jax.lax.scan(masked_step, init, (jnp.arange(len(frames)), frames), reverse=reverse)
    return carry


# The model -----------------------------------------------------------------------------------------------


class Noise(eqx.Module):
    """Gaussian noise during training, so that 270 utterances are not learnt by heart."""

    scale: float
    inference: bool = False

    def __call__(self, x: Array, *, key: PRNGKeyArray) -> Array:
        """Add the noise."""
        return x if self.inference else x + self.scale * jax.random.normal(key, x.shape, x.dtype)


class Reading(NamedTuple):
    """The carry: what is known of an utterance after some of its frames."""

    hidden: Float[Array, " hidden"]  # of the GRU
    total: Float[Array, " hidden"]  # the sum of the hidden states so far, after dropout


class Reader(eqx.Module):
    """A GRU that reads an utterance in one direction and takes the mean of its hidden states."""

    noise: Noise
    cell: eqx.nn.GRUCell
    dropout: eqx.nn.Dropout

    def __init__(self, features: int, *, key: PRNGKeyArray) -> None:
        """Draw the weights."""
        self.noise = Noise(NOISE)
        self.cell = eqx.nn.GRUCell(features, HIDDEN, key=key)
        self.dropout = eqx.nn.Dropout(DROPOUT)

    def step(self, reading: Reading, frame: Float[Array, " features"], *, key: PRNGKeyArray) -> tuple[Reading, None]:
        """Read a frame. The key is the step's own: a replay of the step draws the same again."""
        noise_key, dropout_key = jax.random.split(key)
        hidden = self.cell(self.noise(frame, key=noise_key), reading.hidden)
        return Reading(hidden, reading.total + self.dropout(hidden, key=dropout_key)), None

    def __call__(
        self, frames: Float[Array, "longest features"], length: Any, reverse: bool, *, key: PRNGKeyArray, scan: Scan
    ) -> Float[Array, " hidden"]:
        """The mean hidden state."""
        nothing = jnp.zeros(HIDDEN, frames.dtype)
        return scan(self.step, Reading(nothing, nothing), frames, length, reverse, key).total / length


class Classifier(eqx.Module):
    """Read an utterance forwards and backwards, and score the speakers."""

    forwards: Reader
    backwards: Reader
    head: eqx.nn.Linear

    def __init__(self, features: int, *, key: PRNGKeyArray) -> None:
        """Draw the weights."""
        forwards_key, backwards_key, head_key = jax.random.split(key, 3)
        self.forwards = Reader(features, key=forwards_key)
        self.backwards = Reader(features, key=backwards_key)
        self.head = eqx.nn.Linear(2 * HIDDEN, SPEAKERS, key=head_key)

    def __call__(
        self, frames: Float[Array, "longest features"], length: Any, *, key: PRNGKeyArray, scan: Scan = ragged_scan
    ) -> Float[Array, " speakers"]:
        """One score for each speaker."""
        forwards_key, backwards_key = jax.random.split(key)
        forwards = self.forwards(frames, length, False, key=forwards_key, scan=scan)
        backwards = self.backwards(frames, length, True, key=backwards_key, scan=scan)
        return self.head(jnp.concatenate([forwards, backwards]))


def utterance_loss(
    model: Classifier, frames: Array, length: Any, label: Any, key: PRNGKeyArray, scan: Scan = ragged_scan
) -> Float[Array, ""]:
    """The cross entropy of one utterance, with smoothed labels."""
    target = optax.smooth_labels(jax.nn.one_hot(label, SPEAKERS), LABEL_SMOOTHING)
    return optax.softmax_cross_entropy(model(frames, length, key=key, scan=scan), target)


def loss(model: Classifier, batch: Utterances, key: PRNGKeyArray, scan: Scan = ragged_scan) -> Float[Array, ""]:
    """The mean over a batch: the model is shared, each lane has its own length and key."""

    def lane(frames: Array, length: Array, label: Array, key: PRNGKeyArray) -> Array:
        return utterance_loss(model, frames, length, label, key, scan)

    return jax.vmap(lane)(batch.frames, batch.lengths, batch.labels, jax.random.split(key, len(batch))).mean()


# Training ------------------------------------------------------------------------------------------------


@eqx.filter_jit
def accuracy(model: Classifier, utterances: Utterances) -> Float[Array, ""]:
    """The fraction of utterances whose speaker gets the highest score, without dropout or noise."""
    model = eqx.nn.inference_mode(model)
    unused = jax.random.key(0)
    scores = jax.vmap(lambda frames, length: model(frames, length, key=unused))(utterances.frames, utterances.lengths)
    return (scores.argmax(axis=-1) == utterances.labels).mean()


class Epoch(NamedTuple):
    """What is printed of an epoch."""

    loss: float
    accuracy: float
    seconds: float


def fit(model: Classifier, data: Utterances, epochs: int = EPOCHS, seed: int = SEED) -> tuple[Classifier, list[Epoch]]:
    """Train a model, and print a line per epoch."""
    batches = len(data) // BATCH
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, epochs * batches)
    optimiser = optax.adamw(schedule, weight_decay=WEIGHT_DECAY)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model: Classifier, state: Any, batch: Utterances, key: PRNGKeyArray) -> tuple[Classifier, Any, Array]:
        value, gradient = eqx.filter_value_and_grad(loss)(model, batch, key)
        change, state = optimiser.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, change), state, value

    history, shuffle, key = [], np.random.default_rng(seed), jax.random.key(seed)
    for number in range(1, epochs + 1):
        start, losses = time.perf_counter(), []
        for chosen in shuffle.permutation(len(data))[: batches * BATCH].reshape(batches, BATCH):
            key, batch_key = jax.random.split(key)
            model, state, value = update(model, state, data.take(chosen), batch_key)
            losses.append(value)
        train_accuracy = float(accuracy(model, data))
        history.append(Epoch(float(np.mean(losses)), train_accuracy, time.perf_counter() - start))
        print_epoch(number, history[-1])
    return model, history


def print_epoch(number: int, epoch: Epoch) -> None:
    compiled = "  with compilation" if number == 1 else ""
    scores = f"loss {epoch.loss:.3f}   training accuracy {epoch.accuracy:.3f}"
    print(f"epoch {number:2}   {scores}   {epoch.seconds:5.2f} s{compiled}", flush=True)


# The cost of a gradient ----------------------------------------------------------------------------------

OURS = "loopax.scan, Checkpointed()"
FASTEST = "loopax.scan, Auto()"
THEIRS = "jax.lax.scan, padded and masked"
SCANS: dict[str, Scan] = {OURS: ragged_scan, FASTEST: stored_scan, THEIRS: masked_scan}
COLORS = {OURS: "#1b7f8c", FASTEST: "#7fc4cc", THEIRS: "#b9b3a8"}
WHY = (
    "`Checkpointed()` stores least, and recomputes steps: with dropout and noise it also draws again for them,\n"
    "which is most of its time there. `Auto()`, the default, stores what the gradient needs of each step while\n"
    "there is room."
)
TEST_COLOR = "#d1603d"


@dataclass(frozen=True)
class Gradient:
    """The gradient of a full batch, compiled."""

    compiled: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> Classifier:
        """Evaluate it."""
        return jax.block_until_ready(self.compiled(*self.arguments))

    def seconds(self) -> float:
        """Evaluate it with a look at the clock."""
        start = time.perf_counter()
        self()
        return time.perf_counter() - start

    def temporary_bytes(self) -> int:
        """What the program needs besides its arguments and results, as XLA states it."""
        return self.compiled.compiled.memory_analysis().temp_size_in_bytes


def compile_gradient(scan: Scan, model: Classifier, data: Utterances) -> Gradient:
    arguments = model, jax.device_put(data), jax.random.key(SEED), scan
    gradient: Any = eqx.filter_jit(eqx.filter_grad(loss))
    return Gradient(gradient.lower(*arguments).compile(), arguments)


@dataclass(frozen=True)
class Comparison:
    """The same gradient by all scans; what each takes is found under the scan's name."""

    title: str
    milliseconds: dict[str, float]  # the median of some evaluations
    megabytes: dict[str, float]  # of temporary memory
    apart: float  # the largest difference, relative to the largest entry of each weight's gradient


def compare(title: str, model: Classifier, data: Utterances) -> Comparison:
    gradients = {name: compile_gradient(scan, model, data) for name, scan in SCANS.items()}
    apart = max(distance(gradients[name](), gradients[THEIRS]()) for name in (OURS, FASTEST))
    # In turn, so that whatever else the machine does disturbs all.
    rounds = [[gradient.seconds() for gradient in gradients.values()] for _ in range(TIMINGS)]
    milliseconds = dict(zip(gradients, 1e3 * np.median(rounds, axis=0), strict=True))
    megabytes = {name: gradient.temporary_bytes() / 1e6 for name, gradient in gradients.items()}
    return Comparison(title, milliseconds, megabytes, apart)


def distance(ours: Any, theirs: Any) -> float:
    """The largest difference between two gradients, relative to the largest entry of each weight's gradient."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


# The results ---------------------------------------------------------------------------------------------


def print_comparison(comparison: Comparison) -> None:
    print(f"\n  {comparison.title:33}{'time':>10}{'temporary memory':>20}")
    for name in SCANS:
        print(f"  {name:33}{comparison.milliseconds[name]:7.1f} ms{comparison.megabytes[name]:17.2f} MB")
    print(f"  The gradients agree to {comparison.apart:.0e} of the largest entry of each weight's.")


def draw(data: Utterances, history: list[Epoch], test_accuracy: float, comparisons: list[Comparison]) -> Figure:
    """Everything that was printed, as a figure."""
    figure = Figure(figsize=(10, 7), layout="constrained", dpi=150)
    lengths, learning, memory, seconds = figure.subplots(2, 2).flat
    draw_lengths(lengths, data)
    draw_learning(learning, history, test_accuracy)
    draw_costs(memory, {c.title: c.megabytes for c in comparisons}, "Temporary memory of a gradient (MB)", "{:.1f}")
    draw_costs(seconds, {c.title: c.milliseconds for c in comparisons}, "Time of a gradient (ms)", "{:.0f}")
    memory.legend(frameon=False, loc="upper left")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_lengths(axes: Axes, data: Utterances) -> None:
    lengths, longest = np.asarray(data.lengths), data.frames.shape[1]
    axes.bar(*np.unique(lengths, return_counts=True), width=0.8, color=COLORS[OURS])
    axes.axvline(longest, color=COLORS[THEIRS], linestyle="--")
    axes.annotate(
        f"padded to {longest}", (longest, 0.9), (-6, 0), ("data", "axes fraction"), "offset points", ha="right"
    )
    axes.set(title="Frames of an utterance", xlabel="frames", ylabel="training utterances")


def draw_learning(axes: Axes, history: list[Epoch], test_accuracy: float) -> None:
    epochs = range(1, len(history) + 1)
    axes.plot(epochs, [epoch.accuracy for epoch in history], color=COLORS[OURS], label="training utterances")
    label = f"test utterances: {test_accuracy:.3f}"
    axes.plot(len(history), test_accuracy, "o", color=TEST_COLOR, label=label, clip_on=False)
    axes.legend(frameon=False, loc="lower right")
    axes.set(title="Accuracy", xlabel="epoch", ylabel="fraction of utterances")


def draw_costs(axes: Axes, costs: dict[str, dict[str, float]], title: str, form: str) -> None:
    """Bars: a group for each comparison, a bar for each scan."""
    width, places = 0.27, np.arange(len(costs))
    for i, name in enumerate(SCANS):
        bars = axes.bar(places + (i - 1) * width, [c[name] for c in costs.values()], width, color=COLORS[name])
        bars.set_label(name)
        axes.bar_label(bars, fmt=form, padding=2)
    axes.set_xticks(places, list(costs))
    axes.margins(y=0.5)
    axes.set_title(title)


def main() -> None:
    """Train, test, compare, draw."""
    train, test = load()
    print(f"{len(train)} utterances to train on, {len(test)} to test, each of its own number of frames")
    model, history = fit(Classifier(train.frames.shape[-1], key=jax.random.key(SEED)), train)
    test_accuracy = float(accuracy(model, test))
    print(f"\nTest accuracy: {test_accuracy:.4f}\n\nOne gradient of all {len(train)} training utterances:")
    comparisons = [
        compare("without dropout and noise", eqx.nn.inference_mode(model), train),
        compare("with dropout and noise", model, train),
    ]
    for comparison in comparisons:
        print_comparison(comparison)
    print(f"\n{WHY}")
    draw(train, history, test_accuracy, comparisons).savefig(FIGURE)
    print(f"\nFigure: {FIGURE.relative_to(HERE.parent)}")
    if test_accuracy < NEEDED_ACCURACY:
        raise SystemExit(f"the test accuracy {test_accuracy:.4f} is below {NEEDED_ACCURACY}")
    if not all(comparison.apart < TOLERANCE for comparison in comparisons):
        raise SystemExit(f"the gradients of the scans differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
