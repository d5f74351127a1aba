"""How many kernels loops start on an H100, beside those of `jax.lax` and of Equinox."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from benchmarks.accelerators.compilers import TARGETS, compiled
from benchmarks.accelerators.counted import (
    BODIES,
    CHECKPOINTS,
    CONTENDERS,
    STEPS,
    Counted,
    batch_loss,
    by_hand_loss,
    counted,
    elementwise,
    gradient_of,
    products,
)
from benchmarks.accelerators.counting import loops
from benchmarks.accelerators.memory import CASES, row

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
        ("while_loop", "loopax, max_steps", "lax", 1.0),
        ("gradient of a scan", "loopax", "lax", 1.0),
        ("gradient of a scan", FEW, EQUINOX, 0.3),
        ("gradient of a while_loop", FEW, EQUINOX, 0.3),
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


@pytest.mark.parametrize("kind", [lx.Checkpointed(), lx.Checkpointed(80), lx.Bounded()], ids=repr)
def test_lengths_that_no_block_divides_are_known(kind):
    """365 days: the last block has fewer steps."""

    def loss(h, w):
        h, ys = lx.scan(lambda h, x: (products(h, w) + 0.01 * x, h.mean()), h, jnp.ones(365), kind=kind)
        return h.sum() + ys.sum()

    found = loops(compiled(TARGETS["h100"], jax.grad(loss, (0, 1)), *BODIES["two products and tanh"][1:]).text)
    assert found
    assert all(loop.trips is not None for loop in found)


@pytest.mark.parametrize("loop", ["static", "dynamic", "unknown"])
def test_no_large_carry_is_copied(loop):
    """With slots: a state is stored before the loop changes it."""
    h, w, kind = jnp.ones((1024, 1024)), jnp.ones((1024, 1024)), lx.Checkpointed(CHECKPOINTS)

    def loss(h, w, n):
        take = lambda h: products(h, w)
        if loop == "unknown":
            return lx.while_loop(lambda h: h.sum() > 0, take, h, kind=kind).sum()
        return lx.fori_loop(0, STEPS if loop == "static" else n, lambda i, h: take(h), h, kind=kind).sum()

    found = loops(compiled(TARGETS["h100"], jax.grad(loss, (0, 1)), h, w, jnp.int32(STEPS)).text)
    assert len(found) >= 6
    assert max(size for loop in found for size in (0, *loop.copies)) < h.nbytes


@pytest.mark.parametrize("options", [{}, {"max_steps": 2 * STEPS}], ids=["without a bound", "max_steps"])
def test_masks_copy_no_large_carry(options):
    """A gradient of lanes in lockstep: finished lanes read what another lane has, of an array that is written."""
    large, w = jnp.ones(2**19), jnp.full(2**19, 0.9)
    gradient = gradient_of(batch_loss(lx.while_loop, **options))(elementwise)
    found = loops(compiled(TARGETS["h100"], gradient, large, w).text)
    assert len(found) >= 3
    assert max(size for loop in found for size in (0, *loop.copies)) < large.nbytes


@pytest.mark.parametrize("body", BODIES)
def test_masks_need_no_kernel(body):
    """A step of a batch in lockstep has no more kernels than that of `lax`, which has no bound."""
    ours, lax = (of("batch of while loops", name, body).loops for name in ("loopax", "lax"))
    assert len(ours) == len(lax) == 1
    assert ours[0].kernels <= lax[0].kernels


MASKS = [
    ({"kind": lx.Checkpointed(CHECKPOINTS)}, 1, 2),
    ({"kind": lx.Checkpointed(), "max_steps": 2 * STEPS}, 1, 1),
    ({"kind": lx.Bounded(), "max_steps": 2 * STEPS}, 1, 1),
    ({"kind": lx.Residuals(), "max_steps": 2 * STEPS}, 4, 1),
    ({}, 1, 2),
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("options", "ahead", "back"), MASKS, ids=repr)
def test_masks_in_gradients(options, ahead, back, body):
    """At most so many kernels more in a step ahead, and in one back, than where nothing is masked."""
    step, *arguments = BODIES[body]

    def kernels(of):
        gradient = gradient_of(of(lx.while_loop, **options))(step)
        return [loop.kernels for loop in loops(compiled(TARGETS["h100"], gradient, *arguments).text)]

    lanes, by_hand = kernels(batch_loss), kernels(by_hand_loss)
    assert len(lanes) == len(by_hand) >= 2
    assert all(a - b <= ahead for a, b in zip(lanes[:-1], by_hand[:-1], strict=True))
    assert lanes[-1] - by_hand[-1] <= back


@pytest.mark.parametrize("name", [name for name in CASES if "Equinox" not in name])
def test_memory(name):
    """What is promised, beside what the derivative of a step needs."""
    assert row(name)["less one step / promised"] <= 1.0
