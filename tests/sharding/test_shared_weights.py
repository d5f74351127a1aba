"""Weights that all devices of a `shard_map` share, in loops of which each takes another number of steps."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopax as lx
from tests.support.compiled import collectives, collectives_in_loops
from tests.support.problem import KINDS, name_of
from tests.support.reference import assert_close
from tests.support.shared_weights import COUNTS, OWN, SHARED, WEIGHT, XS, fori, mesh, of, on_devices

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("second", [[], ["second"]], ids=["first", "second"])
def test_derivatives_are_those_without_devices(second):
    """In a process of its own: devices that wait for each other would wait for ever."""
    command = [sys.executable, "-m", "tests.support.shared_weights", *second]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = {"fori Bounded", "higher_order on rows of devices", "free lanes", "rewritten around the devices"}
    assert names <= set(found)
    wrong = {name: pair for name, pair in found.items() if pair[0] != pytest.approx(pair[1], rel=1e-9)}
    assert wrong == {}


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_one_sum_stands_behind_the_loop(kind):
    gradient = jax.jit(jax.grad(on_devices(of(fori, kind=kind, max_steps=8))))
    text = gradient.lower(WEIGHT).compile().as_text() or ""
    assert collectives(text) == ["all-reduce"]
    assert collectives_in_loops(text) == []


def shared(x):
    """The same on all devices."""
    return lax.pmax(x, "d")


COLLECTIVES = {
    "psum": lambda y: lax.psum(y, "d"),
    "pmax": lambda y: lax.pmax(y, "d") + 0.0 * y,
    "ppermute": lambda y: lax.ppermute(y, "d", [(0, 1)]),
    "all_gather": lambda y: lax.all_gather(y, "d").sum(),
    "psum of what is shared": lambda y: y * lax.psum(shared(y), "d"),
    "psum in cond": lambda y: lax.cond(y > 0, lambda: lax.pmean(y, "d"), lambda: lax.psum(y, "d")),
    "psum in a loop": lambda y: lx.fori_loop(0, 2, lambda _, y: lax.psum(y, "d"), y),
}
LOOPS = {
    "fori": lambda step, y, n: lx.fori_loop(0, n, lambda _, y: step(y) + 0.1, y),
    "while": lambda step, y, n: lx.while_loop(lambda c: c[1] < n, lambda c: (step(c[0]) + 0.1, c[1] + 1), (y, 0))[0],
}


def on_all(shard):
    mapped = jax.shard_map(lambda x, n: shard(x[0], n[0])[None], mesh=mesh(), in_specs=(OWN, OWN), out_specs=OWN)
    return jax.jit(mapped)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_are_refused_where_numbers_of_steps_differ(collective):
    step = COLLECTIVES[collective]
    for run in LOOPS.values():
        with pytest.raises(NotImplementedError, match=r"communicates over the axis 'd' of a `jax\.shard_map`"):
            on_all(lambda x, n, run=run: run(step, x, n)).lower(XS, COUNTS)
        on_all(lambda x, n, run=run: run(step, x, shared(n))).lower(XS, COUNTS)


def test_a_mark_of_a_shared_value_is_no_collective():
    def shard(x, n):
        w = shared(x)
        return lx.fori_loop(0, n, lambda _, y: y * lax.pcast(w, "d", to="varying") + x, x)

    def expected(x, n):
        y = x
        for _ in range(n):
            y = y * XS.max() + x
        return y

    wanted = list(map(expected, XS, COUNTS))
    assert_close(on_all(shard)(XS, COUNTS), jnp.array(wanted))


def test_results_vary_as_numbers_of_steps_do():
    """Else JAX would take what one device has for what all have."""
    one = jnp.ones(())
    results = {
        "num_steps": lambda n: lx.fori_loop(0, n, lambda i, y: y + 1, 0, info=True)[1].num_steps,
        "carry": lambda n: lx.fori_loop(0, n, lambda i, y: y + 1, 0),
        "rows": lambda n: lx.scan(lambda c, _: (c, one), 0, None, length=n, max_steps=9)[1],
        "carry of while_loop": lambda n: lx.while_loop(lambda c: c < n, lambda c: c + 1, 0),
        "rows until stop": lambda n: lx.scan(lambda c, _: (c + 1, one), 0, length=9, stop=lambda c, y: c >= n)[1],
    }
    for f in results.values():
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(jax.shard_map(lambda n, f=f: f(n[0]), mesh=mesh(), in_specs=OWN, out_specs=SHARED), COUNTS)


@pytest.mark.parametrize("kind", [lx.Checkpointed(2), lx.Bounded()])
def test_pmap(kind):
    """Of JAX's older map over devices, with the gradient outside and inside of it."""
    f = of(fori, kind=kind, max_steps=8)
    outside = jax.value_and_grad(lambda w: jax.pmap(f, in_axes=(None, 0, 0))(w, XS, COUNTS).sum())
    inside = jax.pmap(jax.value_and_grad(f), in_axes=(None, 0, 0))
    wanted = jax.jit(jax.vmap(jax.value_and_grad(of(fori, max_steps=8)), (None, 0, 0)))(WEIGHT, XS, COUNTS)
    assert_close(inside(WEIGHT, XS, COUNTS), wanted)
    assert_close(outside(WEIGHT), tuple(x.sum() for x in wanted))
