"""Bad input and bounds that are reached: every error names the argument, and comes as soon as it can."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import loopax as lx

RUN_TIME = (eqx.EquinoxRuntimeError, jax.errors.JaxRuntimeError)  # the second under plain `jax.jit`
KINDS = ["auto", "lax", "checkpointed", "bounded", "residuals"]


def while_loop(steps: Any, **options: Any) -> Any:
    return lx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, 2.0 * c[1]), (0, 1.0), **options)


def fori_loop(steps: Any, **options: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: 2.0 * x, 1.0, **options)


def scan(steps: Any, **options: Any) -> Any:
    return lx.scan(lambda c, _: (2.0 * c, c), 1.0, None, steps, **options)


def scan_with_stop(steps: Any, **options: Any) -> Any:
    return lx.scan(lambda c, _: (c + 1, c), 0, stop=lambda c, _: c >= steps, **options)


EACH_LOOP = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])
EACH_LIMITED = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan, scan_with_stop])


def raises(error: Any, *parts: str) -> Any:
    """An error whose message has these parts, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


def count_callbacks(f: Any, *arguments: Any) -> int:
    return jax.jit(f).lower(*arguments).as_text().count("callback")


def loop_bodies(jaxpr: Any) -> list[Any]:
    """The bodies of the loops of a program that are not inside another loop."""
    found = []
    for eqn in jaxpr.eqns:
        inner = [p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")]
        is_loop = eqn.primitive.name in ("loop", "linear_loop", "replay")
        found += inner if is_loop else [body for j in inner for body in loop_bodies(j)]
    return found


def assert_no_callback_in_a_loop(program: Any) -> None:
    bodies = loop_bodies(program.jaxpr)
    assert "callback" in str(program)
    assert bodies
    assert not any("callback" in str(body) for body in bodies)


def eagerly(f: Any) -> Any:
    return f


def leave_tracer() -> Any:
    left = []
    jax.jit(left.append)(1.0)
    return left[0]


# ---- kinds and lanes


@EACH_LOOP
@pytest.mark.parametrize("kind", ["banana", "Auto", None, 3, lx.Lax])
def test_unknown_kind_lists_the_choices(loop: Any, kind: Any) -> None:
    with raises(ValueError, f"kind={kind!r}", "'auto'", "'lax'", "'checkpointed'", "'bounded'", "'residuals'"):
        loop(3, kind=kind)


@EACH_LOOP
@pytest.mark.parametrize("lanes", ["banana", None, 3])
def test_unknown_lanes_lists_the_choices(loop: Any, lanes: Any) -> None:
    with raises(ValueError, f"lanes={lanes!r}", "'lockstep'"):
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


@EACH_LOOP
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lanes": "compact"}, "lanes='compact'"),
        ({"progress": True}, "progress=True"),
        ({"kind": lx.Checkpointed(checkpoints=3)}, "Checkpointed(checkpoints=3)"),
        ({"kind": lx.Auto(memory=1)}, "Auto(memory=1)"),
    ],
)
def test_what_is_planned_says_that_it_is_not_implemented(loop: Any, options: Any, named: str) -> None:
    with raises(NotImplementedError, named, "not implemented yet"):
        loop(3, **options)


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


