"""What does not depend on the inputs of a derivative has a tangent of zero that JAX knows to be one."""

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest

import loopax as lx
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
