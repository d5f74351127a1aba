"""Bad input: each a clear error that names the argument and the path."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.support.limited_loops import (
    EACH_LOOP,
    RUN_TIME,
    SUM,
    fori_loop,
    leave_tracer,
    raises,
    rows_up_to,
    scan,
    while_loop,
)

# ---- kinds and lanes


@EACH_LOOP
@pytest.mark.parametrize("kind", ["banana", "Auto", None, 3, lx.Lax])
def test_unknown_kind_lists_the_choices(loop: Any, kind: Any) -> None:
    with raises(ValueError, f"kind={kind!r}", "'auto'", "'lax'", "'checkpointed'", "'bounded'", "'residuals'"):
        loop(3, kind=kind)


@EACH_LOOP
@pytest.mark.parametrize("lanes", ["banana", None, 3])
def test_unknown_lanes_lists_the_choices(loop: Any, lanes: Any) -> None:
    with raises(ValueError, f"lanes={lanes!r}", "'lockstep'", "'compact'", "'free'"):
        loop(3, lanes=lanes)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (lx.Lax, "checkpoints"),
        (lx.Lax, "memory"),
        (lx.Bounded, "checkpoints"),
        (lx.Residuals, "checkpoints"),
        (lx.Checkpointed, "memory"),
        (lx.Auto, "checkpoints"),
    ],
)
def test_option_that_the_kind_does_not_use(kind: Any, option: str) -> None:
    with raises(TypeError, option):
        kind(**{option: 3})


# ---- the carry


def carry_through(loop: str, init: Any, out: Any) -> None:
    if loop == "body_fun of while_loop":
        lx.while_loop(lambda _: False, lambda _: out, init)
    elif loop == "body_fun of fori_loop":
        lx.fori_loop(0, 0, lambda _i, _c: out, init)
    else:
        lx.scan(lambda _c, _x: (out, None), init, length=0)


EACH_BODY = pytest.mark.parametrize("where", ["body_fun of while_loop", "body_fun of fori_loop", "f of scan"])


def f32(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.float32)


@EACH_BODY
@pytest.mark.parametrize(
    ("init", "out", "line"),
    [
        ({"a": f32(2)}, {"a": f32(3)}, "['a']: got float32[3], expected float32[2]"),
        ({"a": f32()}, {"a": f32(1)}, "['a']: got float32[1], expected float32[]"),
        ((f32(2), f32()), (f32(2), jnp.zeros((), jnp.int32)), "[1]: got int32[], expected float32[]"),
        (f32(), jnp.zeros(()), "the carry itself: got float64[], expected float32[]"),
        ([[f32()]], [["x"]], "[0][0]: got str 'x', expected float32[]"),
        ({"name": "relu"}, {"name": "tanh"}, "['name']: got str 'tanh', expected str 'relu'"),
        ({"name": "relu"}, {"name": f32()}, "['name']: got float32[], expected str 'relu'"),
        ((1.0, True), (1.0, 1), "[1]: got int 1, expected bool True"),
        ((f32(), f32()), (f32(), jax.random.key(0)), "[1]: got key<fry>[], expected float32[]"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "the carry itself: got key<rbg>[], expected key<fry>[]"),
        (jax.random.key(0), jax.random.PRNGKey(0), "the carry itself: got uint32[2], expected key<fry>[]"),
    ],
)
def test_carry_of_other_types_shows_path_got_and_expected(where: str, init: Any, out: Any, line: str) -> None:
    with raises(TypeError, where, "same types", line):
        carry_through(where, init, out)


@jax.tree_util.register_pytree_node_class
class Sized:
    """A size among the static data of a class, of which nothing tells its name."""

    def __init__(self, x: Any, size: int) -> None:
        self.x, self.size = x, size

    def tree_flatten(self) -> Any:
        return (self.x,), self.size

    @classmethod
    def tree_unflatten(cls, size: int, children: Any) -> "Sized":
        (x,) = children
        return cls(x, size)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["size"])
@dataclass
class Static:
    x: Any
    size: int


@EACH_BODY
@pytest.mark.parametrize(
    ("init", "out", "line"),
    [
        ({"a": f32(), "b": f32()}, {"a": f32()}, "['b']: float32[] is missing from the result"),
        ({"a": f32()}, {"a": f32(), "b": f32(2)}, "['b']: float32[2] is new in the result"),
        ((f32(),), (f32(), (f32(2),)), "[1]: tuple is new in the result"),
        ((f32(), None), (f32(), f32(4)), "[1]: got float32[4], expected None"),
        ((f32(), f32(4)), (f32(), None), "[1]: got None, expected float32[4]"),
        ((f32(),), [f32()], "the carry itself: got list, expected tuple"),
        ({"a": [f32()]}, {"a": f32()}, "['a']: got float32[], expected list"),
        (f32(), None, "the carry itself: got None, expected float32[]"),
        (Sized(f32(), 2), Sized(f32(), 3), "the carry itself: got Sized with the static data 3, expected 2"),
        (Static(f32(), 2), Static(f32(), 3), ".size: got 3, expected 2 (a static field)"),
    ],
)
def test_carry_of_another_structure_shows_the_difference(where: str, init: Any, out: Any, line: str) -> None:
    with raises(TypeError, where, "same structure", line):
        carry_through(where, init, out)


@EACH_BODY
def test_carry_error_lists_all_bad_leaves_and_no_good_one(where: str) -> None:
    init, out = {"a": f32(), "b": f32(), "c": f32()}, {"a": f32(1), "b": f32(), "c": "x"}
    with raises(TypeError, "['a']: got", "['c']: got") as error:
        carry_through(where, init, out)
    assert "['b']" not in str(error.value)


@pytest.mark.parametrize("got", [None, (), (1.0,), (1.0, 2.0, 3.0), 1.0, jnp.zeros(3), {"c": 1.0, "y": 2.0}])
def test_scan_f_that_returns_no_pair(got: Any) -> None:
    with raises(TypeError, "f of scan must return a pair (carry, y)", "Got"):
        lx.scan(lambda *_: got, 1.0, length=3)


@pytest.mark.parametrize("bad", [3, "f", (abs,)])
@pytest.mark.parametrize("argument", ["cond_fun", "body_fun", "body_fun of fori_loop", "f", "stop"])
def test_function_that_is_not_callable(argument: str, bad: Any) -> None:
    calls: Any = {
        "cond_fun": lambda: lx.while_loop(bad, lambda x: x, 0),
        "body_fun": lambda: lx.while_loop(lambda x: x < 3, bad, 0),
        "body_fun of fori_loop": lambda: lx.fori_loop(0, 3, bad, 0),
        "f": lambda: lx.scan(bad, 0, length=3),
        "stop": lambda: lx.scan(lambda c, _: (c, None), 0, length=3, stop=bad),
    }
    with raises(TypeError, argument, "callable"):
        calls[argument]()


# ---- predicates

NOT_ONE_BOOL = [1, 1.0, None, "x", (), (True,), np.ones(1, bool), jnp.ones((2,), bool), jnp.ones((), jnp.int32)]


@pytest.mark.parametrize("got", NOT_ONE_BOOL)
def test_cond_fun_that_returns_no_single_bool(got: Any) -> None:
    with raises(TypeError, "cond_fun of while_loop must return one bool", "Got"):
        lx.while_loop(lambda _: got, lambda c: c, 1.0)


@pytest.mark.parametrize("got", NOT_ONE_BOOL)
def test_stop_that_returns_no_single_bool(got: Any) -> None:
    with raises(TypeError, "stop of scan must return one bool", "Got"):
        lx.scan(lambda c, _: (c, None), 1.0, length=3, stop=lambda *_: got)


# ---- xs, length and the capacity of ys


@pytest.mark.parametrize("length", [None, 2])
def test_xs_of_unequal_rows_lists_them(length: Any) -> None:
    with raises(ValueError, "xs", "['a']: 3 rows", "['b'][0]: 2 rows"):
        lx.scan(lambda c, _: (c, None), 0.0, {"a": jnp.zeros(3), "b": [jnp.zeros((2, 3))]}, length)


@pytest.mark.parametrize("scalar", [1, 2.0, np.float32(1), jnp.zeros(())])
def test_xs_without_rows(scalar: Any) -> None:
    with raises(ValueError, "xs", "leading axis", "[1]: ") as error:
        lx.scan(lambda c, _: (c, None), 0.0, (jnp.zeros(3), scalar))
    assert "[0]" not in str(error.value)


@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("make", [int, np.int64, jnp.int32, jnp.int64, jnp.uint8])
def test_known_length_beyond_xs_is_an_error_at_once(make: Any, throw: bool) -> None:
    with raises(ValueError, "length", "got 4", "xs has 3 rows"):
        lx.scan(SUM, 0.0, jnp.arange(3.0), make(4), throw=throw)


@pytest.mark.parametrize("make", [int, np.int64, jnp.int32])
@pytest.mark.parametrize("xs", [None, jnp.arange(3.0)])
def test_known_negative_length_is_an_error_at_once(make: Any, xs: Any) -> None:
    with raises(ValueError, "length", "got -1"):
        lx.scan(lambda c, _: (c, None), 0.0, xs, make(-1))


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
@pytest.mark.parametrize("length", [4, -1, np.int8(-1), np.uint8(4), np.uint64(2**63), np.int64(2**32)])
def test_traced_length_outside_of_xs_is_an_error_at_run_time(jit: Any, length: Any) -> None:
    with raises(RUN_TIME, "`length` is negative, or more than there is (xs has 3 rows)"):
        jax.block_until_ready(jit(rows_up_to)(jnp.asarray(length)))


@pytest.mark.parametrize("length", [0, 3])
def test_traced_length_within_xs_is_no_error(length: Any) -> None:
    assert jax.jit(rows_up_to)(length)[0] == sum(range(length))


@pytest.mark.parametrize(("length", "reached"), [(4, True), (3, False)])
def test_without_throw_a_length_beyond_xs_scans_what_there_is_and_says_so(length: int, reached: bool) -> None:
    (carry, _), info = jax.jit(lambda n: rows_up_to(n, throw=False, info=True))(length)
    assert (carry, info.num_steps, info.limit_reached) == (3.0, 3, reached)


def test_traced_negative_length_without_xs() -> None:
    with raises(RUN_TIME, "`length` is negative"):
        jax.block_until_ready(jax.jit(lambda n: lx.scan(lambda c, _: (c + 1, None), 0, length=n))(-1))


@pytest.mark.parametrize("length", [1.0, True, "3", jnp.float32(3), jnp.ones(1, int), jnp.asarray(True)])
def test_length_that_is_not_an_integer(length: Any) -> None:
    with raises(TypeError, "scan(length=...)", "expected"):
        lx.scan(lambda c, _: (c, None), 0.0, length=length)


def test_steps_of_a_scan_unknown() -> None:
    with raises(ValueError, "`length`", "`stop`"):
        lx.scan(lambda c, _: (c, None), 0.0)


@pytest.mark.parametrize("options", [{"length": 3}, {"length": None, "stop": lambda c, _: c > 3}])
def test_ys_without_capacity(options: Any) -> None:
    length = options.pop("length")
    with raises(ValueError, "capacity", "max_steps"):
        jax.jit(lambda n: lx.scan(lambda c, _: (c + 1, c), 0, None, n, **options))(length)


def test_reverse_without_a_last_row() -> None:
    with raises(ValueError, "reverse=True", "`xs` or `length`"):
        lx.scan(lambda c, _: (c + 1, None), 0, reverse=True, stop=lambda c, _: c > 3)


# ---- max_steps


@EACH_LOOP
@pytest.mark.parametrize("steps", [1.5, "3", True, (3,), np.ones(1), jnp.ones((), bool)])
def test_max_steps_that_is_not_an_int(loop: Any, steps: Any) -> None:
    with raises(TypeError, f"{loop.__name__}(max_steps=...)", "got", "expected"):
        loop(3, max_steps=steps)


@EACH_LOOP
@pytest.mark.parametrize("steps", [-1, 2**31])
def test_max_steps_outside_of_its_range(loop: Any, steps: int) -> None:
    with raises(ValueError, f"{loop.__name__}(max_steps=...)", f"got {steps}", "from 0 to 2147483647"):
        loop(3, max_steps=steps)


@EACH_LOOP
def test_max_steps_may_be_a_numpy_integer(loop: Any) -> None:
    assert loop(3, max_steps=np.int64(3), info=True)[1].num_steps == 3


# ---- reverse mode where there is none

UNBOUNDED: Any = {
    "while_loop": lambda x, n, **o: lx.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] ** 2), (0, x), **o)[1],
    "fori_loop": lambda x, n, **o: lx.fori_loop(0, n, lambda _, x: x * x, x, **o),
    "scan": lambda x, n, **o: lx.scan(lambda c, _: (c * c, None), x, None, n, **o)[0],
}


@pytest.mark.parametrize("options", [{}, {"max_steps": 3}])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_reverse_mode_through_lax_names_the_kinds_that_have_it(loop: str, options: Any) -> None:
    with raises(ValueError, "reverse mode", "Lax()", "Checkpointed()", "Bounded()", "Residuals()"):
        jax.jit(jax.grad(lambda x, n: UNBOUNDED[loop](x, n, kind="lax", **options)))(2.0, 3)


BUDGETS = [(lx.Checkpointed, "checkpoints", "number of stored carries"), (lx.Auto, "memory", "number of bytes")]


@pytest.mark.parametrize(("kind", "name", "unit"), BUDGETS)
@pytest.mark.parametrize("value", [0, -1, np.int32(0)])
def test_budget_below_one(kind: Any, name: str, unit: str, value: Any) -> None:
    with raises(ValueError, f"{kind.__name__}({name}=...)", f"got {value}", "at least 1", unit):
        kind(value)


@pytest.mark.parametrize(("kind", "name", "unit"), BUDGETS)
@pytest.mark.parametrize("value", [1.5, 2.0, "3", True, (1,)])
def test_budget_that_is_not_an_integer(kind: Any, name: str, unit: str, value: Any) -> None:
    with raises(TypeError, f"{kind.__name__}({name}=...)", "expected an int", unit):
        kind(value)


@pytest.mark.parametrize("options", [{}, {"max_steps": 3}])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_memory_below_one_carry_says_how_much_the_least_is(loop: str, options: Any) -> None:
    gradient = jax.grad(lambda x, n: UNBOUNDED[loop](x, n, kind=lx.Auto(memory=7), **options))
    with raises(ValueError, "Auto(memory=7)", "at least one carry", "8 bytes", "Give memory=8 or more"):
        jax.jit(gradient)(2.0, 3)


@pytest.mark.parametrize("kind", ["bounded", "residuals"])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_kinds_that_need_a_bound_say_so_at_once(loop: str, kind: Any) -> None:
    with raises(ValueError, "kind=" + kind.capitalize(), "static bound", "max_steps="):
        jax.jit(lambda x, n: UNBOUNDED[loop](x, n, kind=kind))(2.0, 3)


@pytest.mark.parametrize("kind", ["auto", "lax", "checkpointed"])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_forward_mode_needs_no_bound(loop: str, kind: Any) -> None:
    tangent = jax.jit(lambda x, n: jax.jvp(lambda x: UNBOUNDED[loop](x, n, kind=kind), (x,), (x,))[1])
    assert tangent(2.0, 2) == 64.0


# ---- key, unroll, limits of fori_loop


@EACH_LOOP
@pytest.mark.parametrize(
    "key",
    [
        0,
        "key",
        jnp.zeros(2),
        jnp.zeros((), jnp.uint32),
        jnp.zeros(3, jnp.uint32),
        jnp.zeros((2, 2), jnp.uint32),
        jax.random.split(jax.random.key(0)),
    ],
    ids=lambda key: getattr(key, "dtype", key),
)
def test_key_that_is_not_one_key(loop: Any, key: Any) -> None:
    with raises(TypeError, f"{loop.__name__}(key=...)", "expected one PRNG key"):
        loop(3, key=key)


@pytest.mark.parametrize("loop", [fori_loop, scan])
@pytest.mark.parametrize("unroll", ["a", 1.5, (2,), jnp.float32(2)])
def test_unroll_that_is_not_an_int(loop: Any, unroll: Any) -> None:
    with raises(TypeError, f"{loop.__name__}(unroll=...)", "expected an int"):
        loop(3, unroll=unroll)


@pytest.mark.parametrize("loop", [fori_loop, scan])
def test_unroll_that_is_negative(loop: Any) -> None:
    with raises(ValueError, f"{loop.__name__}(unroll=...)", "got -1", "positive"):
        loop(3, unroll=-1)


@pytest.mark.parametrize("loop", [fori_loop, scan])
@pytest.mark.parametrize("unroll", [True, 0])
def test_unroll_true_with_traced_length(loop: Any, unroll: Any) -> None:
    with raises(ValueError, f"{loop.__name__}(unroll={unroll})", "static", "unroll=k"):
        jax.jit(lambda n: loop(n, unroll=unroll, max_steps=3))(3)


@pytest.mark.parametrize("unroll", [2, True])
def test_unroll_with_stop(unroll: Any) -> None:
    with raises(ValueError, f"scan(unroll={unroll}", "stop"):
        lx.scan(lambda c, _: (c + 1, c), 0, length=3, unroll=unroll, stop=lambda c, _: c > 1)


@pytest.mark.parametrize("name", ["lower", "upper"])
@pytest.mark.parametrize(
    "limit", [1.0, True, "3", None, np.float32(1), jnp.float32(1), jnp.asarray(True), jnp.ones(1, int)]
)
def test_limit_of_fori_loop_that_is_not_an_integer(name: str, limit: Any) -> None:
    limits: Any = {"lower": 0, "upper": 3, name: limit}
    with raises(TypeError, f"fori_loop({name}=...)", "got", "expected"):
        lx.fori_loop(limits["lower"], limits["upper"], lambda _, x: x, 0)


# ---- values that Python has to know, which JAX refuses


def indexed(value: Any) -> Any:
    return [0, 1, 2][value]


class Doubling(eqx.Module):
    def __call__(self, twice: Any) -> Any:
        return 2 * int(twice)

    def method(self, by: Any, me: Any) -> Any:
        return by * int(me)


def in_body(c: Any) -> Any:
    return {**c, "n": c["n"] + (1 if c["a"][0] else 2)}


def row_of_scan(c: Any, rows: Any) -> Any:
    return c + indexed(rows["n"]), None


def index_of_loop(step: Any, c: Any) -> Any:
    return c + np.asarray(step)


def drawn(c: Any, key: Any) -> Any:
    return c + float(jax.random.uniform(key))


def model(state: Any, now: Any) -> Any:
    return state, int(state["h"]) + now


def limit(c: Any) -> Any:
    return bool(c < 3)


def last(c: Any, _: Any) -> Any:
    return bool(c > 3)


def item(x: Any) -> Any:
    return int(x["k"])


FLAG = {"n": 0, "a": (jnp.array(True),)}
ROWS = jnp.arange(3)
REFUSED: dict[str, tuple[Callable[[], Any], list[Any], str]] = {
    "while_loop": (lambda: lx.while_loop(lambda c: c["n"] < 3, in_body, FLAG), [in_body], "c['a'][0]"),
    "cond_fun of while_loop": (lambda: lx.while_loop(limit, lambda c: c + 1, 0), [limit], "c"),
    "fori_loop": (lambda: lx.fori_loop(2, 5, index_of_loop, 0), [index_of_loop], "step and lower"),
    "scan": (lambda: lx.scan(row_of_scan, 0, {"n": ROWS}), [row_of_scan], "rows['n']"),
    "stop of scan": (lambda: lx.scan(lambda c, x: (c + x, x), 0, ROWS, stop=last), [last], "c and x"),
    "key": (lambda: lx.while_loop(lambda c: c < 3, drawn, 0.0, key=jax.random.key(0)), [drawn], "i and key"),
    "rollout": (lambda: lx.rollout(model, {"h": 0}, inputs=ROWS), [model], "carry.state['h']"),
    "lanes_map": (lambda: lx.lanes_map(item, {"k": ROWS}), [item], "x['k']"),
    "explain": (lambda: lx.explain(item, {"k": jnp.ones(())}), [item], "x['k']"),
    "rewrite_loops": (lambda: lx.rewrite_loops(item)(x={"k": ROWS[0]}), [item], "x['k']"),
    "a module": (lambda: lx.while_loop(limit, Doubling(), 0), [Doubling.__call__, limit], "twice"),
    "a partial method": (
        lambda: lx.fori_loop(0, 2, lambda i, c: lx.fori_loop(0, 2, partial(Doubling().method), c), 0),
        [Doubling.method],
        "me",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_error_about_a_traced_value_names_the_function_and_the_path(case: str) -> None:
    run, functions, path = REFUSED[case]
    with pytest.raises((TypeError, jax.errors.TracerIntegerConversionError)) as error:
        run()
    message = str(error.value)
    for function in functions:
        code = inspect.unwrap(function).__code__
        assert f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}" in message
    assert re.search(rf"depends on the values? of the arguments? {re.escape(path)}\.", message)
    assert "loopax/_" not in message


# ---- tracers that have leaked


@pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])
def test_body_that_closes_over_a_leaked_tracer(loop: Any) -> None:
    tracer = leave_tracer()
    run: Any = {
        while_loop: lambda: lx.while_loop(lambda x: x < 3, lambda x: x + tracer, 0.0),
        fori_loop: lambda: lx.fori_loop(0, 3, lambda _, x: x + tracer, 0.0),
        scan: lambda: lx.scan(lambda x, _: (x + tracer, None), 0.0, length=3),
    }[loop]
    with pytest.raises(jax.errors.UnexpectedTracerError):
        run()


def test_carry_that_is_a_leaked_tracer() -> None:
    with pytest.raises(jax.errors.UnexpectedTracerError):
        lx.fori_loop(0, 3, lambda _, x: x + 1.0, leave_tracer())


def test_leak_from_a_body_names_the_body() -> None:
    left = []

    def leaking(x: Any) -> Any:
        left.append(x)
        return x + 1.0

    lx.while_loop(lambda x: x < 3.0, leaking, 0.0)
    with raises(jax.errors.UnexpectedTracerError, f"leaking at {__file__}:", "loopax.while_loop"):
        jnp.sin(left[0])


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))])
def test_loops_leak_no_tracers(transform: Any) -> None:
    def loss(x: Any) -> Any:
        return lx.fori_loop(0, 3, lambda _, y: lx.fori_loop(0, 2, lambda _, z: z * x, y), x)

    with jax.checking_leaks():
        out = jax.jit(transform(loss))(1.0)
    assert jnp.all(out == (7.0 if transform is jax.grad else 1.0))
