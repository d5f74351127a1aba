"""Bad options, limits and lengths: each a clear error that names the argument."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import RUN_TIME, SUM, fori_loop, raises, rows_up_to, scan, while_loop
from tests.support.reference import assert_close

KINDS_TO_CHOOSE = ["'auto'", "'tuned'", "'lax'", "'checkpointed'", "'bounded'", "'residuals'"]
NOT_ONE_KEY = ["key", jnp.zeros(2), jnp.zeros(3, jnp.uint32), jnp.zeros((2, 2), jnp.uint32), jnp.zeros((), jnp.uint32)]
BAD: Any = [
    ("kind", ["Auto", None, 3], ValueError, KINDS_TO_CHOOSE),
    ("lanes", [None, 3], ValueError, ["'lockstep'", "'compact'", "'free'"]),
    ("max_steps", [1.5, "3", True, (3,), np.ones(1), jnp.ones((), bool)], TypeError, ["(max_steps=...)", "expected"]),
    ("max_steps", [-1, 2**31], ValueError, ["(max_steps=...)", "got", "from 0 to 2147483647"]),
    ("key", [*NOT_ONE_KEY, jax.random.split(jax.random.key(0))], TypeError, ["(key=...)", "expected one PRNG key"]),
    ("unroll", ["a", 1.5, (2,), jnp.float32(2)], TypeError, ["(unroll=...)", "expected an int"]),
    ("unroll", [-1], ValueError, ["(unroll=...)", "got -1", "positive"]),
]


@pytest.mark.parametrize(("option", "values", "error", "message"), BAD)
def test_bad_values_of_an_option(option: str, values: Any, error: Any, message: list[str]) -> None:
    for value in values:
        for loop in (fori_loop, scan, *([] if option == "unroll" else [while_loop])):
            with raises(error, *message):
                loop(3, **{option: value})


class Own(lx.Bounded):
    """A kind of a user's."""


NEARLY: Any = [
    (
        {"kind": "truncated"},
        "kind=truncated is a derivative, and `kind` says what a gradient stores. Write derivative=",
    ),
    ({"kind": lx.Implicit(rtol=0.5)}, "Write derivative=Implicit(rtol=0.5), which while_loop, fori_loop, scan and "),
    ({"kind": lx.Truncated}, "Write derivative=lx.Truncated(last=5), which"),
    ({"derivative": lx.Bounded()}, "derivative=Bounded() is a kind, which says what is stored: write kind=Bounded()."),
    ({"derivative": lx.Implicit}, "is a class, and an object is expected: write derivative=lx.Implicit()."),
    ({"derivative": "Truncated"}, "needs arguments: write derivative=lx.Truncated(last=5)."),
    ({"derivative": 3}, "derivative=3 is not a derivative of a loop. Choose one of 'implicit' (Implicit())."),
    ({"kind": "checkpoint"}, "Did you mean 'checkpointed'? Choose one of"),
    ({"kind": "Bounded"}, "Did you mean 'bounded'?"),
    ({"kind": lx.Checkpointed}, "Checkpointed is a class, and an object is expected: write kind=lx.Checkpointed()."),
    ({"kind": lx.Reversible}, "is a class, and an object is expected: write kind=lx.Reversible(inverse)."),
    ({"kind": Own}, "is a class, and an object is expected: write kind=Own(...)."),
    ({"lanes": "compacted"}, "Did you mean 'compact'?"),
    ({"lanes": lx.Compact}, "is a class, and an object is expected: write lanes=lx.Compact()."),
]


def test_what_is_nearly_a_kind_or_lanes() -> None:
    for options, advice in NEARLY:
        with raises(ValueError, advice):
            fori_loop(3, **options)


BUDGETS = [(lx.Checkpointed, "checkpoints", "number of stored carries"), (lx.Auto, "memory", "number of bytes")]


@pytest.mark.parametrize(("kind", "name", "unit"), BUDGETS)
def test_budget_that_is_no_integer_from_one_on(kind: Any, name: str, unit: str) -> None:
    for value in (0, -1, np.int32(0)):
        with raises(ValueError, f"{kind.__name__}({name}=...)", f"got {value}", "at least 1", unit):
            kind(value)
    for value in (1.5, 2.0, "3", True, (1,)):
        with raises(TypeError, f"{kind.__name__}({name}=...)", "expected an int", unit):
            kind(value)


# ---- reverse mode where there is none

UNBOUNDED: Any = {
    "while_loop": lambda x, n, **o: lx.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] ** 2), (0, x), **o)[1],
    "fori_loop": lambda x, n, **o: lx.fori_loop(0, n, lambda _, x: x * x, x, **o),
    "scan": lambda x, n, **o: lx.scan(lambda c, _: (c * c, None), x, None, n, **o)[0],
}
EACH_UNBOUNDED = pytest.mark.parametrize("loop", UNBOUNDED.values(), ids=UNBOUNDED)


