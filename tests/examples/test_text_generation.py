"""The text generation of the examples: its cache, and the same texts from a stream, from batches and alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import loopax as lx
from tests.support.example_files import load_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_precision")]


@pytest.fixture(scope="module")
def example():
    return load_example("text_generation")


@pytest.fixture
def model(example):
    """Not trained: each character may be the end, so texts have lengths of all sizes."""
    model = example.Transformer(jax.random.key(0))
    return jax.tree.map(lambda x: 8 * x if x.shape == (example.CHARACTERS, example.WIDTH) else x, model)


@pytest.fixture
def asked(example):
    beginnings = np.random.RandomState(0).randint(1, example.CHARACTERS, (24, example.GIVEN)).astype(np.int32)
    return example.requests(beginnings, 24)


def test_steps_with_a_cache_read_what_all_places_read_at_once(example, model):
    text = jnp.asarray(np.random.RandomState(1).randint(1, example.CHARACTERS, example.CONTEXT), jnp.int32)
    empty = jnp.zeros((example.LAYERS, example.CONTEXT, example.PART))

    def step(cache, place):
        before = jnp.where(place > 0, text[place - 1], example.END)
        logits, cache = model.step(before, place, cache)
        return cache, logits

    _, found = jax.lax.scan(step, (empty, empty), jnp.arange(example.CONTEXT, dtype=jnp.int32))
    np.testing.assert_allclose(found, model.read(text), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_texts_of_a_stream_are_those_that_are_written_alone(example, model, asked, temperature):
    writer = example.Writer(model, temperature)
    alone = example.in_batches(writer, asked, 1).texts
    assert (example.streamed(writer, asked).texts == alone).all()
    assert (example.in_batches(writer, asked, 8).texts == alone).all()
    assert (alone[:, : example.GIVEN] == [request.beginning for request in asked]).all()
    if temperature:
        assert len(set(example.steps_of(alone).tolist())) > 5


class Decoder(nnx.Module):
    """A recurrent one in Flax NNX: what it has read is the state of a cell."""

    def __init__(self, characters, rngs):
        self.embedding = nnx.Embed(characters, 16, rngs=rngs)
        self.cell = nnx.GRUCell(16, 32, rngs=rngs)
        self.readout = nnx.Linear(32, characters, rngs=rngs)

    def __call__(self, state, token):
        state, y = self.cell(state, self.embedding(token))
        return state, self.readout(y)


def decode(model, request, while_loop=None):
    """From one token to an end, which is token 0, or so many steps."""

    def step(at):
        text, place, state = at
        state, logits = model(state, text[place])
        token = jax.random.categorical(jax.random.fold_in(request["key"], place), logits)
        return text.at[place + 1].set(token.astype(jnp.int32)), place + 1, state

    goes_on = lambda at: (at[1] < 39) & (at[0][at[1]] != 0)
    start = jnp.zeros(40, jnp.int32).at[0].set(request["first"]), jnp.int32(0), jnp.zeros(32)
    loop = while_loop or (lambda *given: lx.while_loop(*given, max_steps=40))
    text, length, _ = loop(goes_on, step, start)
    return text, length


@pytest.mark.parametrize("as_argument", [False, True], ids=["closed over", "an argument"])
def test_a_model_of_flax_nnx_writes_the_same_in_a_stream(as_argument):
    model = Decoder(12, nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(1), 30)
    requests = [{"first": np.int32(1 + i % 11), "key": keys[i]} for i in range(30)]
    f = jax.tree_util.Partial(decode, model) if as_argument else lambda request: decode(model, request)
    alone = jax.jit(lambda request: decode(model, request, jax.lax.while_loop))
    lengths = set()
    for index, (text, length) in lx.lanes_stream(f, requests, num_lanes=4):
        expected_text, expected_length = alone(requests[index])
        assert (text == expected_text).all()
        assert length == expected_length
        lengths.add(int(length))
    assert len(lengths) > 3
