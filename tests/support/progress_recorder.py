"""Displays that draw nothing, and loops that report to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src import progress as public

STRIDE = 10  # of the displays below: a report after the first step, and after every ten more


class Recorder:
    """Displays that draw nothing, and remember what they are told."""

    def __init__(self, stride=STRIDE):
        self.stride = stride
        self.begun, self.reports, self.ended, self.closed = [], [], [], []

    def forget(self):
        """All runs so far."""
        self.begun, self.reports, self.ended, self.closed = [], [], [], []

    def begin(self, key, label, every, style, *, total, parts, lanes, size, unit, before=0):
        self.begun.append((label, total, parts, lanes))
        return len(self.begun)

    def report(self, number, steps, active, inner):
        self.reports.append((number, steps, active))
        return self.stride

    def end(self, number, steps):
        self.ended.append((number, steps))

    def close(self, key):
        self.closed.append(key)

    @property
    def steps(self):
        """Of all runs, in the order in which they were reported."""
        return [steps for _, steps, _ in self.reports]

    @property
    def lanes(self):
        return [active for _, _, active in self.reports]


def expected(steps, stride=STRIDE):
    return list(range(1, steps, stride))


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(public, "DISPLAYS", found)
    return found


def once(recorder, steps, total=None):
    """One run of so many steps was shown, and nothing else."""
    assert [end for _, end in recorder.ended] == [steps]
    assert recorder.steps == expected(steps)
    assert recorder.begun[0][1] == (steps if total is None else total)
    assert len(recorder.begun) == 1


def summed(n, progress, **options):
    return lx.fori_loop(0, n, lambda i, x: jnp.sin(x) + 0.1, 1.0, progress=progress, **options)


def counted(n, progress, **options):
    def body(carry):
        return carry[0] + 1, jnp.sin(carry[1])

    return lx.while_loop(lambda carry: carry[0] < n, body, (0, 1.0), progress=progress, **options)[1]


def scanned(n, progress, **options):
    xs = np.linspace(0.0, 1.0, 40)
    return lx.scan(lambda c, x: (jnp.sin(c + x), c), 1.0, xs, length=n, progress=progress, **options)[0]


def rolled_out(n, progress, **options):
    return lx.rollout(lambda x: (jnp.sin(x) + 0.1, x), 1.0, n, max_steps=40, progress=progress, **options).state


KINDS = {
    "checkpointed": lx.Checkpointed(),
    "few": lx.Checkpointed(3),
    "bounded": lx.Bounded(),
    "residuals": lx.Residuals(),
    "auto": lx.Auto(),
}


def powers(n, progress, **options):
    """A value of which the derivative needs every carry."""

    def value(x):
        return lx.fori_loop(0, n, lambda i, c: jnp.sin(c * x), x, progress=progress, **options)

    return value


def both(f, *arguments):
    """What a program gives with progress and without, compiled as one, after all reports."""
    found = jax.jit(lambda *arguments: (f(True)(*arguments), f(None)(*arguments)))(*arguments)
    return jax.block_until_ready(found)


def same(pair):
    """To the last bit."""
    for shown, silent in zip(*map(jax.tree.leaves, pair), strict=True):
        np.testing.assert_array_equal(shown, silent)
