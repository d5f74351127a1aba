"""The peers' own tests of their loops, run on loopax's; and that the adapters say what they mean."""

import os
from functools import partial
from pathlib import Path

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx.transforms import iteration

import loopax as lx
from tests.peers.exchange import QUICK, RULES, equinox_while_loop, jax_with_loopax
from tests.peers.nnx_scan import nnx_scan
from tests.peers.run import PEERS, available, run
from tests.support.reference import assert_close

FOLDER = os.environ.get("LOOPAX_PEERS", "")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="LOOPAX_PEERS names no folder with checkouts (tests/peers/README.md)")
@pytest.mark.parametrize("peer", PEERS)
def test_peer(peer: str) -> None:
    if peer not in available(Path(FOLDER)):
        pytest.skip(f"the folder that LOOPAX_PEERS names holds no checkout of {peer}")
    assert run(peer, Path(FOLDER)) == 0


def test_every_exclusion_has_a_reason() -> None:
    assert {f"{file}.py" for file in RULES} <= {Path(file).name for files in PEERS.values() for file in files}
    for rule in [rule for excluded in RULES.values() for rule in excluded]:
        assert rule.keys() <= {"tests", "reason", "skip", "from_line"}
        assert rule["tests"]
        assert rule["reason"]


def test_the_quick_tests_are_of_files_that_are_run() -> None:
    assert {f"{file}.py" for file in QUICK} <= {Path(file).name for file in PEERS["diffrax"]}
    assert sum(map(len, QUICK.values())) == 40


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kind": "checkpointed", "checkpoints": 3}, {"kind": "bounded", "base": 4}])
def test_while_loop_for_equinox(options: dict) -> None:
    def loss(run, x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]), c[2].at[c[0]].set(c[1]))
        _, x, rows = run(lambda c: True, body, (0, x, jnp.zeros(6)), max_steps=6, buffers=lambda c: c[2], **options)
        return x + rows.sum()

    actual, wanted = (
        jax.jit(jax.value_and_grad(partial(loss, run)))(1.0) for run in (equinox_while_loop, eqxi.while_loop)
    )
    assert_close(actual, wanted)


class Layer(nnx.Module):
    """A weight, and counts of the calls, in as many rows."""

    def __init__(self, weight: jax.Array, rows: int | None) -> None:
        self.weight = nnx.Param(weight)
        self.calls = nnx.Variable(jnp.zeros((4,) if rows is None else (rows, 4), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return jnp.sin(x + self.weight[...].sum())


BY_TYPE = nnx.StateAxes({nnx.Param: 0, ...: None})
CALLS_CARRIED = nnx.StateAxes({nnx.Param: 1, ...: nnx.Carry})
SCANS = [(axis, 4, updates) for axis in (0, 1, -1, None) for updates in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "rows", "updates"), [*SCANS, (BY_TYPE, None, True), (CALLS_CARRIED, None, True)])
def test_scan_for_nnx(axis, rows, updates) -> None:
    def loss(weight, scan):
        layer = Layer(weight, rows)
        axes = {"in_axes": (axis, nnx.Carry, {"a": 1, "b": None}), "out_axes": (1, nnx.Carry)}
        run = scan(graph_updates=updates, reverse=True, length=4, **axes)
        ys, carry = run(lambda layer, c, xs: (jnp.cos(c), layer(c) * xs["a"] + xs["b"]))(
            layer, jnp.ones(4), {"a": jnp.arange(16.0).reshape(4, 4), "b": 0.5}
        )
        return (ys**2).sum() + carry.sum(), (ys, layer.calls[...])

    weight = jnp.linspace(-1, 1, 16).reshape(4, 4)
    actual, wanted = (jax.value_and_grad(loss, has_aux=True)(weight, scan) for scan in (nnx_scan, nnx.scan))
    assert_close(actual, wanted)


def scan_as_jax_calls_it(*args, _split_transpose, **options):
    return lx.scan(*args, **options)


def test_scan_of_nnx_itself_on_that_of_loopax(monkeypatch) -> None:
    """What NNX hands to `jax.lax.scan`: states whose Variables lose the name of their first axis in the body."""
    traces, weights = [], jnp.linspace(-1, 1, 12).reshape(3, 2, 2)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def through(weight, x):
        traces.append(weight.out_sharding)
        weight[...] += 1.0
        return jnp.sin(weight[...] @ x)

    def run():
        stacked = nnx.Param(weights, out_sharding=("layers", "in", "out"), eager_sharding=False)
        results = [through(stacked, jnp.ones(2)) for _ in range(2)]
        return results, stacked[...], stacked.out_sharding

    *wanted, names = run()
    exchanged = jax_with_loopax()
    exchanged.lax.scan = scan_as_jax_calls_it
    monkeypatch.setattr(iteration, "jax", exchanged)
    *actual, names_too = run()
    assert_close(actual, wanted)
    assert names == names_too == ("layers", "in", "out")
    assert traces == [("in", "out")] * 2  # JAX's, and loopax's: a second call is not traced
