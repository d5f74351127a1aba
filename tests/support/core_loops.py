"""Loops of the core for tests of single rules: a body as a function, in place of a user's call."""

import jax.numpy as jnp
import numpy as np

from loopax._src.core.ir.kind import Decided
from loopax._src.core.ir.loop import Loop
from loopax._src.core.ir.plan import EveryCarry
from loopax._src.core.jaxpr.util import INDEX, trace

BOUND = 5
A, X, COUNT = np.float64(0.8), np.linspace(0.1, 0.9, BOUND), np.int32(0)
INPUTS = ([A, np.float64(2.0)], [np.float64(0.3), COUNT, np.float64(1.5)], [X])


def body(row, a, b, h, count, fixed_start, x):
    """Two constants, a carry of three leaves (the second an integer, the third depends on `b` alone), a row each.

    The first output of the rows depends on the carry, the second on `x` alone.
    """
    h = jnp.sin(a * h) + x * fixed_start
    return [h, count + 1, fixed_start * 0.5 + b, h * h, x + 1.0]


def loop_of(plan=None, **fields):
    """A loop of that body, over at most `BOUND` rows."""
    f, i = jnp.zeros(()), jnp.int32(0)
    closed = trace(body, [INDEX, *(jnp.asarray(x).aval for x in (f, f, f, i, f, f))])
    loop = Loop(
        closed,
        num_consts=2,
        num_carry=3,
        bound=BOUND,
        reverse=False,
        predicated=False,
        unroll=1,
        kind=Decided(plan or EveryCarry()),
    )
    return loop._replace(**fields)


def expected(num_steps, consts=INPUTS[0], carry=INPUTS[1], xs=INPUTS[2]):
    """What the loop gives, in Python: number of steps, carry, rows of ys with zeros behind the last step."""
    (a, b), (h, count, fixed), ys = consts, carry, [np.zeros(BOUND), np.zeros(BOUND)]
    for row in range(num_steps):
        new = body(row, a, b, h, count, fixed, xs[0][row])
        h, count, fixed, ys[0][row], ys[1][row] = map(np.asarray, new)
    return [np.int32(num_steps), h, count, fixed, *ys]