@EACH_UNBOUNDED
def test_reverse_mode_that_a_kind_does_not_have(loop: Any) -> None:
    """Each is refused with a bound and without; what needs a bound, before a derivative is taken."""
    for options in ({}, {"max_steps": 3}):
        gradient = lambda kind, options=options: jax.jit(jax.grad(lambda x, n: loop(x, n, kind=kind, **options)))
        with raises(ValueError, "reverse mode", "Lax()", "Checkpointed()", "Bounded()", "Residuals()"):
            gradient("lax")(2.0, 3)
        with raises(ValueError, "Auto(memory=7)", "at least one carry", "8 bytes", "Give memory=8 or more"):
            gradient(lx.Auto(memory=7))(2.0, 3)
    for kind in ("bounded", "residuals"):
        with raises(ValueError, "kind=" + kind.capitalize(), "static bound", "max_steps="):
            jax.jit(lambda x, n, kind=kind: loop(x, n, kind=kind))(2.0, 3)


@EACH_UNBOUNDED
def test_forward_mode_needs_no_bound(loop: Any) -> None:
    for kind in ("auto", "lax", "checkpointed"):
        tangent = jax.jit(lambda x, n, kind=kind: jax.jvp(lambda x: loop(x, n, kind=kind), (x,), (x,))[1])
        assert tangent(2.0, 2) == 64.0


# ---- unroll, limits of fori_loop


@pytest.mark.parametrize("unroll", [True, 0, 2])
def test_unroll_with_a_traced_length_or_stop(unroll: Any) -> None:
    for loop in (fori_loop, scan) if unroll != 2 else ():
        with raises(ValueError, f"{loop.__name__}(unroll={unroll})", "static", "unroll=k"):
            jax.jit(lambda n, loop=loop: loop(n, unroll=unroll, max_steps=3))(3)
    with raises(ValueError, f"scan(unroll={unroll}", "stop"):
        lx.scan(lambda c, _: (c + 1, c), 0, length=3, unroll=unroll, stop=lambda c, _: c > 1)


def test_limits_and_lengths_that_are_not_integers() -> None:
    for wrong in [1.0, True, "3", np.float32(1), jnp.float32(1), jnp.ones(1, int)]:
        number: Any = wrong
        with raises(TypeError, "fori_loop(lower=...)", "got", "expected"):
            lx.fori_loop(number, 3, lambda _, x: x, 0)
        with raises(TypeError, "fori_loop(upper=...)", "got", "expected"):
            lx.fori_loop(0, number, lambda _, x: x, 0)
        with raises(TypeError, "scan(length=...)", "expected"):
            lx.scan(lambda c, _: (c, None), 0.0, length=number)


# ---- rows, lengths and the room for outputs of a scan


@pytest.mark.parametrize("make", [int, np.int64, jnp.int32, jnp.int64, jnp.uint8])
def test_known_length_outside_of_xs_is_an_error_at_once(make: Any) -> None:
    for throw in (True, False):
        with raises(ValueError, "length", "got 4", "xs has 3 rows"):
            lx.scan(SUM, 0.0, jnp.arange(3.0), make(4), throw=throw)
    for xs in (None, jnp.arange(3.0)) if make is not jnp.uint8 else ():
        with raises(ValueError, "length", "got -1"):
            lx.scan(lambda c, _: (c, None), 0.0, xs, make(-1))


@pytest.mark.parametrize("length", [-1, np.int8(-1), np.uint8(4), np.uint64(2**63), np.int64(2**32)])
def test_traced_length_outside_of_xs_is_an_error_at_run_time(length: Any) -> None:
    with raises(RUN_TIME, f"`length` ({length}) is negative, or more than there is (xs has 3 rows)"):
        jax.block_until_ready(jax.jit(rows_up_to)(jnp.asarray(length)))
    if length == -1:
        with raises(RUN_TIME, "`length` (-1) is negative"):
            jax.block_until_ready(jax.jit(lambda n: lx.scan(lambda c, _: (c + 1, None), 0, length=n))(length))


def test_without_throw_a_length_beyond_xs_scans_what_there_is_and_says_so() -> None:
    program = jax.jit(lambda n: rows_up_to(n, throw=False, info=True))
    for length, steps, reached in ((4, 3, True), (3, 3, False), (0, 0, False)):
        (carry, _), info = program(length)
        assert (carry, info.num_steps, info.limit_reached) == (sum(range(steps)), steps, reached)


def test_reverse_without_a_last_row() -> None:
    with raises(ValueError, "reverse=True", "`xs` or `length`"):
        lx.scan(lambda c, _: (c + 1, None), 0, reverse=True, stop=lambda c, _: c > 3)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_length_without_rows_ends_a_scan_that_could_stop(reverse: bool) -> None:
    """Without rows of xs there is no static bound, and the length is known only when the scan runs."""

    def count(n: Any, most: Any, **options: Any) -> Any:
        f = lambda c, x, **key: (c + 1, None)
        return lx.scan(f, 0, length=n, stop=lambda c, y: c >= most, reverse=reverse, info=True, **options)

    counted, with_keys = jax.jit(count), jax.jit(lambda n, m: count(n, m, key=jax.random.key(0)))
    for n, most, expected in [(0, 5, 0), (7, 5, 5), (7, 9, 7)]:
        (found, _), info = counted(n, most)
        assert (found, info.num_steps, with_keys(n, most)[0][0]) == (expected, expected, expected)
    assert_close(jax.vmap(count, (0, None))(jnp.array([0, 3, 7]), 5)[1].num_steps, jnp.array([0, 3, 5], jnp.int32))
