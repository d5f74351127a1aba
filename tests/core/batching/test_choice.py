"""`lanes="auto"`: which way a batch is expected to be fastest, from what its steps cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.batching.loop import chosen
from loopax._src.core.ir.lanes import AutoLanes, Compact, Lockstep, Sequential, stage_sizes
from tests.support.reference import assert_close

W = np.full((64, 64), 0.1, np.float32)
X = np.ones((1000, 25), np.float32)

BODIES = {
    "layer": (lambda h: jnp.tanh(W @ h), 64),
    "regression": (lambda h: h - jax.nn.sigmoid(X @ h) @ X, 25),
    "two operations": (lambda h: h * 0.5 + 1.0, 3),
    "functions": (lambda h: jnp.sin(h) + jnp.exp(h), 2000),
}
CHOICES = [
    ("layer", 1024, "compact"),  # a product of matrices is faster than products of a matrix and vectors
    ("layer", 8, "sequential"),  # and is called by few lanes
    ("regression", 32, "sequential"),
    ("two operations", 1024, "lockstep"),
    ("functions", 64, "compact"),  # one operation on a large array, which runs on several cores
    ("layer", 1, "lockstep"),
]
NAMES = {Lockstep: "lockstep", Compact: "compact", Sequential: "sequential"}


def body_of(name):
    function, size = BODIES[name]
    return jax.make_jaxpr(lambda row, h: function(h))(0, jax.ShapeDtypeStruct((size,), jnp.float32))


@pytest.mark.parametrize(("body", "lanes", "name"), CHOICES)
def test_choices(body, lanes, name):
    assert NAMES[type(chosen(AutoLanes(), body_of(body), 0, lanes))] == name


@pytest.mark.parametrize("lanes", [8, 1024, 16384])
def test_no_lane_runs_alone_on_another_device(lanes, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = chosen(AutoLanes(), body_of("layer"), 0, lanes)
    assert NAMES[type(found)] == ("compact" if lanes == 16384 else "lockstep")


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda *xs: f(*xs).sum())])
@pytest.mark.parametrize("body", ["layer", "two operations", "regression"])
def test_results_are_those_of_lockstep(body, transform):
    function, size = BODIES[body]
    steps = np.array([3, 0, 7, 1])
    starts = np.ones((4, size), np.float32)

    def run(lanes):
        loop = lambda h, n: lx.fori_loop(0, n, lambda _, h: function(h), h, lanes=lanes, max_steps=7)
        return jax.jit(transform(jax.vmap(loop)))(starts, steps)

    assert_close(run("auto"), run("lockstep"), 1e-4)


@pytest.mark.parametrize(
    ("lanes", "is_cheap", "sizes"),
    [
        (1024, False, [1024, 512, 256, 95, 32, 8]),
        (32, False, [32, 8]),
        (16, False, [16, 4]),
        (8, False, [8]),
        (1024, True, [1024, 342, 114, 38]),
        (64, True, [64]),
        (1, False, [1]),
        (0, False, [0]),
    ],
)
def test_stages_by_default(lanes, is_cheap, sizes):
    assert stage_sizes(Compact(), lanes, is_cheap) == sizes
