"""How many kernels loops start on an H100, beside those of `jax.lax` and of Equinox."""

from functools import cache

import pytest

from benchmarks.accelerators.compilers import TARGETS
from benchmarks.accelerators.counted import BODIES, CHECKPOINTS, CONTENDERS, Counted, counted

BY_NAME = {(one.program, one.name): one for one in CONTENDERS}
EQUINOX = f"Equinox, {CHECKPOINTS} checkpoints"
FEW = f"loopax Checkpointed(checkpoints={CHECKPOINTS})"


@cache
def of(program: str, name: str, body: str) -> Counted:
    return counted(TARGETS["h100"], BY_NAME[program, name], body)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("program", "name", "peer", "bound"),
    [
        ("scan", "loopax", "lax", 1.0),
        ("while_loop", "loopax", "lax", 1.0),
        ("gradient of a scan", "loopax", "lax", 1.0),
        ("gradient of a scan", FEW, EQUINOX, 0.8),
        ("gradient of a while_loop", FEW, EQUINOX, 0.8),
    ],
)
def test_kernels_in_all(program, name, peer, bound, body):
    ours, theirs = of(program, name, body).kernels, of(program, peer, body).kernels
    assert ours is not None
    assert theirs is not None
    assert ours <= bound * theirs


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", ["loopax", "loopax Residuals()", "loopax Bounded()", "loopax Checkpointed()"])
def test_lengths_are_known(name, body):
    """Of all loops of a gradient of static length."""
    found = of("gradient of a scan", name, body).loops
    assert found
    assert all(loop.trips is not None for loop in found)
