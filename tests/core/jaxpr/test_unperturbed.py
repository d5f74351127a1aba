"""What does not depend on the inputs of a derivative has a tangent of zero that JAX knows to be one."""

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import loopax as lx
from loopax._src.core.autodiff import jvp
from loopax._src.core.jaxpr.dependence import dependence, tangent_dependence
from tests.support.problem import KINDS, name_of


def run(x: Any, kind: Any) -> Any:
    """Perturbed: the first part of the carry, and from the second step on the last. Not perturbed: the middle."""

    def body(i: Any, carry: Any) -> Any:
        x, clock, late = carry
        return jnp.sin(x * clock), clock + 0.5, late + x

    x, clock, late = lx.fori_loop(0, 4, body, (x, 1.0, 0.0), kind=kind)
    return x, clock, late


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd], ids=name_of)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_unperturbed_parts_of_the_carry_have_no_tangent(kind: Any, transform: Any) -> None:
    """`nondifferentiable` raises where a value has a tangent, be it zero."""

    def loss(x: Any) -> Any:
        x, clock, late = run(x, kind)
        return x + late + eqxi.nondifferentiable(clock)

    def wrong(x: Any) -> Any:
        return eqxi.nondifferentiable(run(x, kind)[2], msg="has a tangent")

    transform(loss)(0.3)
    with pytest.raises(RuntimeError, match="has a tangent"):
        transform(wrong)(0.3)


DECIDED = {
    "the number of steps": lambda x: lax.while_loop(lambda y: y < x, lambda y: y + 0.25, 0.0),
    "the number of steps of a loop of loopax": lambda x: lx.while_loop(lambda y: y < x, lambda y: y + 0.25, 0.0),
    "a branch": lambda x: lax.cond(x > 0.2, lambda: (1.5, 0), lambda: (0.5, 1))[0],
    "a row": lambda x: jnp.arange(5.0)[jnp.int32(5 * x)],
    "a stopped value": lambda x: jax.jit(lambda x: (lax.stop_gradient(x), x))(x)[0],
}


@pytest.mark.parametrize("decided", DECIDED)
def test_what_a_value_decides_is_known_to_have_no_tangent(decided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the derivative of the body is traced, which is done once."""
    traced, jvp_body = [], jvp.jvp_body
    monkeypatch.setattr(jvp, "jvp_body", lambda *arguments: traced.append(arguments) or jvp_body(*arguments))

    def loss(x: Any) -> Any:
        step = lambda _, carry: (jnp.sin(carry[0]) * carry[1], DECIDED[decided](carry[0]))
        x, clock = lx.fori_loop(0, 4, step, (x, 1.0))
        return x + eqxi.nondifferentiable(clock)

    jax.make_jaxpr(jax.grad(loss))(0.3)
    assert sum(any(eqn.primitive.name == "sin" for eqn in body.eqns) for body, *_ in traced) == 1


def through_a_reference(x: Any) -> Any:
    reference = jax.new_ref(jnp.zeros(()))
    reference[...] = x * x
    return reference[...]


@pytest.mark.parametrize("function", [through_a_reference, jax.jit(through_a_reference)])
@pytest.mark.parametrize("find", [dependence, tangent_dependence])
def test_what_goes_through_a_mutable_array_depends_on_it(function: Any, find: Any) -> None:
    assert find(jax.make_jaxpr(function)(1.0)) == (1,)
    program = lambda x: run(function(x), lx.Auto())[0]
    assert jax.grad(program)(0.3) == pytest.approx(2 * 0.3 * jax.grad(lambda x: run(x, lx.Auto())[0])(0.09))
    first = next(leaf for leaf in lx.explain(program, 0.3).loops[0].leaves if leaf.role == "carried")
    assert first.is_differentiated
