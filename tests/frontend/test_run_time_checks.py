"""Bounds and lengths that are found out when a program runs: raised once, after the outermost loop."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.limited_loops import (
    EACH_LIMITED,
    RUN_TIME,
    assert_no_callback_in_a_loop,
    count_callbacks,
    eagerly,
    fori_loop,
    raises,
    rows_up_to,
    scan,
    scan_with_stop,
    while_loop,
)

# ---- the bound is reached


@EACH_LIMITED
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_bound_that_stops_a_loop_raises(loop: Any, jit: Any) -> None:
    name = loop.__name__.removesuffix("_with_stop")
    where = f"loopax.{name} at ", "limited_loops.py:", f"({loop.__name__}): max_steps=3 stopped a loop"
    with raises(RUN_TIME, *where, "larger max_steps", "throw=False"):
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


# ---- what is known when the program is traced


def at_once(f: Any) -> Any:
    """Inside of `jit`, what does not depend on its arguments is computed when it is traced."""

    def run(*arguments: Any, **options: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return f(*arguments, **options)

    return run


KNOWN: Any = {
    "while_loop": lambda n: while_loop(n, max_steps=3)[1],
    "fori_loop": lambda n: fori_loop(n, max_steps=3),
    "scan": lambda n: scan(n, max_steps=3)[0],
    "scan over rows": lambda n: rows_up_to(n)[0],
    "nested": nested_fori,
    "gradient": lambda n: jax.grad(doubled)(1.0, n),
    "Buffer": lambda n: lx.fori_loop(0, n, lambda i, b: b.append(i), lx.Buffer(3, like=jnp.int32(0)))[-1],
    "History": lambda n: lx.History(4, like=0.0)[n],
}


@pytest.mark.parametrize("program", KNOWN)
def test_check_that_is_known_to_hold_is_none(program: str) -> None:
    """Neither of values that are known then, nor of values that are not."""
    f = KNOWN[program]
    three = jnp.int32(3)
    expected = jax.jit(f)(three)
    assert jax.jit(lambda: at_once(f)(three))() == expected
    assert jax.jit(at_once(f))(three) == expected
    assert "callback" not in str(jax.make_jaxpr(lambda: at_once(f)(three))())


@pytest.mark.parametrize("program", KNOWN)
def test_check_that_is_known_to_fail_raises_when_the_program_is_traced(program: str) -> None:
    f, four = KNOWN[program], jnp.int32(4)
    is_argument = program in ("fori_loop", "nested", "scan over rows")  # which is wrong, as static ones are
    with pytest.raises(ValueError if is_argument else eqx.EquinoxRuntimeError, match=r"^(loopax\.|scan\()"):
        jax.make_jaxpr(lambda: at_once(f)(four))()
    program_with_check = jax.jit(at_once(f)).lower(four).compile()  # which is not known then
    with pytest.raises(RUN_TIME, match=r"Error: loopax\."):
        jax.block_until_ready(program_with_check(four))


def test_known_checks_in_the_body_of_a_loop() -> None:
    def known(x: Any, steps: int) -> Any:
        return x + at_once(while_loop)(steps, max_steps=3)[1]

    assert jax.jit(lambda n: lx.fori_loop(0, n, lambda _, x: known(x, 3), 0.0))(2) == 16.0
    with raises(RUN_TIME, "max_steps=3 stopped"):
        jax.block_until_ready(jax.jit(lambda n: lx.fori_loop(0, n, lambda _, x: known(x, 4), 0.0))(2))
