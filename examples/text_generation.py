"""Text, character by character, from a small transformer: as a text ends, the next one takes its lane.

The transformer keeps keys and values of earlier characters (a cache), so a character costs one step of a loop. It is
trained on what Python's own library says of itself: first paragraphs of docstrings. Then it goes on with the beginnings
of 1024 texts that it has not seen, in three ways: `loopax.lanes_stream`, whose 64 lanes take the next text as they
finish; `jax.lax.while_loop` under `jax.vmap`, for 64 texts at a time, which wait for the longest of them; and one text
at a time.

`python examples/text_generation.py` trains, prints texts, characters a second and the share of useful steps, and draws
`examples/text_generation.png`, in two to three minutes on two cores. It fails if the three ways do not give the same
texts, or if the stream is not faster than batches that wait.
"""

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

FIGURE = Path(__file__).with_suffix(".png")

END, FIRST, LAST = 0, 32, 126  # characters are numbers from 1 on; others than these are left out
CHARACTERS = LAST - FIRST + 2
CONTEXT = 128  # characters of a text, at most
GIVEN = 12  # characters that a text begins with
WIDTH, HEADS, LAYERS = 96, 4, 2
PART = WIDTH // HEADS  # of a query, and of the keys and values that all heads share
BATCH, UPDATES, LEARNING_RATE, SEED = 32, 600, 3e-3, 0
TEXTS, LANES = 1024, 64
TEMPERATURE = 0.7  # of samples: the most likely characters are taken more often than the model says
ONE_BY_ONE = 32  # texts that are written one at a time, to measure that

# What the example claims: the loss of a character that was not seen, and the stream's time over that of batches.
LOSS, FASTER = 2.1, 0.8

Token = Int[Array, ""]
Cache = tuple[Float[Array, "layers context part"], Float[Array, "layers context part"]]  # keys and values


# Texts ---------------------------------------------------------------------------------------------------