@EACH_BODY
@pytest.mark.parametrize(
    ("init", "out", "line"),
    [
        ({"a": f32(), "b": f32()}, {"a": f32()}, "['b']: float32[] is missing from the result"),
        ({"a": f32()}, {"a": f32(), "b": f32(2)}, "['b']: float32[2] is new in the result"),
        ((f32(),), (f32(), (f32(2),)), "[1][0]: float32[2] is new in the result"),
        ((f32(), None), (f32(), f32(4)), "[1]: float32[4] is new in the result"),
        ((f32(), f32(4)), (f32(), None), "[1]: float32[4] is missing from the result"),
        ((f32(),), [f32()], "got the structure      PyTreeDef([*])\n  expected the structure PyTreeDef((*,))"),
        (f32(), None, "the carry itself: float32[] is missing from the result"),
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

SUM = lambda c, x: (c + x, c)


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


def rows_up_to(length: Any, **options: Any) -> Any:
    return lx.scan(SUM, 0.0, jnp.arange(3.0), length, **options)


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
def test_traced_max_steps_says_to_pass_length(loop: Any) -> None:
    with raises(TypeError, f"{loop.__name__}(max_steps=...)", "static", "`length=`"):
        jax.jit(lambda n: loop(3, max_steps=n))(3)


@EACH_LOOP
def test_max_steps_may_be_a_numpy_integer(loop: Any) -> None:
    assert loop(3, max_steps=np.int64(3), info=True)[1].num_steps == 3


# ---- the bound is reached


@EACH_LIMITED
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_bound_that_stops_a_loop_raises(loop: Any, jit: Any) -> None:
    name = loop.__name__.removesuffix("_with_stop")
    with raises(RUN_TIME, f"loopax.{name}: max_steps=3 stopped a loop", "larger max_steps", "throw=False"):
        jax.block_until_ready(jit(lambda n: loop(n, max_steps=3))(jnp.int32(5)))


@pytest.mark.parametrize("loop", [while_loop, scan_with_stop])
def test_bound_that_stops_a_loop_raises_outside_of_jit(loop: Any) -> None:
    with raises(eqx.EquinoxRuntimeError, "max_steps=3 stopped"):
        loop(5, max_steps=3)


@pytest.mark.parametrize("loop", [fori_loop, scan])
def test_bound_below_a_static_number_of_steps_is_an_error_at_once(loop: Any) -> None:
    with raises(ValueError, f"loopax.{loop.__name__}: max_steps=3 stopped a loop"):
        loop(5, max_steps=3)


LAST = {
    while_loop: lambda result: result[1],
    fori_loop: lambda result: result,
    scan: lambda result: result[0],
    scan_with_stop: lambda result: 2.0 ** result[0],
}


@EACH_LIMITED
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
@pytest.mark.parametrize(("steps", "taken"), [(5, 3), (3, 3), (2, 2)])
def test_without_throw_there_is_what_there_is_and_info_says_so(loop: Any, jit: Any, steps: int, taken: int) -> None:
    result, info = jit(lambda n: loop(n, max_steps=3, throw=False, info=True))(steps)
    assert (LAST[loop](result), info.num_steps, info.limit_reached) == (2.0**taken, taken, steps > 3)


@EACH_LIMITED
@pytest.mark.parametrize("steps", [2, 3])
def test_bound_that_stops_nothing_does_not_raise(loop: Any, steps: int) -> None:
    result, info = jax.jit(lambda n: loop(n, max_steps=3, info=True))(steps)
    assert (LAST[loop](result), info.num_steps, info.limit_reached) == (2.0**steps, steps, False)


@EACH_LIMITED
def test_bound_of_no_steps(loop: Any) -> None:
    result, info = jax.jit(lambda n: loop(n, max_steps=0, throw=False, info=True))(5)
    assert (LAST[loop](result), info.num_steps, info.limit_reached) == (1.0, 0, True)


@pytest.mark.parametrize("xs", [jnp.arange(5.0), None])
def test_the_end_of_the_rows_of_a_scan_with_stop_is_a_normal_end(xs: Any) -> None:
    length = 5 if xs is None else None
    _, info = lx.scan(lambda c, _: (c + 1, c), 0, xs, length, stop=lambda c, _: c > 9, max_steps=5, info=True)
    assert (info.num_steps, info.limit_reached) == (5, False)


@pytest.mark.parametrize(("last", "steps", "reached"), [(3, 3, False), (9, 4, True)])
def test_bound_below_the_rows_of_a_scan_with_stop(last: int, steps: int, reached: bool) -> None:
    options: Any = {"stop": lambda c, _: c >= last, "max_steps": 4, "throw": False, "info": True}
    _, info = lx.scan(lambda c, _: (c + 1, c), 0, jnp.arange(5), **options)
    assert (info.num_steps, info.limit_reached) == (steps, reached)


def test_limits_too_far_apart_to_count() -> None:
    with raises(ValueError, "fori_loop: 2147483648 steps", "2147483647"):
        lx.fori_loop(-1, 2**31 - 1, lambda _, x: x, 0)


# ---- every result depends on the check

RESULTS = {
    "carry": lambda r: r[0][0][0],
    "unchanged leaf": lambda r: r[0][0][1],
    "ys": lambda r: r[0][1],
    "num_steps": lambda r: r[1].num_steps,
    "limit_reached": lambda r: r[1].limit_reached,
}


@pytest.mark.parametrize("result", RESULTS)
def test_each_result_alone_raises(result: str) -> None:
    def run(steps: Any, x: Any) -> Any:
        init = (x, x)
        return RESULTS[result](lx.scan(lambda c, _: ((2.0 * c[0], c[1]), c), init, None, steps, max_steps=3, info=True))

    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(run)(5, 1.0))


def doubled(x: Any, steps: Any) -> Any:
    return lx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, 2.0 * c[1]), (jnp.int32(0), x), max_steps=3)[1]


