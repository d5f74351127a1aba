"""A kind of a user's own, by public names alone: what it is told, and that its plan is carried out."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax import kinds
from tests.support.problem import XS, H, W, scan_expected, scan_program
from tests.support.reference import assert_close


@dataclass(frozen=True)
class Asks(lx.Kind):
    """Notes what it is told."""

    plan_for: Any
    told: list[kinds.LoopFacts] = field(default_factory=list, compare=False)

    def plan(self, loop: kinds.LoopFacts) -> kinds.Plan:
        self.told.append(loop)
        return self.plan_for(loop)


PLANS = [
    pytest.param(kinds.Checkpoints(3), marks=pytest.mark.slow),
    kinds.Checkpoints(),
    kinds.EveryCarry(),
    kinds.EveryResidual(),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_gradients_of_lanes(plan: kinds.Plan) -> None:
    kind = Asks(lambda loop: plan)
    counts = jnp.array([0, 3, 11])
    lanes = jax.jit(jax.vmap(jax.grad(scan_program(kind), (0, 1, 2)), (None, None, None, 0)))(W, H, XS, counts)
    for lane, n in enumerate(counts):
        wanted = jax.grad(lambda *a, n=n: scan_expected()(*a, n), (0, 1, 2))(W, H, XS)
        assert_close(jax.tree.map(lambda g, lane=lane: g[lane], lanes), wanted)


def test_what_it_is_told() -> None:
    kind = Asks(lambda loop: kinds.EveryCarry())
    step = lambda i, c: (c[0] + 1, jnp.tanh(W @ c[1]))
    jax.grad(lambda h: lx.fori_loop(0, 7, step, (0, h), kind=kind)[1].sum())(H)
    loop = kind.told[0]
    assert (loop.bound, loop.is_fixed, loop.bound_is_loose, loop.length_is_known) == (7, True, False, True)
    assert loop.sizes_are_known
    assert loop.step.carry_bytes == H.nbytes
    assert loop.step.residual_bytes >= H.nbytes
    assert loop.step.evaluation > 0
    kind.told.clear()
    lx.fori_loop(0, 7, step, (0, H), kind=kind)
    assert kind.told == []


def test_reverse_mode_is_refused_with_its_error() -> None:
    kind = Asks(lambda loop: kinds.NoReverseMode(NotImplementedError, "not with this one"))
    loop = lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x), x, kind=kind)
    assert jnp.isfinite(jax.jvp(loop, (1.0,), (1.0,))[1])
    with pytest.raises(NotImplementedError, match="not with this one"):
        jax.grad(loop)(1.0)


@dataclass(frozen=True)
class NeedsBound(lx.Kind):
    """Stores something for every step."""

    needs_bound = True

    def plan(self, loop: kinds.LoopFacts) -> kinds.Plan:
        return kinds.EveryResidual(reason="all is small")


def test_a_loop_without_a_bound_is_refused_where_it_is_called() -> None:
    with pytest.raises(ValueError, match="stores something for every step"):
        lx.while_loop(lambda x: x < 3, lambda x: x + 1, 0.0, kind=NeedsBound())


def test_explain_names_kind_plan_and_reason() -> None:
    (loop,) = lx.explain(lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x), x, kind=NeedsBound()), 1.0).loops
    assert loop.stored is not None
    assert (repr(loop.kind), loop.stored.kind, loop.stored.reason) == ("NeedsBound()", "Residuals()", "all is small")
