"""A reverse sweep that holds its step once: derivatives and counts are those of the other ways to compile it."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from benchmarks.counter import Counter
from loopax._src.core.lowering import sweep as sweep_large
from loopax._src.schedule.binomial import evaluations
from tests.core.test_compositions import KINDS, computed, expected, program
from tests.support.problem import XS, H, W
from tests.support.reference import assert_close


@pytest.fixture(autouse=True)
def _all_steps_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sweep_large, "LARGE_STEP", 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


SLOW = [("reverse over reverse", "reverse", "slots"), ("hessian", "reverse_stop", "Checkpointed")]
SLOW += [("jacrev of jacrev", "unbounded while", "slots"), ("vmap of grad", "unbounded while", "slots")]
SLOW += [("grad of vmap", "scan", "Checkpointed"), ("hessian of vmap", "reverse_stop", "slots")]
CASES = [("checkpoint", "scan", "Checkpointed"), ("vmap of grad", "reverse_stop", "slots")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("composition", "loop", "kind"), CASES)
def test_compositions(composition, loop, kind):
    found = jax.jit(lambda n: computed(composition, program(loop, kind), n))(np.int64(6))
    assert_close(found, expected(composition, loop, KINDS[kind].step, KINDS[kind].cut))


def nested(kind, n, w, x, rows):
    """With an inner loop, constants, rows, an integer in the carry, and outputs."""

    def step(carry, row):
        h, count = carry
        h = lx.fori_loop(0, 2, lambda i, h: jnp.tanh(w @ h + jnp.sin(h) * row), h, kind=kind)
        return (h, count + 1), jnp.cos(h) * row.sum()

    (h, _), ys = lx.scan(step, (x, 0), rows, length=n, kind=kind)
    return (h**2).sum() + (ys * ys).sum()


@pytest.mark.parametrize("checkpoints", [3, *(pytest.param(c, marks=pytest.mark.slow) for c in (1, 10, 64))])
def test_as_many_evaluations_as_the_schedule_says(checkpoints):
    counter = Counter()
    loop = lambda x, n: lx.fori_loop(
        0, n, lambda i, x: jnp.sin(counter(x)), x, kind=lx.Checkpointed(checkpoints), max_steps=100
    )
    gradient = jax.jit(jax.grad(loop))
    for n in (0, 1, 2, 3, 29, 31):
        assert counter.of(gradient, 1.0, n) == evaluations(n, checkpoints)


def test_the_step_stands_in_the_program_once():
    """Beside the loop forward: two copies of each inner loop's step, and of the derivative one."""
    loop = lambda x: nested(lx.Checkpointed(3), 11, W, x, XS)
    text = jax.jit(jax.grad(loop)).lower(H).as_text()
    assert text.count("stablehlo.tanh") == 3  # forward; in the sweep outside; in the sweep inside