DERIVATIVES: Any = {
    "grad": jax.grad(doubled),
    "value_and_grad": jax.value_and_grad(doubled),
    "jvp": lambda x, n: jax.jvp(lambda x: doubled(x, n), (x,), (x,))[1],
    "linearize": lambda x, n: jax.linearize(lambda x: doubled(x, n), x)[1](x),
    "grad of grad": jax.grad(jax.grad(lambda x, n: doubled(x * x, n))),
    "vmap of grad": lambda x, n: jax.vmap(jax.grad(doubled), (None, 0))(x, jnp.stack([n, n])),
}


@pytest.mark.parametrize("jit", [jax.jit, eagerly])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_each_derivative_alone_raises(derivative: str, jit: Any) -> None:
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jit(DERIVATIVES[derivative])(jnp.float64(1.0), jnp.int32(5)))


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_within_the_bound_do_not_raise(derivative: str) -> None:
    expected = {"value_and_grad": [8.0, 8.0], "grad of grad": [16.0], "vmap of grad": [[8.0, 8.0]]}
    found = jax.jit(DERIVATIVES[derivative])(jnp.float64(1.0), jnp.int32(3))
    assert [np.asarray(x).tolist() for x in jax.tree.leaves(found)] == expected.get(derivative, [8.0])


# ---- under vmap and in nested loops


@EACH_LIMITED
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_bound_reached_in_one_lane_raises(loop: Any, jit: Any) -> None:
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jit(jax.vmap(lambda n: loop(n, max_steps=3)))(jnp.array([1, 5, 2])))


@EACH_LIMITED
def test_bound_reached_in_no_lane_does_not_raise(loop: Any) -> None:
    _, info = jax.vmap(lambda n: loop(n, max_steps=3, info=True))(jnp.array([1, 3, 2]))
    assert info.num_steps.tolist() == [1, 3, 2]


@EACH_LIMITED
def test_without_throw_info_is_per_lane(loop: Any) -> None:
    _, info = jax.vmap(lambda n: loop(n, max_steps=3, throw=False, info=True))(jnp.array([1, 5, 3]))
    assert (info.num_steps.tolist(), info.limit_reached.tolist()) == ([1, 3, 3], [False, True, False])


def test_length_beyond_xs_in_one_lane_raises() -> None:
    with raises(RUN_TIME, "xs has 3 rows"):
        jax.vmap(rows_up_to)(jnp.array([1, 4, 2]))


def inner(x: Any, steps: Any, **options: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: x + 1.0, x, max_steps=3, **options)


def nested_fori(steps: Any, inner: Any = inner) -> Any:
    return lx.fori_loop(0, 2, lambda _, x: inner(x, steps), 0.0)


def nested_while(steps: Any) -> Any:
    return lx.while_loop(lambda x: x < 2, lambda x: inner(x, steps), 0.0)


def nested_scan(steps: Any) -> Any:
    return lx.scan(lambda c, _: (inner(c, steps), None), 0.0, jnp.arange(2))[0]


def nested_thrice(steps: Any) -> Any:
    return lx.fori_loop(0, 2, lambda i, x: x + nested_fori(steps), 0.0)


def nested_in_cond_fun(steps: Any) -> Any:
    return lx.while_loop(lambda x: inner(x, steps) < 6, lambda x: x + 1.0, 0.0)


def nested_in_stop(steps: Any) -> Any:
    return lx.scan(lambda c, _: (c + 1.0, None), 0.0, jnp.arange(3), stop=lambda c, _: inner(c, steps) > 5)[0]


NESTED = [nested_fori, nested_while, nested_scan, nested_thrice, nested_in_cond_fun, nested_in_stop]


@pytest.mark.parametrize("outer", NESTED)
def test_bound_reached_in_an_inner_loop_raises(outer: Any) -> None:
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(outer)(5))


def test_bound_reached_in_an_inner_loop_raises_outside_of_jit() -> None:
    with raises(eqx.EquinoxRuntimeError, "max_steps=3 stopped"):
        lx.fori_loop(0, 5, lambda i, x: inner(x, i), 0.0)


