"""One transposed step, and the linear part backward, against JAX's own transpose of the same steps written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax._src.core.autodiff.partial_eval import partial_eval, run_known
from loopax._src.core.autodiff.transpose import known_recurrence, transposed_step
from loopax._src.core.ir.linear_loop import linear_loop_p
from loopax._src.core.ir.loop import LoopInputs
from loopax._src.core.ir.plan import Checkpoints, EveryCarry, EveryResidual
from loopax._src.core.jaxpr.util import INDEX, trace
from loopax._src.jax_internals import jaxpr_as_fun
from tests.support.core_loops import loop_of
from tests.support.reference import assert_close

F = jax.ShapeDtypeStruct((), jnp.float64)
K, XS = np.float64(0.7), np.array([1.0, 2.0, 3.0])
CT_CARRY, CT_YS = np.float64(1.5), np.array([0.1, 0.2, 0.3])


def linear_step(row, k, c, d, s, x):
    """Linear in the constant c, the first leaf d of the carry and the row x; s is a known recurrence."""
    return [k * d + s * c + x, s * 0.5 + 1.0, d * s]


def linear(plan):
    """The linear part of a loop of that step, and which of its operands are linear."""
    body = trace(linear_step, [INDEX, F, F, F, F, F])
    loop = loop_of(plan, body=body, num_consts=2, num_carry=2, bound=3)
    unknown = LoopInputs((False, True), (True, False), (True,))
    return loop, unknown, partial_eval(loop, loop.kind.plan(None), unknown)


def written_out(c, d, xs):
    """Three steps in a row."""
    s, ys = 0.3, []
    for x in xs:
        d, s, y = linear_step(0, K, c, d, s, x)
        ys.append(y)
    return d, jnp.stack(ys)


def test_one_step():
    """d' = k d + s c + x and y = s d: the cotangents are k ct d' + s ct y, s ct d' and ct d'."""
    _, _, parts = linear(EveryCarry())
    step = jaxpr_as_fun(transposed_step(parts.linear, (True,)))
    s, ct_d, ct_c, ct_y = map(np.float64, (0.4, 1.5, 10.0, 0.2))
    found = step(np.int32(0), K, ct_d, ct_c, s, ct_y)
    assert_close(found, [K * ct_d + s * ct_y, ct_c + s * ct_d, ct_d])


def test_ys_without_cotangents_are_no_operands():
    _, _, parts = linear(EveryCarry())
    with_y, without_y = (transposed_step(parts.linear, (flag,)) for flag in (True, False))
    assert len(with_y.in_avals) == len(without_y.in_avals) + 1


def test_the_known_recurrence():
    """Checkpoints: states are recomputed by the known part of the step alone."""
    _, _, parts = linear(Checkpoints(2))
    (s,) = jaxpr_as_fun(known_recurrence(parts.linear))(np.int32(0), K, np.float64(0.4))
    assert s == 0.4 * 0.5 + 1.0


@pytest.mark.parametrize("plan", [Checkpoints(2), Checkpoints(), EveryCarry(), EveryResidual()], ids=repr)
@pytest.mark.parametrize("with_ys", [True, False])
def test_all_steps(plan, with_ys):
    loop, unknown, parts = linear(plan)
    start = [np.float64(0.5), np.float64(2.0), XS]  # c, d, xs: where a linear function is transposed does not matter

    @jax.jit
    def backward(ct_carry, ct_ys):
        def of_linear(c, d, xs):
            inputs = LoopInputs([K, c], [d, np.float64(0.3)], [xs])
            _, operands = run_known(loop, parts, jnp.int32(0), jnp.int32(3), inputs)
            carry, ys = linear_loop_p.bind(*operands.leaves, **parts.linear._asdict())
            return (carry, ys) if with_ys else carry

        transpose = jax.linear_transpose(of_linear, *start)
        return transpose((ct_carry, ct_ys) if with_ys else ct_carry)

    transpose = jax.linear_transpose(written_out, *start)
    assert_close(backward(CT_CARRY, CT_YS), transpose((CT_CARRY, CT_YS if with_ys else 0 * CT_YS)))
    assert unknown.xs == (True,)
