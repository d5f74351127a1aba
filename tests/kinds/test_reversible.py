"""A kind with an inverse, written outside of loopax: what it stores, and what is refused.

Its values and derivatives under every transformation are those of `tests/core/test_compositions.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import loopax as lx
from loopax._src.core.ir.reverse_sweep import ReverseSweep, reverse_sweep_p
from tests.kinds.reversible import Reversible
from tests.support.problem import BOUND, HALVES, LOOPS, UNBOUNDED, XS, H, W, halves_back, in_halves, mixed

OTHER = lx.Checkpointed(4)
MAKERS = {name: make for name, (make, _) in LOOPS.items()} | UNBOUNDED
start = HALVES.start


def sweeps(program: Any, *args: Any) -> list[ReverseSweep]:
    """Those that stand in a program."""
    found = [eqn.params for eqn in jax.make_jaxpr(program)(*args).jaxpr.eqns if eqn.primitive is reverse_sweep_p]
    return [ReverseSweep(**params) for params in found]


@pytest.mark.parametrize("loop", MAKERS)
def test_a_gradient_stores_one_carry(loop: str) -> None:
    program = MAKERS[loop](lambda inverse, _: Reversible(inverse), step=HALVES)
    (sweep,) = sweeps(jax.grad(program), W, H, XS, 5)
    assert sweep.inverse is not None
    assert sweep.saving.rows(BOUND) == 1


def test_a_wrong_inverse_gives_a_wrong_gradient() -> None:
    """It is the inverse that walks back, not a replay."""
    wrong = Reversible(lambda i, c: halves_back(2.0 * W, c, XS[i]))
    loop = lambda h, kind: mixed(lx.fori_loop(0, 5, lambda i, c: in_halves(W, c, XS[i]), start(h), kind=kind)[:2])
    found, expected = (jax.grad(loop)(H, kind) for kind in (wrong, OTHER))
    assert not jnp.allclose(found, expected)


def test_accumulators_are_not_walked_back() -> None:
    """Leaves that the derivative does not read are not stored."""

    def program(h: Array) -> Array:
        body = lambda i, c: (in_halves(W, c[0], XS[i]), c[1] + c[0][0])
        kind = Reversible(lambda i, c: ((before := halves_back(W, c[0], XS[i])), c[1] - before[0]))
        return lx.fori_loop(0, 5, body, (start(h), h), kind=kind)[1].sum()

    (sweep,) = sweeps(jax.grad(program), H)
    assert sweep.num_state == 2
