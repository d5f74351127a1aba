"""Of what a loop carries on from the one around it, or from one before it, a free lane has one value."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax._src.core.ir.loop import Loop, loop_p
from loopax._src.core.nest import cut
from loopax._src.jax_internals import equations_in
from tests.core.batching.counting import alone
from tests.support.reference import assert_close

LENGTHS = np.array([3, 0, 5, 1, 4, 2])
STARTS = np.linspace(0.2, 0.9, 18).reshape(6, 3)


def turned(x, length, by: Any = 0.9, **options):
    """A loop that carries `x`."""
    return lx.fori_loop(0, length, lambda _, x: jnp.sin(by * x) + 0.1, x, max_steps=5, **options)


# Forms of a step (j, a, b) -> (a, b).


def both(j, a, b):
    return lx.fori_loop(0, (j + 2) % 3, lambda _, ab: (0.9 * ab[1], jnp.sin(ab[0])), (a, b), max_steps=3)


def needed_behind(j, a, b):
    new = turned(a, (j + 2) % 3)
    return new + a, b


def needed_in_the_loop(j, a, b):
    return turned(a, (j + 2) % 3, a), b


def needed_in_a_later_loop(j, a, b):
    new = turned(a, (j + 2) % 3)
    return new, turned(b, j % 2, a)


def needed_before(j, a, b):
    scale = jnp.cos(a)
    return turned(a, (j + 2) % 3, scale), b


def begun_with_twice(j, a, b):
    c, d = lx.fori_loop(0, (j + 2) % 3, lambda _, cd: (0.9 * cd[1], jnp.sin(cd[0])), (a, a), max_steps=3)
    return c, d + b


def one_after_another(j, a, b):
    a = turned(turned(a, (j + 2) % 3), j % 2)
    return turned(a, (j + 1) % 2), b


def from_one_to_another(j, a, b):
    """No value of the loop around is carried on, but that of a loop before."""
    return turned(turned(a + b, (j + 2) % 3), j % 2), b


def needed_between(j, a, b):
    c = turned(a, (j + 2) % 3)
    return turned(c, j % 2, c), b


def exchanged(j, a, b):
    c, d = both(j, b, a)
    return d, c


def changed_behind(j, a, b):
    return turned(a, (j + 2) % 3) + 0.1, turned(b, j % 2)


def three_levels(j, a, b):
    def middle(k, a):
        return turned(a, (j + k) % 3)

    return lx.fori_loop(0, (j + 2) % 4, middle, a, max_steps=4), b


def three_levels_with_more_before(j, a, b):
    """The middle one computes with what it carries, where it begins a step in the iteration in which another ended."""

    def middle(k, a):
        return turned(a, (j + k) % 3, jnp.cos(a))

    return lx.fori_loop(0, (j + 2) % 4, middle, a, max_steps=4) + 0.1, b


def in_a_branch(j, a, b):
    return lx.cond(a.sum() > 1.0, lambda a: turned(a, j % 3), lambda a: a + 0.3, a), b


def with_rows(j, a, b):
    a, rows = lx.scan(lambda a, x: (jnp.sin(a) + x, a), a, jnp.arange(3.0), length=j % 4)
    return a, b + rows.sum(0)


def that_may_break(j, a, b):
    return lx.fori_loop(0, (j + 2) % 3, lambda _, a: jnp.log(a + 0.2), a, max_steps=3, finite=True, throw=False), b


def around_which_a_step_may_break(j, a, b):
    def middle(k, ab):
        a, b = ab
        a = turned(a, (j + k) % 3 + 1)
        return a, jnp.where(k == 1, jnp.log(-jnp.abs(b)), b)

    return lx.fori_loop(0, (j + 1) % 4, middle, (a, b), max_steps=4, finite=True, throw=False)


def in_a_step_that_breaks(j, a, b):
    return turned(a, (j + 2) % 3), jnp.where(j == 1, jnp.log(-jnp.abs(b)), b)


BREAKING = [that_may_break, in_a_step_that_breaks]
FORMS = [
    both,
    needed_behind,
    needed_in_the_loop,
    needed_in_a_later_loop,
    needed_before,
    begun_with_twice,
    one_after_another,
    from_one_to_another,
    needed_between,
    exchanged,
    changed_behind,
    three_levels,
    three_levels_with_more_before,
    in_a_branch,
    with_rows,
    around_which_a_step_may_break,
    *BREAKING,
]


def program(step, lanes, **options):
    def f(x, n):
        body = lambda j, ab: step(j, *ab)
        a, b = lx.fori_loop(0, n, body, (x, jnp.cos(x)), max_steps=5, lanes=lanes, **options)
        return (a * jnp.arange(1.0, 4.0) + b).sum()

    return f


@pytest.mark.parametrize("step", FORMS, ids=lambda f: f.__name__)
def test_lanes_do_what_they_do_alone(step):
    options = {"finite": True, "throw": False} if step in BREAKING else {}
    of_batch = jax.jit(jax.vmap(jax.value_and_grad(program(step, "free", **options))))
    wanted = alone(jax.value_and_grad(program(step, "lockstep", **options)), STARTS, LENGTHS)
    assert_close(of_batch(STARTS, LENGTHS), wanted)


def shared(step) -> int:
    """The leaves that inner loops carry in homes of others."""
    closed = jax.make_jaxpr(program(step, "lockstep"))(STARTS[0], LENGTHS[0])
    (eqn,) = [eqn for eqn in closed.eqns if eqn.primitive is loop_p]
    return _shared(cut(Loop(**eqn.params)))


def _shared(nest: Any) -> int:
    own = sum(home is not None for homes in nest.homes for home in homes)
    return own + sum(_shared(inner.body) for inner in nest.loops if inner.body)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (both, 2),
        (needed_behind, 0),
        (needed_in_the_loop, 0),
        (needed_in_a_later_loop, 1),  # the other leaf
        (needed_before, 1),
        (begun_with_twice, 1),
        (one_after_another, 3),
        (from_one_to_another, 1),
        (needed_between, 1),
        (exchanged, 2),
        (changed_behind, 2),
        (three_levels, 2),
    ],
)
def test_slots(step, expected):
    assert shared(step) == expected


def test_the_single_loop_carries_a_value_once():
    def carried(step):
        closed = jax.make_jaxpr(jax.vmap(program(step, "free")))(STARTS, LENGTHS)
        single = next(Loop(**eqn.params) for eqn in equations_in(closed) if eqn.primitive is loop_p)
        return sum(aval.str_short() == "float64[6,3]" for aval in single.output_avals.carry)

    assert carried(both) == 2
    assert carried(needed_behind) == 2  # the value before the inner loop, and that in it
    assert carried(three_levels) == 1
