"""A leaf of the carry that does not change is a constant of the loop: it is not stored, batched or differentiated."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.pytrees.comparison import EACH_KIND, EACH_LOOP
from tests.support.blocks import fori_loop


class Shift(NamedTuple):
    weight: Any
    scale: Any


WEIGHT = np.ones((5, 7))  # no other array has its number of elements


def step_shift(state: Any) -> Any:
    shift, x = state
    return shift, jnp.sin(x * shift.scale) + shift.weight.sum()


HOISTED = {
    "plain": step_shift,
    "rebuilt": lambda state: step_shift((Shift(*jax.tree.leaves(state[0])), state[1])),
    "filter_jit": eqx.filter_jit(step_shift),
    "jit in jit": jax.jit(lambda state: jax.jit(step_shift)((state[0], state[1]))),
    "checkpoint": jax.checkpoint(step_shift),
    "nested loop": lambda state: lx.fori_loop(0, 2, lambda _, state: step_shift(state), state),
}


def loops(jaxpr: Any) -> list[Any]:
    """All equations of the program that are loops or parts of them, also inner ones."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name in ("loop", "linear_loop", "replay") else []
        found += [e for p in eqn.params.values() if hasattr(p, "jaxpr") for e in loops(p.jaxpr)]
    return found


def size_35(variables: Any) -> list[Any]:
    return [v.aval.shape for v in variables if v.aval.shape[-2:] == (5, 7)]


@EACH_LOOP
@pytest.mark.parametrize("how", HOISTED)
def test_leaf_that_does_not_change_is_a_constant_of_the_loop(loop: Any, how: str) -> None:
    program = jax.make_jaxpr(lambda w, x: loop(HOISTED[how], (Shift(w, 2.0), x)))(WEIGHT, 1.0)
    assert loops(program.jaxpr)
    for eqn in loops(program.jaxpr):
        assert size_35(eqn.invars[2 : 2 + eqn.params["num_consts"]]) == [(5, 7)]
        assert size_35(eqn.outvars) == []


@EACH_KIND
def test_leaf_that_does_not_change_is_not_saved(kind: Any) -> None:
    def loss(w: Any, x: Any, how: str) -> Any:
        shift, x = fori_loop(HOISTED[how], (Shift(w, 2.0), x), kind=kind)
        return x + shift.weight.sum()

    for how in ("plain", "nested loop"):
        program = jax.make_jaxpr(jax.grad(partial(loss, how=how), argnums=(0, 1)))(WEIGHT, 1.0)
        saved = [shape for eqn in loops(program.jaxpr) for shape in size_35([*eqn.invars, *eqn.outvars])]
        assert set(saved) == {(5, 7)}


def test_leaf_that_does_not_change_is_not_batched() -> None:
    """Where lanes take as many steps, and where they differ."""
    run = lambda n: lx.fori_loop(0, n, lambda _, c: step_shift(c), (Shift(WEIGHT, 2.0), n.astype(float)))
    for lane in (run, lambda n: run(n - n)):
        (eqn,) = loops(jax.make_jaxpr(jax.vmap(lane, out_axes=(None, 0)))(jnp.arange(4)).jaxpr)
        assert size_35(eqn.invars) == [(5, 7)]