@pytest.mark.parametrize("outer", NESTED)
def test_bound_reached_in_no_inner_loop_does_not_raise(outer: Any) -> None:
    expected = {
        nested_fori: 6,
        nested_while: 3,
        nested_scan: 6,
        nested_thrice: 12,
        nested_in_cond_fun: 3,
        nested_in_stop: 3,
    }
    assert jax.jit(outer)(jnp.int32(3)) == expected[outer]


@pytest.mark.parametrize("outer", NESTED)
def test_no_callback_in_the_body_of_an_outer_loop(outer: Any) -> None:
    program = jax.make_jaxpr(outer)(jnp.int32(3))
    assert_no_callback_in_a_loop(program)


@pytest.mark.parametrize("outer", [nested_fori, nested_scan])
def test_no_callback_in_the_body_of_a_differentiated_outer_loop(outer: Any) -> None:
    def loss(x: Any, steps: Any) -> Any:
        return x * outer(steps) ** 2 + lx.fori_loop(0, 2, lambda _, x: inner(x, steps), x)

    program = jax.make_jaxpr(jax.grad(loss))(1.0, jnp.int32(3))
    assert_no_callback_in_a_loop(program)


def test_an_inner_check_is_raised_once() -> None:
    assert count_callbacks(nested_thrice, 3) == count_callbacks(lambda n: inner(0.0, n), 3) > 0


def test_inner_loop_under_vmap_is_raised_after_the_outer_loop() -> None:
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.vmap(nested_fori)(jnp.array([1, 5]))


TRANSFORMED_INNER = {
    "jit": jax.jit(inner),
    "vmap": lambda x, n: jax.vmap(inner)(jnp.stack([x, x]), jnp.stack([1, n]))[1],
    "grad": lambda x, n: x + 3.0 * jax.grad(inner)(x, n),
    "checkpoint": jax.checkpoint(inner),
    "cond": lambda x, n: lax.cond(n > 0, inner, lambda x, _: x, x, n),
    "lax.fori_loop": lambda x, n: lax.fori_loop(0, 1, lambda _, x: inner(x, n), x),
}


@pytest.mark.parametrize("how", TRANSFORMED_INNER)
def test_transformed_inner_loop_still_raises(how: str) -> None:
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(lambda n: nested_fori(n, TRANSFORMED_INNER[how]))(5))


@pytest.mark.parametrize("how", TRANSFORMED_INNER)
def test_transformed_inner_loop_within_its_bound_does_not_raise(how: str) -> None:
    assert jax.jit(lambda n: nested_fori(n, TRANSFORMED_INNER[how]))(3) == 6.0


def test_branch_that_is_not_taken_does_not_raise() -> None:
    untaken = lambda x, n: lax.cond(n < 0, inner, lambda x, _: x, x, n)
    assert jax.jit(lambda n: nested_fori(n, untaken))(5) == 0.0


def test_throw_is_for_its_own_loop_only() -> None:
    outer = lambda n: lx.fori_loop(0, n, lambda _, x: inner(x, n), 0.0, max_steps=2, throw=False)
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(outer)(5))
    assert jax.jit(lambda n: nested_fori(n, lambda x, n: inner(x, n, throw=False)))(5) == 6.0


@pytest.mark.parametrize(("counts", "fails"), [([2, 3], False), ([2, 4], True)])
def test_a_lane_that_is_done_raises_no_error_of_its_inner_loop(counts: list[int], fails: bool) -> None:
    def triangle(count: Any) -> Any:
        return lx.fori_loop(0, count, lambda i, x: inner(x, i + 1), 0.0)

    if fails:
        with raises(RUN_TIME, "max_steps=3 stopped"):
            jax.vmap(triangle)(jnp.array(counts))
    else:
        assert jax.vmap(triangle)(jnp.array(counts)).tolist() == [3.0, 6.0]


# ---- no callback without need

