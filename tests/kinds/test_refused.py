"""What kinds refuse: arguments, loops that they do not fit, and lanes that are merged."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax import Implicit, Reversible, Truncated, kinds
from tests.kinds.reversible import Reversible as WithInverse
from tests.kinds.test_own_kinds import OneMoreStep
from tests.support.problem import XS, H, argument_of

WRONG: Any = 3
FREE: Any = {"lanes": "free"}


def loop(choice: Any, init: Any = H, **options: Any) -> Any:
    return lx.fori_loop(0, 9, lambda i, c: c, init, **argument_of(choice), **options)


def until(kind: Any) -> Any:
    return lx.while_loop(lambda x: x < 3, lambda x: x + 1, 0.0, kind=kind)


def queue(kind: Any) -> Any:
    return lx.lanes_map(lambda h: lx.fori_loop(0, 9, lambda i, h: h * 2, h, **argument_of(kind)), XS, num_lanes=2)


def with_a_mutable_array(kind: Any) -> Any:
    reference = jax.new_ref(jnp.zeros(3))

    def body(i: Any, x: Any) -> Any:
        reference[...] = x
        return x

    return lx.fori_loop(0, 3, body, H, **argument_of(kind))


def recorded(record: Any) -> Any:
    return Reversible(lambda *args: args[-2], record=record)


ARGUMENTS: list[tuple[Any, Any, str]] = [
    (Truncated, TypeError, r"Truncated\(...\): got neither of last and window, expected one"),
    (lambda: Truncated(last=0), ValueError, r"Truncated\(last=...\): got 0, expected at least 1"),
    (lambda: Implicit(WRONG), TypeError, r"Implicit\(linear_solver=...\): got int 3, expected a solver of lineax"),
    (lambda: Implicit(fixed_point=WRONG), TypeError, r"\(fixed_point=...\): got int 3, expected a function of a carry"),
    (lambda: Implicit(rtol=0.0), ValueError, r"Implicit\(rtol=...\): got 0.0, expected a positive number"),
    (lambda: Implicit(rtol="a"), TypeError, r"Implicit\(rtol=...\): got str 'a', expected a Python float"),  # type: ignore
    (lambda: Implicit(unsolved=False), ValueError, r"got bool False, expected 'error' or 'nan'"),  # type: ignore
    (lambda: Reversible(WRONG), TypeError, r"Reversible\(inverse\): got int 3, expected a function"),
    (lambda: recorded(WRONG), TypeError, r"Reversible\(record=\.\.\.\): got int 3, expected a function"),
    (lambda: Reversible(print, checkpoints=-1), ValueError, r"\(checkpoints=...\): got -1, expected at least 0"),
    (lambda: Reversible(print, rtol=0), ValueError, r"Reversible\(rtol=...\): got 0, expected a positive number"),
    (lambda: kinds.Checkpoints(0), ValueError, r"kinds.Checkpoints\(0\): expected at least 1"),
    (lambda: kinds.Checkpoints(2.5), TypeError, r"kinds.Checkpoints\(2.5\): expected an int"),  # type: ignore
    (lambda: kinds.NoReverseMode("error", "text"), TypeError, r"NoReverseMode\('error', .*a class of errors"),  # type: ignore
]
INVERSE, CHECKPOINTS = Reversible(lambda *args: args[-1]), Reversible(lambda *args: args[-1], checkpoints=3)
LOOPS: list[tuple[Any, Any, str]] = [
    (lambda: loop(Implicit(), 3), ValueError, "no leaf of the carry is real or complex"),
    *(
        (
            lambda f=f: loop(Implicit(fixed_point=f), (H, 0)),
            TypeError,
            "that is not made of real or complex leaves of the",
        )
        for f in (lambda c: c[0] + 1, lambda c: c[1], lambda c: (), lambda c: 1.0)
    ),
    (
        lambda: loop(Implicit(fixed_point=lambda c: (c[0], c[0].sum())), (H, 0)),
        TypeError,
        r"got a residual of float64\[\] for a leaf of float64\[3\]",
    ),
    (lambda: until(CHECKPOINTS), ValueError, "spreads its checkpoints over a static bound, and the loop has none"),
    (lambda: until(recorded(lambda *_: 0)), ValueError, "stores a row of each step, and the loop has no static bound"),
    (lambda: loop(recorded(lambda *_: jax.new_ref(H))), Exception, "record of body_fun of fori_loop returned"),
    (lambda: loop(WithInverse(WRONG)), TypeError, "the inverse of fori_loop"),
    (lambda: loop(WithInverse(lambda i, c: c[:2])), TypeError, "the inverse of body_fun of fori_loop"),
    (lambda: loop(CHECKPOINTS, progress=True), NotImplementedError, "cannot show its progress"),
    (lambda: loop(Truncated(window=2), progress=True), NotImplementedError, "cannot show its progress"),
    (
        lambda: loop(lx.Lax(), derivative=Implicit()),
        ValueError,
        r"fori_loop\(kind=Lax\(\), derivative=Implicit\(\)\): this derivative differentiates no steps",
    ),
    (
        lambda: with_a_mutable_array(OneMoreStep()),
        NotImplementedError,
        r"which derivative=OneMoreStep\(\) does not take",
    ),
    *(
        (lambda kind=kind: loop(kind, **FREE), NotImplementedError, f"lanes='free'.* does not take {name}")
        for kind, name in [
            (Truncated(last=2), "derivative=Truncated"),
            (Implicit(), r"derivative=Implicit\(\)"),
            (OneMoreStep(), r"derivative=OneMoreStep\(\)"),
            (INVERSE, "a kind that brings an inverse"),
            (WithInverse(lambda i, c: c), "a kind that brings an inverse"),
        ]
    ),
    *(
        (lambda kind=kind: queue(kind), NotImplementedError, f"does not take {name}")
        for kind, name in [
            (Truncated(last=2), "derivative=Truncated"),
            (Implicit(), r"derivative=Implicit\(\)"),
            (OneMoreStep(), r"derivative=OneMoreStep\(\)"),
            (WithInverse(lambda i, c: c / 2), "a kind that brings an inverse"),
        ]
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [*ARGUMENTS, *LOOPS])
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
