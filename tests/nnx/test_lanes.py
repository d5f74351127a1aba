"""One NNX object for all lanes, or one for each: every lane behaves as if it were alone."""

import functools as ft
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import loopax as lx
from tests.nnx.cells import (
    COUNTS,
    KEYS,
    XS,
    Cell,
    X,
    alone,
    apply,
    cell,
    fori_loop,
    python,
    same,
    scan,
    stack,
    unchanged,
    while_loop,
)


def lane(loop: Any, options: Any, model: Any, n: Any, x: Any) -> Any:
    model, y = loop(n, apply, (lx.local(model), x), **options)
    return y, model.count[...], model.mean[...]


LANES = [
    (while_loop, "lockstep", jax.vmap),
    (fori_loop, "lockstep", nnx.vmap),
    (fori_loop, "compact", jax.vmap),
    (scan, "compact", nnx.vmap),
]


@pytest.mark.parametrize(("loop", "lanes", "vmap"), LANES)
def test_one_module_for_lanes_with_counts_of_their_own(loop: Any, lanes: Any, vmap: Any) -> None:
    """Each has its own statistics and dropout counter; the module that they share stays as it is."""
    model = cell()
    jit = jax.jit if vmap is jax.vmap else nnx.jit
    y, counts, means = jit(vmap(partial(lane, loop, {"lanes": lanes}), in_axes=(None, 0, 0)))(model, COUNTS, XS)
    for found, expected in zip((y, means, counts), alone(), strict=True):
        np.testing.assert_allclose(found, expected)
    assert counts.tolist() == COUNTS.tolist()
    unchanged(model, cell)


def loss(run: Any, model: Any) -> Any:
    return sum((y**2).sum() + mean.sum() for y, _, mean in run(model))


@ft.cache
def gradient_of_each_alone() -> Any:
    def apart(model: Any) -> Any:
        for n, x in zip(COUNTS, XS, strict=True):
            copy, y = python(int(n), nnx.clone(model), x)
            yield y, copy.count[...], copy.mean[...]

    return nnx.state(nnx.jit(nnx.grad(partial(loss, apart)))(cell()))


@pytest.mark.parametrize("kind", ["auto", lx.Checkpointed(2), "residuals"], ids=str)
def test_gradient_of_shared_weights_over_lanes(kind: Any) -> None:
    options = {"kind": kind, "lanes": "compact"}
    batched = lambda model: [nnx.vmap(partial(lane, fori_loop, options), in_axes=(None, 0, 0))(model, COUNTS, XS)]
    same([nnx.state(nnx.jit(nnx.grad(partial(loss, batched)))(cell()))], [gradient_of_each_alone()])


of_key = nnx.jit(Cell)


def test_a_module_for_each_lane() -> None:
    """`nnx.vmap` hands out and takes back what the loop of each lane has changed in place."""
    models = stack()
    run = nnx.vmap(lambda model, n, x: while_loop(n, apply, (model, x))[1])
    y = nnx.jit(run)(models, COUNTS, XS)
    for i, (n, x) in enumerate(zip(COUNTS, XS, strict=True)):
        expected, last = python(int(n), of_key(KEYS[i]), x)
        np.testing.assert_allclose(y[i], last)
        np.testing.assert_allclose(models.mean[i], expected.mean[...])
    assert models.count[...].tolist() == COUNTS.tolist()


def test_items_of_lanes_map() -> None:
    layers = stack()
    run = lambda layer: lx.fori_loop(0, 2, lambda _, c: apply(c), (layer, X))
    _, ys = nnx.jit(lambda layers: lx.lanes_map(lambda layer: run(lx.local(layer)), layers, num_lanes=2))(layers)
    np.testing.assert_allclose(ys, np.stack([python(2, of_key(key), X)[1] for key in KEYS]))
    with pytest.raises(TypeError, match="f of lanes_map changes an NNX object"):
        lx.lanes_map(lambda layer: run(layer)[1], layers, num_lanes=2)
