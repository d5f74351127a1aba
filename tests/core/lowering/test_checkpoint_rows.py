"""Budgets of checkpoints in loops over rows, in both directions, with fewer checkpoints than two levels need."""

import jax
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.derivatives import XS, H, W, derivatives
from tests.support.problem import BOUND, LOOPS, mixed, scan_step
from tests.support.reference import assert_close

STARTS, COUNTS = np.stack([H, H + 0.1, H - 0.2, 2 * H]), np.array([4, 1, 11, 7])

# One checkpoint has no schedule; with two and more, conditions have one, and known lengths another.
CASES = [("scan", 1), ("reverse_stop", 1), ("scan", 2), ("reverse", 2), ("stop", 2), ("reverse_stop", 2)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in (("reverse", 4), ("stop", 4))]


@pytest.mark.parametrize(("loop", "checkpoints"), CASES)
def test_scan_with_rows(loop, checkpoints):
    gradient = jax.jit(jax.grad(LOOPS[loop][0](lx.Checkpointed(checkpoints)), (0, 1, 2)))
    for n in (0, 1, 6, BOUND):
        assert_close(gradient(W, H, XS, n), derivatives(loop, n).gradient)


STACKED = [(lx.Checkpointed(2), False), (lx.Checkpointed(), True)]
STACKED += [pytest.param(kind, not reverse, marks=pytest.mark.slow) for kind, reverse in STACKED]


@pytest.mark.parametrize(("kind", "reverse"), STACKED)
def test_stacked_pullbacks(kind, reverse):
    """Loops that ran apart and are differentiated together have not saved before the same rows."""

    def program(h, n):
        (h, _), ys = lx.scan(scan_step(W), (h, 0), XS, n, reverse=reverse, kind=kind)
        return mixed((h, ys))

    @jax.jit
    def pulled_back(starts, counts):
        pullbacks = lax.map(lambda args: jax.vjp(lambda h: program(h, args[1]), args[0])[1], (starts, counts))
        return jax.vmap(lambda pullback: pullback(1.0)[0])(pullbacks)

    loop = "reverse" if reverse else "scan"
    wanted = [derivatives(loop, n, h=h).of_start for h, n in zip(STARTS, COUNTS, strict=True)]
    assert_close(pulled_back(STARTS, COUNTS), np.stack(wanted))
