"""Partial evaluation of a loop: what is known, what the linear part uses, and that both give the whole again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.autodiff.partial_eval import partial_eval, prune, run_known, unknown_outputs, window_walked
from loopax._src.core.ir.linear_loop import linear_loop_p
from loopax._src.core.ir.loop import LoopInputs, LoopOutputs
from loopax._src.core.ir.plan import Checkpoints, EveryCarry, EveryResidual
from loopax._src.core.jaxpr.util import INDEX, merge_lists, trace
from tests.support.core_loops import INPUTS, expected, loop_of
from tests.support.reference import assert_close

NOTHING = LoopInputs((False, False), (False, False, False), (False,))
OF_B = NOTHING._replace(consts=(False, True))  # reaches the third leaf of the carry, and with it the first
OF_A = NOTHING._replace(consts=(True, False))
PLANS = [Checkpoints(2), Checkpoints(), EveryCarry(), EveryResidual()]
name_of_plan = lambda plan: type(plan).__name__ + str(getattr(plan, "count", None) or "")
each_plan = pytest.mark.parametrize("plan", PLANS, ids=name_of_plan)


def test_what_is_unknown_after_some_steps():
    assert unknown_outputs(loop_of(), OF_B) == ((True, False, True), (True, False))
    assert unknown_outputs(loop_of(), OF_A) == ((True, False, False), (True, False))
    assert unknown_outputs(loop_of(), NOTHING) == ((False, False, False), (False, False))


@each_plan
def test_known_leaves_make_a_loop_of_their_own(plan):
    parts = partial_eval(loop_of(), plan, OF_A)
    assert parts.unknown == OF_A._replace(carry=(True, False, False))
    assert [parts.known.num_consts, parts.known.num_carry] == [1, 2]  # b; the count and the third leaf
    assert parts.num_known_ys == 1
    assert parts.linear.linear_carry.count(True) == 1


def test_what_the_linear_part_uses():
    """The derivative of `sin(a h) + x k` needs a, h, x and k. Nothing needs the count."""
    parts = partial_eval(loop_of(), EveryCarry(), OF_A)
    assert parts.taken == OF_A._replace(carry=(True, False, False))
    assert parts.used.carry == (False, True)


@each_plan
@pytest.mark.parametrize("unknown", [OF_A, OF_B, NOTHING._replace(carry=(True, False, False))], ids=["a", "b", "h"])
def test_both_parts_give_the_whole(plan, unknown):
    """The linear part as it stands is the whole loop, on the values that are said to be unknown."""
    loop, steps = loop_of(plan), 3
    inputs = LoopInputs(*map(list, INPUTS))

    @jax.jit
    def both(inputs):
        parts = partial_eval(loop, loop.kind.plan(None), unknown)
        known, operands = run_known(loop, parts, jnp.int32(0), jnp.int32(steps), inputs)
        return known.leaves, linear_loop_p.bind(*operands.leaves, **parts.linear._asdict())

    known, linear = both(inputs)
    mask = loop.results_from(False, partial_eval(loop, loop.kind.plan(None), unknown).unknown_outputs, False).leaves
    assert_close(merge_lists(mask, known, linear), expected(steps))


def test_prune_keeps_what_is_needed_after_some_steps():
    """The third output needs c alone in one step, and all three inputs after two more."""
    f = jax.ShapeDtypeStruct((), jnp.float64)
    shift = trace(lambda _, a, b, c: [a * 2, a + b, b + c], [INDEX, f, f, f])
    loop = loop_of(body=shift, num_consts=0, num_carry=3)
    _, used = prune(loop, shift, LoopOutputs((False, False, True), ()))
    assert used.carry == (True, True, True)
    body, used = prune(loop, shift, LoopOutputs((False, True, False), ()))
    assert used.carry == (True, True, False)
    assert len(body.in_avals) == 1 + 2


@pytest.mark.parametrize(("reverse", "window"), [(False, (2, 5)), (True, (4, 7))])
def test_the_window_that_was_walked(reverse, window):
    """Of the rows 2 ... 6, a predicate stopped the loop after three steps."""
    loop = loop_of(reverse=reverse, predicated=True)
    assert window_walked(loop, np.int32(2), np.int32(7), np.int32(3)) == window