def paragraphs() -> Iterator[str]:
    """First paragraphs of docstrings of Python's library: modules, and their functions, classes and methods."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("antigravity", "idlelib", "this", "turtle"):
            continue
        try:
            module = import_module(name)
        except ImportError:  # of another platform
            continue
        members = [value for _, value in sorted(vars(module).items()) if inspect.getmodule(value) is module]
        methods = [m for value in members if inspect.isclass(value) for _, m in sorted(vars(value).items())]
        for documented in (module, *members, *methods):
            if isinstance(text := inspect.getdoc(documented), str):
                yield " ".join(text.split("\n\n")[0].split())


def load() -> tuple[np.ndarray, np.ndarray]:
    """Texts in rows, each with an end after its last character; nine tenths to train, a tenth to test."""
    with warnings.catch_warnings(action="ignore"):  # some modules are deprecated
        texts = sorted({text for text in paragraphs() if GIVEN < len(text) < CONTEXT and text.isascii()})
    rows = np.full((len(texts), CONTEXT), END, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = [max(ord(character) - FIRST + 1, 1) for character in text]
    rows = rows[np.random.default_rng(SEED).permutation(len(rows))]
    return rows[len(rows) // 10 :], rows[: len(rows) // 10]


def in_words(row: Any) -> str:
    """The text of a row."""
    row = np.asarray(row)
    return "".join(chr(number + FIRST - 1) for number in row[: int((row != END).sum())])


# The model -----------------------------------------------------------------------------------------------


class Block(eqx.Module):
    """Attention to earlier characters, and a layer for each character."""

    attention: eqx.nn.Linear  # to queries, keys and values
    merged: eqx.nn.Linear
    inward: eqx.nn.Linear
    outward: eqx.nn.Linear
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, key: PRNGKeyArray) -> None:
        """Random weights."""
        first, second, third, fourth = jax.random.split(key, 4)
        self.attention = eqx.nn.Linear(WIDTH, WIDTH + 2 * PART, key=first)
        self.merged = eqx.nn.Linear(WIDTH, WIDTH, key=second)
        self.inward = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=third)
        self.outward = eqx.nn.Linear(4 * WIDTH, WIDTH, key=fourth)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)

    def projected(self, x: Float[Array, " width"]) -> tuple[Array, Array, Array]:
        """Query, key and value of a character."""
        query, key, value = jnp.split(self.attention(self.norms[0](x)), [WIDTH, WIDTH + PART])
        return query, key, value

    def __call__(self, x: Array, query: Array, keys: Array, values: Array, position: Token) -> Array:
        """Attend to characters up to this one."""
        scores = query.reshape(HEADS, PART) @ keys.T * PART**-0.5
        seen = jnp.arange(len(keys)) <= position
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        x = x + self.merged((weights @ values).reshape(-1))
        return x + self.outward(jax.nn.gelu(self.inward(self.norms[1](x))))


class Transformer(eqx.Module):
    """Says which character comes next."""

    characters: Float[Array, "characters width"]
    positions: Float[Array, "context width"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, key: PRNGKeyArray) -> None:
        """Random weights."""
        characters, positions, *blocks = jax.random.split(key, 2 + LAYERS)
        self.characters = 0.02 * jax.random.normal(characters, (CHARACTERS, WIDTH))
        self.positions = 0.02 * jax.random.normal(positions, (CONTEXT, WIDTH))
        self.blocks = [Block(key) for key in blocks]
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def read(self, text: Int[Array, " context"]) -> Float[Array, "context characters"]:
        """Of each place of a text, how likely characters are there, all places at once."""
        places = jnp.arange(CONTEXT)
        x = self.characters[jnp.roll(text, 1).at[0].set(END)] + self.positions
        for block in self.blocks:
            query, keys, values = jax.vmap(block.projected)(x)
            x = jax.vmap(block, (0, 0, None, None, 0))(x, query, keys, values, places)
        return jax.vmap(self.norm)(x) @ self.characters.T

    def step(self, before: Token, place: Token, cache: Cache) -> tuple[Float[Array, " characters"], Cache]:
        """How likely characters are at one place, from the character before it and the cache of the others."""
        keys, values = cache
        x = self.characters[before] + self.positions[place]
        for layer, block in enumerate(self.blocks):
            query, key, value = block.projected(x)
            keys, values = keys.at[layer, place].set(key), values.at[layer, place].set(value)
            x = block(x, query, keys[layer], values[layer], place)
        return self.characters @ self.norm(x), (keys, values)


def loss(model: Transformer, texts: Int[Array, "n context"]) -> Float[Array, ""]:
    """Of the characters of texts, and of their ends."""
    logits = jax.vmap(model.read)(texts)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, texts)
    counted = jnp.arange(CONTEXT) <= (texts != END).sum(1, keepdims=True)
    return (each * counted).sum() / counted.sum()


def train(texts: np.ndarray, updates: int = UPDATES) -> Transformer:
    """The model."""
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    model, random = Transformer(jax.random.key(SEED)), np.random.default_rng(SEED)
    memory = optimiser.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all")
    def improve(model: Transformer, memory: Any, batch: Array) -> tuple[Transformer, Any]:
        changes, memory = optimiser.update(eqx.filter_grad(loss)(model, batch), memory)
        return eqx.apply_updates(model, changes), memory

    for _ in range(updates):
        model, memory = improve(model, memory, jnp.asarray(texts[random.integers(len(texts), size=BATCH)]))
    return model


# Writing -------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What is asked for: a text that begins like this."""

    beginning: Int[Any, " given"]
    key: Any  # data of a PRNG key, of which each character gets its own


class Writing(NamedTuple):
    """Where a text is."""

    text: Int[Array, " context"]
    place: Token
    cache: Cache


WhileLoop = Callable[..., Writing]
by_loopax: WhileLoop = partial(lx.while_loop, max_steps=CONTEXT)


class Writer(eqx.Module):
    """Goes on with a text to its end. A temperature of 0 takes the most likely characters."""

    model: Transformer
    temperature: float = eqx.field(static=True)
    while_loop: WhileLoop = eqx.field(static=True, default=by_loopax)

    def __call__(self, request: Request) -> Int[Array, " context"]:
        """The text."""

        def goes_on(at: Writing) -> Array:
            is_begun = at.place <= GIVEN
            return (at.place < CONTEXT) & (is_begun | (at.text[at.place - 1] != END))

        def step(at: Writing) -> Writing:
            before = jnp.where(at.place > 0, at.text[at.place - 1], END)
            logits, cache = self.model.step(before, at.place, at.cache)
            given = jnp.take(request.beginning, at.place, mode="clip")
            token = jnp.where(at.place < GIVEN, given, self.chosen(logits, request.key, at.place))
            return Writing(at.text.at[at.place].set(token), at.place + 1, cache)

        empty = jnp.zeros((LAYERS, CONTEXT, PART), self.model.characters.dtype)
        start = Writing(jnp.full(CONTEXT, END, jnp.int32), jnp.int32(0), (empty, empty))
        return self.while_loop(goes_on, step, start).text

    def chosen(self, logits: Float[Array, " characters"], key: Array, place: Token) -> Token:
        """The next character."""
        if self.temperature:
            key = jax.random.fold_in(jax.random.wrap_key_data(key), place)
            return jax.random.categorical(key, logits / self.temperature).astype(jnp.int32)
        return logits.argmax().astype(jnp.int32)


