"""The text generation of the examples: its cache, and the same texts from a stream, from batches and alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import loopax as lx

pytestmark = pytest.mark.slow


@pytest.fixture
def model(example):
    """Not trained: each character may be the end, so texts have lengths of all sizes."""
    model = example.Transformer(jax.random.key(0))
    return jax.tree.map(lambda x: 8 * x if x.shape == (example.CHARACTERS, example.WIDTH) else x, model)


def test_steps_with_a_cache_read_what_all_places_read_at_once(example, model):
    text = jnp.asarray(np.random.RandomState(1).randint(1, example.CHARACTERS, example.CONTEXT), jnp.int32)
    empty = jnp.zeros((example.LAYERS, example.CONTEXT, example.PART))

    def step(cache, place):
        before = jnp.where(place > 0, text[place - 1], example.END)
        logits, cache = model.step(before, place, cache)
        return cache, logits

    _, found = jax.lax.scan(step, (empty, empty), jnp.arange(example.CONTEXT, dtype=jnp.int32))
    np.testing.assert_allclose(found, model.read(text), rtol=2e-4, atol=2e-4)


def test_texts_of_a_stream_are_those_that_are_written_alone(example, model):
    beginnings = np.random.RandomState(0).randint(1, example.CHARACTERS, (24, example.GIVEN)).astype(np.int32)
    asked, writer = example.requests(beginnings, 24), example.Writer(model, 1.0)
    alone = example.in_batches(writer, asked, 1).texts
    assert (example.streamed(writer, asked).texts == alone).all()
    assert (example.in_batches(writer, asked, 8).texts == alone).all()
    assert (alone[:, : example.GIVEN] == [request.beginning for request in asked]).all()
    assert len(set(example.steps_of(alone).tolist())) > 5


@pytest.mark.parametrize("as_argument", [False, True], ids=["closed over", "an argument"])
def test_a_model_of_flax_nnx_gives_the_same_in_a_stream(as_argument):
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def run(model, item, while_loop=lambda *given: lx.while_loop(*given, max_steps=40)):
        step = lambda c: (c[0] + 1, jnp.tanh(model(c[1])) + item["x"])
        return while_loop(lambda c: c[0] < item["n"], step, (jnp.int32(0), item["x"]))[1]

    items = [{"x": np.full(3, i / 30, np.float32), "n": np.int32(1 + i * 7 % 30)} for i in range(30)]
    f = jax.tree_util.Partial(run, model) if as_argument else lambda item: run(model, item)
    alone = jax.jit(lambda item: run(model, item, jax.lax.while_loop))
    for index, result in lx.lanes_stream(f, items, num_lanes=4):
        np.testing.assert_allclose(result, alone(items[index]), rtol=1e-5)