NO_CHECK: Any = {
    "while_loop without a bound": lambda n: lx.while_loop(lambda x: x < n, lambda x: x + 1, 0),
    "static fori_loop": lambda n: lx.fori_loop(0, 3, lambda _, x: x + 1, n),
    "static fori_loop within its bound": lambda n: lx.fori_loop(0, 3, lambda _, x: x + 1, n, max_steps=3),
    "fori_loop to an int32": lambda n: lx.fori_loop(0, n.astype(jnp.int32), lambda _, x: x + 1, 0),
    "fori_loop between int8": lambda n: lx.fori_loop(n.astype(jnp.int8), jnp.int8(3), lambda _, x: x + 1, 0),
    "fori_loop to a uint8 within any bound": lambda n: lx.fori_loop(
        0, n.astype(jnp.uint8), lambda _, x: x + 1, 0, max_steps=255
    ),
    "scan over rows": lambda n: lx.scan(lambda c, x: (c + x, c), n, jnp.arange(3)),
    "static scan": lambda n: lx.scan(lambda c, _: (c + 1, c), n, length=3),
    "static scan within its bound": lambda n: lx.scan(lambda c, _: (c + 1, c), n, length=3, max_steps=4),
    "scan of uint8 steps over enough rows": lambda n: lx.scan(
        lambda c, x: (c + x, c), 0, jnp.arange(255), n.astype(jnp.uint8)
    ),
    "scan with stop over rows": lambda n: lx.scan(lambda c, x: (c + x, c), n, jnp.arange(3), stop=lambda c, _: c > 9),
    "scan with stop without rows": lambda n: lx.scan(lambda c, _: (c + 1, None), n, stop=lambda c, _: c > 9),
    "while_loop, throw=False": lambda n: while_loop(n, max_steps=3, throw=False, info=True),
    "fori_loop, throw=False": lambda n: fori_loop(n, max_steps=3, throw=False, info=True),
    "fori_loop between int64, throw=False": lambda n: fori_loop(n, throw=False),
    "scan, throw=False": lambda n: scan(n, max_steps=3, throw=False, info=True),
    "scan over rows, throw=False": lambda n: rows_up_to(n, throw=False, info=True),
    "key without a bound, throw=False": lambda n: lx.while_loop(
        lambda x: x < n, lambda x, key: x + 1, 0, key=jax.random.key(0), throw=False
    ),
    "inner loop, throw=False": lambda n: nested_fori(n, lambda x, n: inner(x, n, throw=False)),
}


@pytest.mark.parametrize("program", NO_CHECK)
def test_no_callback_where_nothing_can_fail_or_throw_is_false(program: str) -> None:
    assert "callback" not in str(jax.make_jaxpr(NO_CHECK[program])(3))
    assert count_callbacks(NO_CHECK[program], 3) == 0


WITH_CHECK: Any = {
    "while_loop": lambda n: while_loop(n, max_steps=3),
    "fori_loop": lambda n: fori_loop(n, max_steps=3),
    "scan": lambda n: scan(n, max_steps=3),
    "scan over rows": rows_up_to,
}


@pytest.mark.parametrize("program", WITH_CHECK)
def test_callback_where_something_can_fail(program: str) -> None:
    assert count_callbacks(WITH_CHECK[program], 3) > 0


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


@pytest.mark.parametrize("kind", ["auto", "checkpointed"])
@pytest.mark.parametrize("loop", UNBOUNDED)
def test_reverse_mode_without_a_bound_is_not_implemented(loop: str, kind: Any) -> None:
    with raises(NotImplementedError, "without a static bound", "max_steps="):
        jax.jit(jax.grad(lambda x, n: UNBOUNDED[loop](x, n, kind=kind)))(2.0, 3)


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
@pytest.mark.parametrize("unroll", [0, -1])
def test_unroll_that_is_not_positive(loop: Any, unroll: Any) -> None:
    with raises(ValueError, f"{loop.__name__}(unroll=...)", f"got {unroll}", "positive"):
        loop(3, unroll=unroll)


@pytest.mark.parametrize("loop", [fori_loop, scan])
def test_unroll_true_with_traced_length(loop: Any) -> None:
    with raises(ValueError, f"{loop.__name__}(unroll=True)", "static", "unroll=k"):
        jax.jit(lambda n: loop(n, unroll=True, max_steps=3))(3)


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


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x]))])
def test_loops_leak_no_tracers(transform: Any) -> None:
    def loss(x: Any) -> Any:
        return lx.fori_loop(0, 3, lambda _, y: lx.fori_loop(0, 2, lambda _, z: z * x, y), x)

    with jax.checking_leaks():
        out = jax.jit(transform(loss))(1.0)
    assert jnp.all(out == (7.0 if transform is jax.grad else 1.0))


# ---- effects and collectives