def requests(texts: np.ndarray, number: int) -> list[Request]:
    """Beginnings of texts."""
    return [
        Request(texts[i % len(texts)][:GIVEN], np.asarray(jax.random.key_data(jax.random.key(i))))
        for i in range(number)
    ]


# What it costs -------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Texts in the order of the requests, and what they cost."""

    texts: np.ndarray
    seconds: float
    share: float  # of the steps that were computed, those of a text that was not at its end

    @property
    def characters(self) -> int:
        """That were written."""
        return int((self.texts != END).sum())


def streamed(writer: Writer, asked: list[Request]) -> Run:
    """A lane takes the next request as soon as its text is at its end."""
    list(lx.lanes_stream(writer, asked[:1], num_lanes=LANES))  # compiles
    begun = time.perf_counter()
    with lx.lanes_stream(writer, iter(asked), num_lanes=LANES, ordered=True) as stream:
        texts = np.stack([text for _, text in stream])
        return Run(texts, time.perf_counter() - begun, stream.report().share)


def in_batches(writer: Writer, asked: list[Request], size: int) -> Run:
    """So many at a time, which wait for the longest of them."""
    program = jax.jit(jax.vmap(Writer(writer.model, writer.temperature, lax.while_loop)))
    batches = [jax.tree.map(lambda *x: np.stack(x), *asked[i : i + size]) for i in range(0, len(asked), size)]
    jax.block_until_ready(program(batches[0]))
    begun = time.perf_counter()
    texts = np.concatenate([np.asarray(program(batch)) for batch in batches])
    seconds = time.perf_counter() - begun
    steps = steps_of(texts)
    return Run(texts, seconds, steps.sum() / sum(size * steps[i : i + size].max() for i in range(0, len(steps), size)))


def steps_of(texts: np.ndarray) -> np.ndarray:
    """Of each text: its characters, and its end where there was room for it."""
    return np.minimum((texts != END).sum(1) + 1, CONTEXT)


def print_runs(title: str, runs: dict[str, Run]) -> None:
    table = Table("", "characters/s", "useful steps", title=title)
    for name, run in runs.items():
        table.add_row(name, f"{run.characters / run.seconds:.0f}", f"{run.share:.0%}")
    Console().print(table)


def draw(runs: dict[str, Run]) -> Figure:
    """The lengths of texts, and characters a second."""
    figure = Figure(figsize=(5, 4.4), layout="constrained", dpi=150)
    lengths, speed = figure.subplots(2, 1, height_ratios=[3, 2])
    steps = steps_of(next(iter(runs.values())).texts)
    lengths.hist(steps, 40)
    lengths.set(title=f"{len(steps)} texts that were written", xlabel="characters", ylabel="texts")
    speed.barh(list(runs), [run.characters / run.seconds for run in runs.values()], height=0.6)
    speed.invert_yaxis()
    speed.set(title="Speed", xlabel="characters a second")
    return figure


def main() -> None:
    """Train, write, measure, draw."""
    texts, test = load()
    model = train(texts)
    apart = float(eqx.filter_jit(loss)(model, jnp.asarray(test[:256])))
    print(f"{len(texts)} texts of {steps_of(texts).mean():.0f} characters. Loss of unseen texts: {apart:.2f}.")
    writer, asked = Writer(model, TEMPERATURE), requests(test, TEXTS)
    sampled = {
        "lanes_stream, 64 lanes": streamed(writer, asked),
        "batches of 64": in_batches(writer, asked, LANES),
        "one at a time": in_batches(writer, asked[:ONE_BY_ONE], 1),
    }
    greedy = [run(Writer(model, 0.0), asked[:ONE_BY_ONE]) for run in (streamed, partial(in_batches, size=1))]
    stream, batches, alone = sampled.values()
    for text in stream.texts[:8]:
        print(f"  {in_words(text[:GIVEN])}|{in_words(text)[GIVEN:]}")
    print_runs(f"{TEXTS} texts, sampled", sampled)
    draw(sampled).savefig(FIGURE)
    print(f"Figure: {FIGURE.name}")
    assert apart < LOSS
    assert (stream.texts == batches.texts).all()
    assert (stream.texts[:ONE_BY_ONE] == alone.texts).all()
    assert (greedy[0].texts == greedy[1].texts).all()
    assert stream.seconds < FASTER * batches.seconds


if __name__ == "__main__":
    main()
