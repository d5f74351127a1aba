"""Kinds and derivatives of a user's own, by public names alone: what a kind is told, and what is made of its plan."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

import loopax as lx
from loopax import kinds
from tests.support.problem import XS, H, W, argument_of, scan_expected, scan_program
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
    assert loop.residuals.stored_bytes >= H.nbytes
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
class Runs(lx.Derivative):
    """Makes something of the results."""

    change: Any

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


def a_scan(choice: Any) -> Any:
    step = lambda c, x: ({"a": c["a"] * x, "b": c["b"] + 1}, {"y": c["a"]})
    init = {"a": jnp.ones(2), "b": jnp.asarray(0)}
    return lx.scan(step, init, jnp.arange(3.0), stop=lambda c, y: c["b"] > 5, **argument_of(choice))


@pytest.mark.parametrize("case", WRONG)
def test_results_that_are_not_those_of_the_loop_are_refused(case: str) -> None:
    change, message = WRONG[case]
    for run in (a_scan, jax.jit(a_scan, static_argnums=0)):
        with pytest.raises(TypeError, match=message) as raised:
            run(Runs(change))
        assert str(raised.value).startswith("derivative=Runs(change=")


# ---- another derivative


@dataclass(frozen=True)
class OneMoreStep(lx.Derivative):
    """The derivative of one more step from the last carry, which is held: a phantom gradient."""

    uses_kind = False

    def run(self, call: kinds.LoopCall) -> kinds.Outcome:
        out = call.at(lax.stop_gradient(call.operands)).run()
        more = call.step(out.num_steps, lax.stop_gradient(out.carry)).carry
        with_slope = lambda c, m: c + (m - lax.stop_gradient(m)) if jnp.issubdtype(c.dtype, jnp.floating) else c
        return out._replace(carry=[with_slope(*pair) for pair in zip(out.carry, more, strict=True)])


def step(a: Array, x: Array) -> Array:
    return 0.5 * jnp.cos(a * x)


def settled(c: Any) -> Array:
    return (c[1] < 80) & (abs(c[0] - c[2]) > 1e-12).any()


def while_loop(a: Array, choice: Any, **options: Any) -> Array:
    body = lambda c: (step(a, c[0]), c[1] + 1, c[0])
    return lx.while_loop(settled, body, (jnp.ones_like(a), 0, jnp.zeros_like(a)), **argument_of(choice), **options)[0]


def fori_loop(a: Array, choice: Any, **options: Any) -> Array:
    return lx.fori_loop(0, 80, lambda i, x: step(a, x), jnp.ones_like(a), **argument_of(choice), **options)


def wanted(loop: Any) -> Callable[[Array], Array]:
    def value(a: Array) -> Array:
        before = lax.stop_gradient(loop(lax.stop_gradient(a), "lax"))
        return step(a, before)

    return value


LOOPS = {"while_loop": while_loop, "fori_loop": fori_loop}
A = jnp.array([0.3, 0.9, 1.7])


@pytest.mark.parametrize("loop", ["fori_loop", pytest.param("while_loop", marks=pytest.mark.slow)])
def test_every_mode_has_that_derivative(loop: str) -> None:
    with jax.enable_x64(True):
        a = A.astype(jnp.float64)
        run, other = LOOPS[loop], wanted(LOOPS[loop])
        found = lambda a: run(a, OneMoreStep())
        assert_close(found(a), other(a))
        for transform in (jax.jacfwd, jax.jacrev):
            assert_close(transform(found)(a), transform(other)(a))
            assert_close(jax.jit(jax.jacfwd(transform(found)))(a), jax.jacfwd(transform(other))(a))
        assert_close(jax.vmap(jax.grad(found))(a), jnp.diag(jax.jacrev(other)(a)))
        assert_close(jax.jacrev(jax.vmap(found))(a), jax.jacrev(other)(a))


def test_inside_another_loop_and_in_compact_lanes() -> None:
    def outer(a: Array, choice: Any) -> Array:
        return lx.fori_loop(0, 2, lambda i, a: a + while_loop(a, choice, lanes="compact"), a, kind="bounded").sum()

    found = jax.grad(lambda a: outer(a, OneMoreStep()))(A)
    by_python = lambda a: (first := a + wanted(while_loop)(a)) + wanted(while_loop)(first)
    assert_close(found, jax.grad(lambda a: by_python(a).sum())(A))