def printed(x: Any) -> None:
    jax.debug.print("{}", x, ordered=True)


def called_back(x: Any) -> None:
    jax.debug.callback(lambda _: None, x, ordered=True)


def input_output(x: Any) -> None:
    io_callback(lambda _: None, None, x)


def ordered_input_output(x: Any) -> None:
    io_callback(lambda _: None, None, x, ordered=True)


EFFECTS = [printed, called_back, input_output, ordered_input_output, jax.jit(input_output)]


def with_effect(effect: Any, kind: Any = "auto") -> Any:
    def body(_: Any, x: Any) -> Any:
        effect(lax.stop_gradient(x))
        return 2.0 * x

    return lambda x: lx.fori_loop(0, 3, body, x, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("effect", EFFECTS)
def test_reverse_mode_refuses_effects(effect: Any, kind: Any) -> None:
    with raises(NotImplementedError, "a loop is differentiated", "effects", "io_callback", "jax.pure_callback"):
        jax.grad(with_effect(effect, kind))(1.0)


@pytest.mark.parametrize("effect", EFFECTS)
def test_forward_mode_refuses_effects(effect: Any) -> None:
    with raises(NotImplementedError, "a loop is differentiated", "effects", "io_callback", "jax.pure_callback"):
        jax.jvp(with_effect(effect), (1.0,), (1.0,))


@pytest.mark.parametrize("effect", EFFECTS)
def test_effects_outside_of_derivatives_are_allowed(effect: Any) -> None:
    loop = with_effect(effect)
    assert loop(1.0) == 8.0
    assert jax.grad(lambda x: x * loop(lax.stop_gradient(x)))(1.0) == 8.0
    jax.effects_barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_unordered_debug_callback_and_pure_callback_are_differentiated(kind: Any) -> None:
    seen = []

    def body(_: Any, x: Any) -> Any:
        fixed = lax.stop_gradient(x)
        jax.debug.callback(lambda x: seen.append(float(x)), fixed)
        return x * jax.pure_callback(lambda x: np.asarray(x) + 1.0, jax.ShapeDtypeStruct((), float), fixed)

    assert jax.grad(lambda x: lx.fori_loop(0, 2, body, x, kind=kind))(1.0) == 6.0
    jax.effects_barrier()
    assert sorted(seen) == [1.0, 2.0]


def total(steps: Any, x: Any, **options: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: lax.psum(x, "lanes"), x, **options)


def total_in_jit(steps: Any, x: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: jax.jit(lambda x: lax.psum(x, "lanes"))(x), x)


def total_in_inner_loop(steps: Any, x: Any) -> Any:
    return lx.fori_loop(0, steps, lambda _, x: total(1, x), x)


def total_while(steps: Any, x: Any) -> Any:
    return lx.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, lax.psum(c[1], "lanes")), (0, x))[1]


TOTALS = pytest.mark.parametrize("loop", [total, total_in_jit, total_in_inner_loop, total_while])


@TOTALS
def test_collective_under_counts_per_lane_is_refused(loop: Any) -> None:
    with raises(NotImplementedError, "communicates", "'lanes'", "different numbers of steps"):
        jax.vmap(loop, axis_name="lanes")(jnp.array([1, 2]), jnp.array([1.0, 2.0]))


@TOTALS
def test_collective_under_one_count_for_all_lanes_is_allowed(loop: Any) -> None:
    lanes = jax.jit(jax.vmap(loop, in_axes=(None, 0), axis_name="lanes"))
    assert lanes(3, jnp.array([1.0, 2.0])).tolist() == [12.0, 12.0]


def test_collective_over_another_axis_is_allowed() -> None:
    rows = jax.vmap(total, in_axes=(None, 0), axis_name="lanes")
    assert jax.vmap(rows, axis_name="rows")(jnp.array([1, 2]), jnp.array([[1.0, 2.0], [1.0, 3.0]])).tolist() == [
        [3.0, 3.0],
        [8.0, 8.0],
    ]


def test_condition_that_all_lanes_agree_on_by_a_collective_is_allowed() -> None:
    def agree(x: Any) -> Any:
        return lx.while_loop(lambda x: lax.psum(x, "lanes") < 9.0, lambda x: 2.0 * x, x)

    assert jax.vmap(agree, axis_name="lanes")(jnp.array([1.0, 2.0])).tolist() == [4.0, 8.0]
