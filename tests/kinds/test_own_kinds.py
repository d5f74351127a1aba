"""A kind of a user's own, by public names alone: what it is told, and that its plan is carried out."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax import kinds
from loopax._src.insight.compare import with_kind
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


@dataclass(frozen=True)
class NeedsBound(lx.Kind):
    """Stores something for every step."""

    needs_bound = True

    def plan(self, loop: kinds.LoopFacts) -> kinds.Plan:
        return kinds.EveryResidual(reason="all is small")


def test_explain_names_kind_plan_and_reason() -> None:
    (loop,) = lx.explain(lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x), x, kind=NeedsBound()), 1.0).loops
    assert loop.stored is not None
    assert (repr(loop.kind), loop.stored.kind, loop.stored.reason) == ("NeedsBound()", "Residuals()", "all is small")


def sine(kind: lx.Kind, bound: int | None = 3) -> Any:
    """The gradient of a loop of one number."""
    return jax.grad(lambda x: lx.while_loop(lambda c: c < 0.9, lambda c: c + 0.5, x, max_steps=bound, kind=kind))(0.5)


@pytest.mark.parametrize(
    ("got", "words"), [(3, "int 3"), (None, "None"), (kinds.EveryCarry, "the class EveryCarry"), (lx.Lax(), "Lax Lax")]
)
def test_a_plan_that_is_none_is_refused(got: Any, words: str) -> None:
    kind = Asks(lambda loop: got)
    with pytest.raises(TypeError, match=rf"(?s)kind=Asks\(.*\): `plan` returned {words}.*, expected a plan"):
        sine(kind)
    with pytest.raises(TypeError, match="expected a plan"):
        jax.hessian(lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x), x, kind=kind))(1.0)


@pytest.mark.parametrize("plan", [kinds.EveryCarry(), kinds.EveryResidual()])
def test_a_plan_that_needs_a_bound_is_refused_without_one(plan: kinds.Plan) -> None:
    kind = Asks(lambda loop: plan)
    assert sine(kind) == 1.0
    with pytest.raises(ValueError, match=r"`plan` returned Every.*Set `needs_bound = True` in the class"):
        sine(kind, bound=None)


def test_a_kind_that_cannot_be_hashed_is_refused() -> None:
    @dataclass
    class Mutable(lx.Kind):
        def plan(self, loop: kinds.LoopFacts) -> kinds.Plan:
            return kinds.EveryCarry()

    with pytest.raises(TypeError, match=r"Mutable\(\) cannot be hashed.*`@dataclass\(frozen=True\)`"):
        sine(Mutable())


@dataclass(frozen=True)
class Runs(lx.Kind):
    """Makes something of the results."""

    change: Any
    derivative = "another"

    def plan(self, loop: kinds.LoopFacts) -> kinds.Plan:
        return kinds.EveryCarry()

    def run(self, call: kinds.LoopCall) -> Any:
        return self.change(call.run())


def with_carry(change: Any) -> Any:
    return lambda out: out._replace(carry=change(out.carry))


WRONG = {
    "nothing": (lambda out: None, "`run` returned None, expected the results of the loop"),
    "no carry": (with_carry(lambda c: None), "carry: got NoneType, expected a list of 3 arrays"),
    "a leaf less": (with_carry(lambda c: c[:-1]), r"carry: got 2, expected a list of 3 arrays \(.*carry\['b'\]\)"),
    "another shape": (
        with_carry(lambda c: [c[0], c[1][None], c[2]]),
        r"carry\[1\] \(carry\['a'\]\): got float64\[1,2\], expected float64\[2\]",
    ),
    "another dtype": (
        with_carry(lambda c: [*c[:2], c[2].astype(jnp.float32)]),
        r"carry\[2\] \(carry\['b'\]\): got float32\[\], expected int64\[\]",
    ),
    "no rows": (lambda out: out._replace(ys=[]), r"ys: got 0, expected a list of 1 arrays \(ys\['y'\]\)"),
    "another number of steps": (lambda out: out._replace(num_steps=1.0), r"num_steps\): got float 1.0, expected int32"),
}


def a_scan(kind: lx.Kind) -> Any:
    step = lambda c, x: ({"a": c["a"] * x, "b": c["b"] + 1}, {"y": c["a"]})
    init = {"a": jnp.ones(2), "b": jnp.asarray(0)}
    return lx.scan(step, init, jnp.arange(3.0), stop=lambda c, y: c["b"] > 5, kind=kind)


@pytest.mark.parametrize("case", WRONG)
def test_results_that_are_not_those_of_the_loop_are_refused(case: str) -> None:
    change, message = WRONG[case]
    for run in (a_scan, jax.jit(a_scan, static_argnums=0)):
        with pytest.raises(TypeError, match=message) as raised:
            run(Runs(change))
        assert str(raised.value).startswith("kind=Runs(change=")


def test_compare_refuses_results_that_are_not_those_of_the_loop() -> None:
    """It runs the loops of a program by another kind."""
    slow = lambda x: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x), x)
    kind = Runs(with_carry(lambda c: [c[0][None]]))
    with pytest.raises(TypeError, match=r"carry\[0\] \(carry\): got float64\[1\], expected float64\[\]"):
        with_kind(jax.make_jaxpr(slow)(1.0), kind)
