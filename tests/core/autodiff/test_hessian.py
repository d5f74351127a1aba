"""Second and third derivatives, every composition of the two modes."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.derivatives import FORMS, XS, H, W, derivatives, parts, steps_taken, vector
from tests.support.problem import KINDS, LOOPS, name_of
from tests.support.reference import assert_close
from tests.support.slow import each_kind

COMPOSITIONS = {
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
}
EVERYTHING = vector(W, H, XS)
DIRECTION, OTHER = np.random.RandomState(2).randn(2, EVERYTHING.size)
CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS


def second_derivatives(f, v, compositions):
    """In a direction; forward over forward mode, which gives a number, in two directions."""
    slope = lambda v: jax.jvp(f, (v,), (DIRECTION,))[1]
    ways = {
        "forward over reverse": lambda: jax.jvp(jax.grad(f), (v,), (DIRECTION,))[1],
        "reverse over reverse": lambda: jax.grad(lambda v: jnp.vdot(jax.grad(f)(v), DIRECTION))(v),
        "reverse over forward": lambda: jax.grad(slope)(v),
        "forward over forward": lambda: jax.jvp(slope, (v,), (OTHER,))[1],
    }
    return [ways[name]() for name in compositions]


def check_second_derivatives(loop, kind, *compositions):
    program = LOOPS[loop][0](kind)
    compiled = jax.jit(lambda v, n: second_derivatives(lambda v: program(*parts(v), n), v, compositions))
    for n in (0, 6):
        wanted = derivatives(loop, n).flat_hessian @ DIRECTION
        forward_only = lambda name: name == "forward over forward"
        assert_close(
            compiled(EVERYTHING, np.int32(n)), [wanted @ OTHER if forward_only(c) else wanted for c in compositions]
        )


# Each kind with a loop of known length, all loops, and both schedules of slots. A for loop is a scan without rows.
FAST = [*(("scan", kind) for kind in KINDS), ("reverse", CHECKPOINTED), ("stop", SLOTS)]
FAST += [("reverse_stop", BOUNDED), ("while", RESIDUALS)]
OTHERS = [(loop, kind) for loop in LOOPS for kind in KINDS if loop != "fori" and (loop, kind) not in FAST]
OTHERS += [("fori", RESIDUALS)]


@pytest.mark.parametrize(("loop", "kind"), FAST, ids=name_of)
def test_with_respect_to_everything(loop, kind):
    """Constants, carry and rows at once."""
    check_second_derivatives(loop, kind, *COMPOSITIONS, "reverse over forward")


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "kind"), OTHERS, ids=name_of)
def test_with_respect_to_everything_in_other_loops(loop, kind):
    check_second_derivatives(loop, kind, *COMPOSITIONS)


@pytest.mark.parametrize(
    ("loop", "kind"), [("scan", RESIDUALS), ("reverse_stop", BOUNDED), ("while", SLOTS)], ids=name_of
)
def test_forward_over_forward(loop, kind):
    """In which no kind stores anything."""
    check_second_derivatives(loop, kind, "forward over forward")


def of_start(program):
    return lambda h, n: program(W, h, XS, n)


@pytest.mark.parametrize("kind", each_kind(SLOTS, RESIDUALS), ids=name_of)
def test_whole_hessian(kind):
    """Batches of tangents and of cotangents."""
    f = of_start(LOOPS["scan"][0](kind))
    hessians = jax.jit(lambda h, n: [composed(f)(h, n) for composed in COMPOSITIONS.values()])
    for n in (0, 6):
        assert_close(hessians(H, np.int32(n)), [derivatives("scan", n).hessian] * 2)


EAGER = [("forward over reverse", CHECKPOINTED), ("reverse over reverse", RESIDUALS)]
SLOW = [("reverse over reverse", SLOTS), ("forward over reverse", BOUNDED)]
EAGER += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("composition", "kind"), EAGER, ids=name_of)
def test_without_jit(composition, kind):
    hessian = COMPOSITIONS[composition](of_start(LOOPS["scan"][0](kind)))
    assert_close(hessian(H, np.int32(6)), derivatives("scan", 6).hessian)


def third(f):
    return jax.grad(lambda h: jax.grad(lambda h: jax.grad(f)(h).sum())(h) @ h)


@ft.cache
def expected_third():
    return jax.jit(third(lambda h: steps_taken(FORMS["scan"], W, h, jnp.asarray(XS), 6)))(H)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_third_derivative_in_reverse(kind):
    f = of_start(LOOPS["scan"][0](kind))
    actual = jax.jit(lambda h, n: third(lambda h: f(h, n))(h))(H, np.int32(6))
    assert_close(actual, expected_third())
