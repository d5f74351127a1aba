"""A traced value where the program depends on it: the error names the argument, says why, and shows two ways out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax import schedule
from tests.support.limited_loops import fori_loop, raises, scan, while_loop


def rollout(steps: Any, **options: Any) -> Any:
    return lx.rollout(lambda state: (state + 1, state), 0, steps, **options)


def lanes_map(lanes: Any) -> Any:
    return lx.lanes_map(lambda x: lx.fori_loop(0, 2, lambda _, x: x * 2.0, x), jnp.ones(3), num_lanes=lanes)


def rewritten(**options: Any) -> Any:
    return lx.rewrite_loops(lambda x: x, **options)


class Case(NamedTuple):
    argument: str  # as the message names it
    call: Callable[[Any], Any]
    decides: str  # why it has to be known
    instead: str  # the way out that leaves the value traced


LOOPS = [while_loop, fori_loop, scan, rollout]
BOUND = "give a static bound, and let the number itself be traced: "
ANY = "choose one for all calls: results do not depend on it"

NUMBERS = [
    Case("while_loop(max_steps", lambda n: while_loop(3, max_steps=n), "memory", BOUND + "`while_loop(lambda c: (c[0]"),
    Case("fori_loop(max_steps", lambda n: fori_loop(3, max_steps=n), "memory", BOUND + "`fori_loop(0, n, ..., max_"),
    Case("rewrite_loops(max_steps", lambda n: rewritten(max_steps=n), "memory", BOUND + "`rewrite_loops(fn, max_"),
    Case("rollout(save_every", lambda n: rollout(3, save_every=n), "how many outputs", "when=i % m == 0"),
    Case("History(k", lambda n: lx.History(n, like=1.0), "the shape of the window", "look back by the number"),
    Case("Buffer(capacity", lambda n: lx.Buffer(n, like=1.0), "the shape of the rows", "`append(row, when=...)`"),
    Case("Auto(memory", lx.Auto, "what a gradient stores", "give the most bytes"),
    Case("Compact(shrink", lx.Compact, "the sizes of the batches", ANY),
    Case("lanes_map(num_lanes", lanes_map, "the size of the batch", ANY),
]
UNROLL = [
    Case(f"{f.__name__}(unroll", lambda n, f=f: f(3, unroll=n), "how many steps stand in the program", ANY)
    for f in LOOPS[1:]
]
FLAGS = [
    Case("scan(reverse", lambda flag: scan(3, reverse=flag), "in which order", "`jax.lax.cond("),
    Case("rewrite_loops(scans", lambda flag: rewritten(scans=flag), "which loops", "give scans=True"),
    *(Case(f"{f.__name__}(throw", lambda on, f=f: f(3, throw=on), "a check that", "`limit_reached`") for f in LOOPS),
    *(Case(f"{f.__name__}(info", lambda on, f=f: f(3, info=on), "what is returned", "give info=True") for f in LOOPS),
]
STRATEGIES = [
    Case("kind", lambda n: while_loop(3, kind=n), "the program of a gradient", "choose one for all calls"),
    Case("lanes", lambda n: while_loop(3, lanes=n), "how the program runs a batch", ANY),
]
KNOWN = "must be known when the program is traced"
STATIC = ["Two ways out", "make it static", "closed over", "`static_argnames` of `jax.jit`", "compiles its own program"]


def each(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{case.argument}=")


@each(NUMBERS + UNROLL + FLAGS + STRATEGIES)
def test_traced(case: Case) -> None:
    with raises(TypeError, f"{case.argument}=...", "got a traced", case.decides, KNOWN, *STATIC, case.instead):
        jax.eval_shape(case.call, True if case in FLAGS else 3)


@each(NUMBERS)
def test_array_outside_of_jit(case: Case) -> None:
    """Refused as well: inside of `jit` it would be."""
    got = f"{case.argument}=...): got int64[], expected a Python"
    with raises(TypeError, got, case.decides, KNOWN, "`x.item()`", case.instead):
        case.call(jnp.int64(3))


def test_traced_length_as_the_number_of_rows() -> None:
    for loop, rows, without in ((scan, "ys", "(carry, None) from f"), (rollout, "outputs", "(state, None) from step")):
        way_out = [BOUND, "length=n, max_steps=", without]
        with raises(ValueError, f"capacity for {rows}", "`length` is not static", KNOWN, *STATIC, *way_out):
            jax.eval_shape(loop, 3)


def test_flag_that_is_no_bool() -> None:
    """Python would take most of them as true."""
    others = [
        Case("XNysTrace(positive_semidefinite", lambda x: lx.stochtrace.XNysTrace(positive_semidefinite=x), "", ""),
        Case("picture(length_known", lambda x: schedule.picture(3, length_known=x), "", ""),
    ]
    for value in ["no", "", 1, 1.0, None, np.int8(1), jnp.ones(1, bool), (True,)]:
        for case in FLAGS + others:
            with raises(TypeError, f"{case.argument}=...): got "):
                case.call(value)


def test_flag_that_is_known() -> None:
    for flag in [np.bool_(True), np.asarray(True), jnp.asarray(True)]:
        (_, ys), info = scan(3, reverse=flag, throw=flag, info=flag, unroll=np.bool_(True))
        assert (ys.tolist(), info.num_steps) == ([4.0, 2.0, 1.0], 3)
